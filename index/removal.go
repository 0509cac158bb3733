package index

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
)

var (
	// ErrRemoved: a blob was marked to be removed since somebody saw that it is there. It has to be looked for again.
	ErrRemoved = errors.New("a blob was removed meanwhile")
	// ErrRemoving: a batch of blobs is being removed, or was left by whoever began to.
	ErrRemoving = errors.New("a batch of blobs is being removed")
)

// Copy is a copy of a blob in the store.
type Copy struct {
	Digest     identity.Digest
	Size       int64 // bytes
	Created    time.Time
	Generation string
}

// Removal is the last batch of blobs that were marked to be removed from the store.
type Removal struct {
	Number uint64 // of the batch; each one has a higher one than those before it. 0: there was none
	Copies []Copy // those of the batch that may not be gone yet, in no order; none: it has ended
	// floor is a number up to which it is not known any more which blobs were marked.
	floor uint64
}

// Has says whether a copy of a blob is being removed.
func (r Removal) Has(d identity.Digest) bool {
	for i := range r.Copies {
		if r.Copies[i].Digest == d {
			return true
		}
	}
	return false
}

func (r Removal) encode() []byte {
	var b body
	b.uint(r.Number)
	b.uint(r.floor)
	b.uint(uint64(len(r.Copies)))
	for _, c := range r.Copies {
		b.sum(c.Digest)
		b.int(c.Size)
		b.time(c.Created)
		b.text(c.Generation)
	}
	return b
}

// A copy takes at least its digest and three bytes.
const leastCopy = 32 + 3

func decodeRemoval(data []byte) (m Removal, err error) {
	r := reader{left: data}
	m.Number, m.floor = r.uint(), r.uint()
	for range r.count(leastCopy) {
		m.Copies = append(m.Copies, Copy{Digest: r.sum(), Size: r.int(), Created: r.time(), Generation: r.text()})
	}
	return m, r.err("removal")
}

func (t tx) removal() (Removal, error) {
	b, err := t.load(stateKey(stateRemoval))
	if err != nil || b == nil {
		return Removal{}, err
	}
	return decodeRemoval(b)
}

// Removal returns the last batch. Whoever wants a blob referred to asks for it before looking whether the store has the
// blob, waits while Has says so, and gives Apply an Unremoved with the ops.
func (ix *Index) Removal(ctx context.Context) (m Removal, err error) {
	err = ix.view(ctx, func(t tx) error {
		m, err = t.removal()
		return err
	})
	return m, err
}

// Unremoved has Apply fail with ErrRemoved if one of the blobs was marked to be removed after batch Since, or if that
// is so long ago that nobody knows.
type Unremoved struct {
	Since uint64
	Blobs []identity.Digest
}

func (o Unremoved) check() error { return nil }

func (o Unremoved) apply(t *change) error { return o.holds(t.tx) }

func (o Unremoved) holds(t tx) error {
	m, err := t.removal()
	switch {
	case err != nil:
		return err
	case m.Number == o.Since:
		return nil
	case m.Number < o.Since || m.floor > o.Since: // the index was made anew, or it was long ago
		return ErrRemoved
	}
	for _, d := range o.Blobs {
		b, err := t.load(goneKey(d))
		if err != nil {
			return err
		}
		if b == nil {
			continue
		}
		if n, _, err := decodeGone(b); err != nil || n > o.Since {
			return errors.Join(err, fmt.Errorf("%s: %w", d, ErrRemoved))
		}
	}
	return nil
}

// Unchanged returns the error with which an Apply of the op would fail now.
func (ix *Index) Unchanged(ctx context.Context, o Unremoved) error {
	return ix.view(ctx, o.holds)
}

func encodeGone(number uint64, at time.Time) []byte {
	var b body
	b.uint(number)
	b.time(at)
	return b
}

func decodeGone(data []byte) (number uint64, at time.Time, err error) {
	r := reader{left: data}
	number, at = r.uint(), r.time()
	return number, at, r.err("removed blob")
}

