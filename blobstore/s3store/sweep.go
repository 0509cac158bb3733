package s3store

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
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
		st.sweepUploads, st.sweepMultiparts, st.sweepNotes, st.sweepCopies, st.sweepTails,
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
		s, err := st.loadState(ctx, id)
		if err == nil && s.Ended && o.Modified.Before(before) {
			removed++
			_, err = st.begin(ctx, id, false) // which removes what is left
		}
		switch {
		case errors.Is(err, blobstore.ErrUploadUnknown), errors.Is(err, blobstore.ErrUploadBusy):
		case errors.Is(err, blobstore.ErrDamaged): // whoever resumes it drops it
		case err != nil:
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
			needed, err := st.needs(ctx, keyCopy(m.Key), func(s state) bool { return s.Multipart == m.ID })
			if err == nil && !needed {
				err = st.change(ctx)
			}
			if err == nil && !needed {
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

// needs says whether an upload is open and needs something that its state, if it reads, tells. One that a call of this
// process works on needs everything, as not all is noted yet.
func (st *Store) needs(ctx context.Context, id string, it func(s state) bool) (bool, error) {
	st.mu.Lock()
	busy := st.active[id] != nil
	st.mu.Unlock()
	if busy {
		return true, nil
	}
	s, err := st.loadState(ctx, id)
	switch {
	case errors.Is(err, blobstore.ErrUploadUnknown):
		return false, nil
	case errors.Is(err, blobstore.ErrDamaged): // whoever resumes it drops it
		err = nil
	}
	return err != nil || it(s), err
}

func (st *Store) sweepCopies(ctx context.Context, before time.Time) (removed int, err error) {
	err = st.groups(ctx, "", func(g group) (more bool, err error) {
		n, err := st.sweepStates(ctx, g, before)
		if removed += n; err != nil {
			return false, err
		}
		if len(g.copies) == 0 || len(g.copies) == 1 && g.shown() {
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

// sweepStates removes midstates whose copy is gone.
func (st *Store) sweepStates(ctx context.Context, g group, before time.Time) (removed int, err error) {
	for _, o := range g.states {
		name := strings.TrimSuffix(keyCopy(o.Key), midstatesMark)
		listed := slices.ContainsFunc(g.copies, func(c bucket.Entry) bool { return keyCopy(c.Key) == name })
		if listed || !o.Modified.Before(before) {
			continue
		}
		_, err := st.b.Head(ctx, st.bytesKey(g.digest, name))
		if err == nil {
			continue // it came while the store was listed
		}
		if errors.Is(err, bucket.ErrAbsent) {
			err = st.change(ctx)
		}
		if err == nil {
			removed++
			err = st.b.Remove(ctx, o.Key)
		}
		if err != nil {
			return removed, err
		}
	}
	return removed, nil
}

func (st *Store) sweepCopy(ctx context.Context, g group, name string) (removed bool, err error) {
	open := func(state) bool { return true }
	if needed, err := st.needs(ctx, strings.TrimPrefix(name, unnamedMark), open); err != nil || needed {
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
	if n, err := st.readNote(ctx, g.digest); err == nil && n.Copy == name {
		return false, nil // set aside for people to look at
	} else if err != nil && !errors.Is(err, bucket.ErrAbsent) {
		return false, err
	}
	if err := st.change(ctx); err != nil {
		return false, err
	}
	return true, st.removeCopy(ctx, g.digest, name, math.MaxInt64)
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
	needed, err := st.needs(ctx, id, func(s state) bool {
		return slices.ContainsFunc(s.Tails, func(t tail) bool { return t.Name == name })
	})
	if err != nil || needed {
		return false, err
	}
	if err := st.change(ctx); err != nil {
		return false, err
	}
	return true, st.b.Remove(ctx, o.Key)
}
