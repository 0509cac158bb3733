package s3store

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store/bucket"
	"github.com/kiln-registry/kiln-registry/identity"
)

const asideName = "aside"

// note is what aside/HEX says of a copy that was set aside. It is put before the copy is hidden, and holds only while
// the marker shows no copy. The bytes stay where they are.
type note struct {
	Copy    string    `json:"copy"`
	Size    int64     `json:"size"`
	Created time.Time `json:"created"`
	Why     string    `json:"why"`
	Since   time.Time `json:"since"`
}

func (n note) info(d identity.Digest) blobstore.AsideInfo {
	i := blobstore.Info{Digest: d, Size: n.Size, Created: n.Created, Generation: n.Copy}
	return blobstore.AsideInfo{Info: i, Why: n.Why, Since: n.Since}
}

func (st *Store) noteKey(d identity.Digest) string { return st.b.Key(asideName, d.Hex()) }

// readNote reads what aside/HEX says. bucket.ErrAbsent.
func (st *Store) readNote(ctx context.Context, d identity.Digest) (n note, err error) {
	_, err = st.b.Get(ctx, st.noteKey(d), smallObject, func(body []byte) error {
		n = note{}
		if unseal(body, &n) != nil || !validCopy(n.Copy) {
			return fmt.Errorf("%w: %s is not what this program writes", blobstore.ErrDamaged, st.noteKey(d))
		}
		return nil
	})
	return n, err
}

// loadAside reads all notes. What other processes set aside after that is not found, but not quarantined, to this one.
func (st *Store) loadAside(ctx context.Context) error {
	return st.notes(ctx, func(d identity.Digest, n note, holds bool) error {
		if holds {
			st.mu.Lock()
			st.aside[d] = n
			st.mu.Unlock()
		}
		return nil
	})
}

// notes calls fn with each note, and says whether it holds.
func (st *Store) notes(ctx context.Context, fn func(d identity.Digest, n note, holds bool) error) error {
	prefix := st.b.Key(asideName) + "/"
	for o, err := range st.b.List(ctx, prefix, "", 0) {
		if err != nil {
			return err
		}
		d, err := identity.ParseDigest("sha256:" + keyCopy(o.Key))
		if err != nil {
			continue // not of this program
		}
		n, err := st.readNote(ctx, d)
		if errors.Is(err, bucket.ErrAbsent) {
			continue
		} else if err != nil {
			return err
		}
		l, _, err := st.readLive(ctx, d)
		if err != nil && !errors.Is(err, bucket.ErrAbsent) {
			return err
		}
		if err := fn(d, n, l.Copy == ""); err != nil {
			return err
		}
	}
	return nil
}

// asideOf returns the note of a blob, if this process knows one. It holds only while the marker shows nothing.
func (st *Store) asideOf(d identity.Digest) (n note, ok bool) {
	st.mu.Lock()
	defer st.mu.Unlock()
	n, ok = st.aside[d]
	return n, ok
}

// SetAside implements blobstore.Quarantine.
func (st *Store) SetAside(ctx context.Context, i blobstore.Info, why string) error {
	if err := st.setAside(ctx, i, why); err != nil {
		return fmt.Errorf("set blob %s aside, copy %.80q: %w", i.Digest, i.Generation, err)
	}
	return nil
}

func (st *Store) setAside(ctx context.Context, i blobstore.Info, why string) error {
	if err := st.change(ctx); err != nil {
		return err
	}
	l, o, err := st.readLive(ctx, i.Digest)
	if errors.Is(err, bucket.ErrAbsent) || err == nil && (l.Copy == "" || l.Copy != i.Generation) {
		return blobstore.ErrNotFound
	} else if err != nil {
		return err
	}
	if err := st.dropReceipt(ctx, i); err != nil {
		return err
	}
	n := note{l.Copy, l.Size, o.Modified, why, time.Now().UTC()}
	body, err := seal(n)
	if err != nil {
		return err
	}
	if _, err := st.b.Put(ctx, st.noteKey(i.Digest), body, bucket.Condition{}); err != nil {
		return err
	}
	st.mu.Lock()
	st.aside[i.Digest] = n
	st.mu.Unlock()
	hidden, err := st.hide(ctx, i)
	if err != nil {
		return err
	}
	if !hidden { // another copy came meanwhile, or the copy went
		st.mu.Lock()
		delete(st.aside, i.Digest)
		st.mu.Unlock()
		return and(blobstore.ErrNotFound, st.b.Remove(ctx, st.noteKey(i.Digest)))
	}
	return nil
}

