package boltkv

import (
	"bytes"
	"fmt"
	"iter"
	"runtime"
	"runtime/debug"

	"go.etcd.io/bbolt"

	"github.com/kiln-registry/kiln-registry/index"
)

// guard calls into bbolt, which panics, or touches memory that is not mapped, when its file is damaged: both become
// ErrDamaged.
func guard(fn func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = damaged(r)
		}
	}()
	return fn()
}

func damaged(r any) error {
	if isFault(r) {
		r = "a page is not in the file"
	}
	return fmt.Errorf("%w: %v", index.ErrDamaged, r)
}

// txn is one transaction, or the part of one group's transaction in which one update runs.
type txn struct {
	bucket *bbolt.Bucket
	path   string
	wrote  bool
	err    error         // damage that was met; everything fails from then on
	spare  *bbolt.Cursor // of a Range that has ended, for the next one; nil: there is none
}

// begun returns a txn on a bbolt transaction. ErrDamaged.
func (kv *KV) begun(t *bbolt.Tx) (*txn, error) {
	x := &txn{path: kv.path}
	err := guard(func() error {
		if x.bucket = t.Bucket(bucketName); x.bucket == nil {
			return fmt.Errorf("%w: it has no bucket %q", index.ErrDamaged, bucketName)
		}
		return nil
	})
	if err != nil {
		return nil, kv.named("read", err)
	}
	return x, nil
}

// run calls fn. Its panics are its caller's, but for a fault in the mapped file, which is damage.
func (t *txn) run(fn func(index.Txn) error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		r := recover()
		if r != nil && !isFault(r) {
			panic(r)
		}
		if r != nil {
			t.fail(r)
		}
		if t.err != nil {
			err = t.err
		}
	}()
	return fn(t)
}

// isFault says whether a panic comes from touching an address that is not mapped, nil pointers excepted.
func isFault(r any) bool {
	e, ok := r.(runtime.Error)
	if !ok {
		return false
	}
	at, ok := e.(interface{ Addr() uintptr })
	return ok && at.Addr() >= 1<<12
}

func (t *txn) fail(r any) { t.err = fmt.Errorf("read %s: %w", t.path, damaged(r)) }

// catch, deferred around calls into bbolt, turns their panics into the txn's error.
func (t *txn) catch(err *error) {
	if r := recover(); r != nil {
		t.fail(r)
		*err = t.err
	}
}

// Get implements index.Txn.
func (t *txn) Get(key []byte) (value []byte, err error) {
	if t.err != nil {
		return nil, t.err
	}
	defer t.catch(&err)
	return t.bucket.Get(key), nil
}

// Put implements index.Txn.
func (t *txn) Put(key, value []byte) (err error) {
	if t.err != nil {
		return t.err
	}
	defer t.catch(&err)
	t.wrote = true
	return t.bucket.Put(key, append(make([]byte, 0, len(value)), value...))
}

// Delete implements index.Txn.
func (t *txn) Delete(key []byte) (err error) {
	if t.err != nil {
		return t.err
	}
	defer t.catch(&err)
	t.wrote = true
	return t.bucket.Delete(key)
}

// Range implements index.Txn.
func (t *txn) Range(from, to []byte) iter.Seq2[[]byte, []byte] {
	return func(yield func([]byte, []byte) bool) {
		c := t.spare
		t.spare = nil
		key, value := t.step(func() (k, v []byte) {
			if c == nil {
				c = t.bucket.Cursor()
			}
			return c.Seek(from)
		})
		for key != nil && (to == nil || bytes.Compare(key, to) < 0) && yield(key, value) {
			key, value = t.step(c.Next)
		}
		t.spare = c
	}
}

// step moves a cursor; a nil key means that there is no more, or that the txn failed.
func (t *txn) step(move func() ([]byte, []byte)) (key, value []byte) {
	if t.err != nil {
		return nil, nil
	}
	var err error
	defer t.catch(&err)
	return move()
}

// Pack implements index.Packer: the pages of the group's transaction are filled whole.
func (t *txn) Pack() { t.bucket.FillPercent = 1 }
