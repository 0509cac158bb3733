package boltkv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"go.etcd.io/bbolt"
	bbolterrors "go.etcd.io/bbolt/errors"

	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/kvtest"
)

func TestConformance(t *testing.T) {
	for name, o := range map[string]Options{"checked": {Timeout: 1}, "checked later": {Timeout: 1, CheckLater: 1}} {
		t.Run(name, func(t *testing.T) { conform(t, o) })
	}
}

func conform(t *testing.T, o Options) {
	kvtest.Run(t, kvtest.Engine{
		Open: func(place string) (index.KV, error) {
			kv, err := Open(place, o)
			if err != nil {
				return nil, err
			}
			return kv, nil
		},
		Copy: func(from, to string) error {
			b, err := os.ReadFile(from)
			if err != nil {
				return err
			}
			return os.WriteFile(to, b, 0o600)
		},
	})
}

// TestInUse: the second opener is told which file, within the timeout.
func TestInUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "index.db")
	kv := mustOpen(t, path)
	defer kv.Close()
	if _, err := Open(path, Options{Timeout: 1}); !errors.Is(err, index.ErrInUse) || !strings.Contains(err.Error(), path) {
		t.Errorf("%v", err)
	}
}

func commits(t *testing.T, kv *KV) (n int) {
	t.Helper()
	err := kv.db.View(func(x *bbolt.Tx) error {
		n = x.ID()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestGroup: updates that come while another one is at work are committed together, also when some of them fail.
func TestGroup(t *testing.T) {
	const n = 60
	kv := mustOpen(t, filepath.Join(t.TempDir(), "index.db"))
	defer kv.Close()
	before := commits(t, kv)
	errEarly := errors.New("failed before it wrote")
	var wg sync.WaitGroup
	err := kv.Update(t.Context(), func(x index.Txn) error {
		for i := range n {
			wg.Go(func() {
				err := kv.Update(t.Context(), func(x index.Txn) error {
					if i%2 == 0 {
						return errEarly
					}
					return x.Put(row(i), nil)
				})
				if (i%2 == 0) != errors.Is(err, errEarly) {
					t.Errorf("%d: %v", i, err)
				}
			})
		}
		for waiting(kv) < n {
			runtime.Gosched()
		}
		return x.Put(row(n), nil)
	})
	if err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	if got := commits(t, kv) - before; got != 2 {
		t.Errorf("%d commits for an update and %d that waited for it", got, n)
	}
	if rows, err := contents(t, kv); err != nil || len(rows) != n/2+1 {
		t.Errorf("%d rows, %v", len(rows), err)
	}
}

func waiting(kv *KV) int {
	kv.mu.Lock()
	defer kv.mu.Unlock()
	return len(kv.queue)
}

// TestLeaveQueue: an update whose context ends while it waits is dropped at once, and the group goes on without it.
func TestLeaveQueue(t *testing.T) {
	kv := mustOpen(t, filepath.Join(t.TempDir(), "index.db"))
	defer kv.Close()
	var wg sync.WaitGroup
	err := kv.Update(t.Context(), func(x index.Txn) error {
		ctx, cancel := context.WithCancel(t.Context())
		left := make(chan error, 1)
		wg.Go(func() {
			left <- kv.Update(ctx, func(index.Txn) error { return errors.New("ran although its caller had left") })
		})
		wg.Go(func() {
			if err := kv.Update(t.Context(), func(x index.Txn) error { return x.Put(row(2), nil) }); err != nil {
				t.Error(err)
			}
		})
		for waiting(kv) < 2 {
			runtime.Gosched()
		}
		cancel()
		if err := <-left; !errors.Is(err, context.Canceled) {
			t.Errorf("the one that left got: %v", err)
		}
		return x.Put(row(1), nil)
	})
	if err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	if rows, err := contents(t, kv); err != nil || len(rows) != 2 {
		t.Errorf("%d rows, %v", len(rows), err)
	}
}

// TestEngineErrors: what bbolt refuses is an error of that update alone.
func TestEngineErrors(t *testing.T) {
	kv := mustOpen(t, filepath.Join(t.TempDir(), "index.db"))
	defer kv.Close()
	err := kv.Update(t.Context(), func(x index.Txn) error {
		return errors.Join(x.Put(row(1), nil), x.Put(nil, nil))
	})
	if !errors.Is(err, bbolterrors.ErrKeyRequired) {
		t.Errorf("empty key: %v", err)
	}
	if rows, err := contents(t, kv); err != nil || len(rows) != 0 {
		t.Errorf("%d rows, %v", len(rows), err)
	}
}

// TestCloseEndsCommitter: no goroutine is left behind.
func TestCloseEndsCommitter(t *testing.T) {
	kv := mustOpen(t, filepath.Join(t.TempDir(), "index.db"))
	if err := kv.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-kv.done:
	default:
		t.Error("the committer still runs after Close")
	}
}

// TestFull: an update for which there is no space fails alone, and the next one that fits is kept.
func TestFull(t *testing.T) {
	path := filepath.Join(t.TempDir(), "index.db")
	kv := mustOpen(t, path)
	put := func(i int) error {
		return kv.Update(t.Context(), func(x index.Txn) error { return x.Put(row(i), make([]byte, 3000)) })
	}
	kv.db.MaxSize = growBy + 1
	kept := 0
	for put(kept) == nil {
		if kept++; kept > 10000 {
			t.Fatal("the limit is not kept")
		}
	}
	if rows, err := contents(t, kv); err != nil || len(rows) != kept {
		t.Errorf("full: %d rows of %d, %v", len(rows), kept, err)
	}
	kv.db.MaxSize = 0
	if err := errors.Join(put(kept), kv.Close()); err != nil {
		t.Error(err)
	}
	kv = mustOpen(t, path)
	defer kv.Close()
	if rows, err := contents(t, kv); err != nil || len(rows) != kept+1 {
		t.Errorf("opened again: %d rows of %d, %v", len(rows), kept+1, err)
	}
}

// fill puts rows in order of key, in the form of the index's listing rows.
func fill(b *testing.B, kv *KV, from, to int) {
	b.Helper()
	err := kv.Update(b.Context(), func(x index.Txn) error {
		for i := from; i < to; i++ {
			if err := x.Put(fmt.Appendf(nil, "a%032d%064d", 1, i), make([]byte, 64)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
}

// BenchmarkOpen opens, and so checks, a file of a million rows.
func BenchmarkOpen(b *testing.B) {
	path := filepath.Join(b.TempDir(), "index.db")
	kv := mustOpen(b, path)
	for i := range 20 {
		fill(b, kv, i*50000, (i+1)*50000)
	}
	if err := kv.Close(); err != nil {
		b.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(info.Size())
	for b.Loop() {
		if err := mustOpen(b, path).Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkUpdate is one put by one caller, and by many at once.
func BenchmarkUpdate(b *testing.B) {
	for _, callers := range []int{1, 16, 128} {
		b.Run(fmt.Sprint(callers), func(b *testing.B) {
			kv := mustOpen(b, filepath.Join(b.TempDir(), "index.db"))
			defer kv.Close()
			b.SetParallelism(max(1, callers/runtime.GOMAXPROCS(0)))
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					put := func(x index.Txn) error { return x.Put([]byte("key"), nil) }
					if err := kv.Update(context.Background(), put); err != nil {
						b.Error(err)
					}
				}
			})
		})
	}
}