// Aside implements blobstore.Quarantine.
func (st *Store) Aside(ctx context.Context) iter.Seq2[blobstore.AsideInfo, error] {
	return func(yield func(blobstore.AsideInfo, error) bool) {
		st.mu.Lock()
		aside := maps.Clone(st.aside)
		st.mu.Unlock()
		for _, d := range slices.SortedFunc(maps.Keys(aside), identity.Digest.Compare) {
			l, _, err := st.readLive(ctx, d)
			if err != nil {
				yield(blobstore.AsideInfo{}, fmt.Errorf("list quarantine: %w", err))
				return
			}
			if l.Copy == "" && !yield(aside[d].info(d), nil) {
				return
			}
		}
	}
}

// release removes what was set aside of a blob: its bytes and then the note.
func (st *Store) release(ctx context.Context, d identity.Digest) error {
	n, ok := st.asideOf(d)
	if !ok {
		return nil
	}
	if err := st.releaseNote(ctx, d, n); err != nil {
		return err
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	delete(st.aside, d)
	return nil
}

func (st *Store) releaseNote(ctx context.Context, d identity.Digest, n note) error {
	if err := st.change(ctx); err != nil {
		return err
	}
	if err := st.removeCopy(ctx, d, n.Copy, n.Size); err != nil {
		return err
	}
	return st.b.Remove(ctx, st.noteKey(d))
}

// sweepNotes removes notes that do not hold: of a copy that was not hidden after all, or one that was replaced.
func (st *Store) sweepNotes(ctx context.Context, before time.Time) (removed int, err error) {
	err = st.notes(ctx, func(d identity.Digest, n note, holds bool) error {
		if holds || !n.Since.Before(before) {
			return nil
		}
		if err := st.change(ctx); err != nil {
			return err
		}
		removed++
		l, _, err := st.readLive(ctx, d)
		if err == nil && l.Copy == n.Copy {
			return st.b.Remove(ctx, st.noteKey(d))
		} else if err != nil {
			return err
		}
		return st.releaseNote(ctx, d, n)
	})
	return removed, err
}

// Link implements blobstore.Linker.
func (st *Store) Link(ctx context.Context, i blobstore.Info, ttl time.Duration) (blobstore.Link, error) {
	l, err := st.link(ctx, i, ttl)
	if errors.Is(err, bucket.ErrAbsent) {
		err = blobstore.ErrNotFound
	}
	if err != nil {
		return blobstore.Link{}, fmt.Errorf("link to blob %s: %w", i.Digest, err)
	}
	return l, nil
}

func (st *Store) link(ctx context.Context, i blobstore.Info, ttl time.Duration) (l blobstore.Link, err error) {
	if err := st.shows(ctx, i); err != nil {
		return l, err
	}
	key := st.bytesKey(i.Digest, i.Generation)
	o, err := st.b.Head(ctx, key)
	if err == nil && o.Size != i.Size {
		err = fmt.Errorf("%w: %s has %d bytes of %d", blobstore.ErrCut, key, o.Size, i.Size)
	}
	if err == nil {
		l.URL, l.Until, err = st.b.Link(ctx, key, ttl)
	}
	return l, err
}

// shows refuses a copy that can't be one, or was set aside.
func (st *Store) shows(ctx context.Context, i blobstore.Info) error {
	if !validCopy(i.Generation) {
		return blobstore.ErrNotFound
	}
	if n, ok := st.asideOf(i.Digest); ok && n.Copy == i.Generation {
		if l, _, err := st.readLive(ctx, i.Digest); err != nil {
			return err
		} else if l.Copy != i.Generation {
			return blobstore.ErrQuarantined
		}
	}
	return nil
}