// Waiting says which of the LinkBlobs keep a blob, beside manifests.
type Waiting struct {
	Now  time.Time
	Then time.Time // those that last longer keep it; not before Now
	// Busy says of a repository whether those keep it, too, that end between Now and Then. nil: of none.
	Busy func(repo string) bool
}

// Condemn marks those copies to be removed, as one batch, to whose blobs no manifest refers and that no LinkBlob keeps,
// and returns the batch: without copies if there are none such. Whoever calls it removes them from the store and then
// calls Removed. ErrRemoving while an earlier batch has not ended.
func (ix *Index) Condemn(ctx context.Context, copies []Copy, w Waiting) (m Removal, err error) {
	err = ix.kv.Update(ctx, func(x Txn) error {
		t := tx{x}
		last, err := t.removal()
		if err != nil {
			return err
		}
		if len(last.Copies) > 0 {
			return ErrRemoving
		}
		m = Removal{Number: last.Number, floor: last.floor}
		for _, c := range copies {
			if uses, err := t.waited(c.Digest, w); err != nil {
				return err
			} else if !uses {
				m.Copies = append(m.Copies, c)
			}
		}
		if len(m.Copies) == 0 {
			return nil
		}
		m.Number++
		for _, c := range m.Copies {
			if err := t.store(goneKey(c.Digest), encodeGone(m.Number, w.Now)); err != nil {
				return err
			}
		}
		return t.store(stateKey(stateRemoval), m.encode())
	})
	if err != nil {
		return Removal{}, fmt.Errorf("mark blobs to be removed: %w", err)
	}
	return m, nil
}

// waited says whether a manifest refers to a blob, or a LinkBlob keeps it.
func (t tx) waited(d identity.Digest, w Waiting) (bool, error) {
	if t.any(in(tableBlob).sum(d)) {
		return true, nil
	}
	prefix := in(tableLease).sum(d)
	for k, v := range t.Range(prefix, after(prefix)) {
		parts := split(k)
		parts.sum()
		repo := parts.text()
		b, err := unseal(k, v)
		if err != nil {
			return true, err
		}
		l, err := decodeLease(b)
		if err != nil {
			return true, err
		}
		if w.Then.Before(l.until) || w.Busy != nil && w.Now.Before(l.until) && w.Busy(repo) {
			return true, nil
		}
	}
	return false, nil
}

// Removed ends the batch of a number, but for those copies of which it is not known whether they are gone. It does
// nothing if somebody else has ended the batch.
func (ix *Index) Removed(ctx context.Context, number uint64, unknown []Copy) error {
	return ix.kv.Update(ctx, func(x Txn) error {
		t := tx{x}
		m, err := t.removal()
		if err != nil || m.Number != number || len(m.Copies) <= len(unknown) {
			return err
		}
		m.Copies = unknown
		return t.store(stateKey(stateRemoval), m.encode())
	})
}

// ForgetRemoved forgets which blobs were marked to be removed before a time: who saw a blob before that looks again.
func (ix *Index) ForgetRemoved(ctx context.Context, before time.Time) error {
	for from := []byte(in(tableGone)); from != nil; {
		var next []byte
		err := ix.kv.Update(ctx, func(x Txn) error {
			t, seen := tx{x}, 0
			var keys [][]byte
			next = nil
			m, err := t.removal()
			if err != nil {
				return err
			}
			was := m.floor
			err = t.walk(from, after(in(tableGone)), func(k, v []byte) ([]byte, error) {
				if seen++; seen > ix.limits.steps {
					next = bytes.Clone(k)
					return nil, errStop
				}
				b, err := unseal(k, v)
				if err != nil {
					return nil, err
				}
				n, at, err := decodeGone(b)
				if err == nil && at.Before(before) {
					keys, m.floor = append(keys, bytes.Clone(k)), max(m.floor, n)
				}
				return nil, err
			})
			if err != nil || m.floor == was && len(keys) == 0 {
				return err
			}
			if err := t.deleteAll(keys); err != nil {
				return err
			}
			return t.store(stateKey(stateRemoval), m.encode())
		})
		if err != nil {
			return fmt.Errorf("forget removed blobs: %w", err)
		}
		from = next
	}
	return nil
}
