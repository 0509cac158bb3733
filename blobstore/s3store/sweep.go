package s3store

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store/bucket"
)

// Sweep implements blobstore.Sweeper. What it removes was left by a process that was killed, or could not reach the
// server any more: uploads that ended by half, multipart uploads and tails that no open upload knows of, and copies
// that were hidden or never shown. It lists the whole store.
func (st *Store) Sweep(ctx context.Context, before time.Time) (removed int, err error) {
	for _, sweep := range []func(context.Context, time.Time) (int, error){
		st.sweepUploads, st.sweepMultiparts, st.sweepCopies, st.sweepTails,
	} {
		n, err := sweep(ctx, before)
		removed += n
		if err != nil {
			return removed, fmt.Errorf("sweep %s: %w", st.b.Config, err)
		}
	}
	return removed, nil
}

func (st *Store) sweepUploads(ctx context.Context, before time.Time) (removed int, err error) {
	prefix := st.b.Key(uploadsName) + "/"
	for o, err := range st.b.List(ctx, prefix, "", 0) {
		if err != nil {
			return removed, err
		}
		id := strings.TrimPrefix(o.Key, prefix)
		s, known, err := st.knows(ctx, id)
		if err == nil && known && s.Ended && o.Modified.Before(before) {
			removed++
			_, err = st.begin(ctx, id, false) // which removes what is left
		}
		if err != nil && !errors.Is(err, blobstore.ErrUploadUnknown) {
			return removed, err
		}
	}
	return removed, nil
}

func (st *Store) sweepMultiparts(ctx context.Context, before time.Time) (removed int, err error) {
	for _, prefix := range []string{st.b.Key(blobsName) + "/", st.b.Key(unnamedName) + "/"} {
		for m, err := range st.b.Multiparts(ctx, prefix) {
			if err != nil {
				return removed, err
			}
			if !m.Initiated.Before(before) {
				continue
			}
			s, known, err := st.knows(ctx, keyCopy(m.Key))
			if err == nil && (!known || s.Multipart != m.ID) {
				removed++
				err = st.b.Abort(ctx, m.Key, m.ID)
			}
			if err != nil {
				return removed, err
			}
		}
	}
	return removed, nil
}

// knows says whether an upload is open, and where it is.
func (st *Store) knows(ctx context.Context, id string) (s state, known bool, err error) {
	s, err = st.loadState(ctx, id)
	switch {
	case errors.Is(err, blobstore.ErrUploadUnknown):
		return s, false, nil
	case errors.Is(err, blobstore.ErrDamaged): // whoever resumes it drops it
		return s, true, nil
	}
	return s, true, err
}

func (st *Store) sweepCopies(ctx context.Context, before time.Time) (removed int, err error) {
	err = st.groups(ctx, "", func(g group) (more bool, err error) {
		if len(g.copies) == 0 || len(g.copies) == 1 && g.marker.Size > 0 {
			return true, nil
		}
		for _, o := range g.copies {
			if !o.Modified.Before(before) {
				continue
			}
			gone, err := st.sweepCopy(ctx, g, keyCopy(o.Key))
			if gone {
				removed++
			}
			if err != nil {
				return false, err
			}
		}
		return true, nil
	})
	return removed, err
}

func (st *Store) sweepCopy(ctx context.Context, g group, name string) (removed bool, err error) {
	if _, known, err := st.knows(ctx, strings.TrimPrefix(name, unnamedMark)); err != nil || known {
		return false, err
	}
	// Its upload has ended: if it was to be shown, the marker says so by now.
	l, _, err := st.readLive(ctx, g.digest)
	switch {
	case err != nil && !errors.Is(err, bucket.ErrAbsent):
		return false, err
	case l.Copy == name:
		return false, nil
	}
	if err := st.change(ctx); err != nil {
		return false, err
	}
	return true, st.removeCopy(ctx, g.digest, name)
}

func (st *Store) sweepTails(ctx context.Context, before time.Time) (removed int, err error) {
	prefix := st.b.Key(tailsName) + "/"
	for o, err := range st.b.List(ctx, prefix, "", 0) {
		if err != nil {
			return removed, err
		}
		id, name, _ := strings.Cut(strings.TrimPrefix(o.Key, prefix), "/")
		if !validID(id) || !o.Modified.Before(before) {
			continue
		}
		gone, err := st.sweepTail(ctx, o, id, name)
		if gone {
			removed++
		}
		if err != nil {
			return removed, err
		}
	}
	return removed, nil
}

func (st *Store) sweepTail(ctx context.Context, o bucket.Entry, id, name string) (removed bool, err error) {
	s, known, err := st.knows(ctx, id)
	if err != nil {
		return false, err
	}
	for _, t := range s.Tails {
		if known && t.Name == name {
			return false, nil
		}
	}
	if err := st.change(ctx); err != nil {
		return false, err
	}
	return true, st.b.Remove(ctx, o.Key)
}
