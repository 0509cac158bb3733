package pgkv

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/internal/testpg"
)

const writers = 8

// load is writers that put keys of their own, each numbered, until they are told to stop.
type load struct {
	kv    *KV
	stop  atomic.Bool
	group sync.WaitGroup
	total atomic.Int64 // acknowledged
	acked [writers][]int
	down  atomic.Int64 // answers that the index is not available
}

func keyOf(writer, n int) []byte { return fmt.Appendf(nil, "%d/%08d", writer, n) }

func (l *load) run(t *testing.T) {
	for w := range writers {
		l.group.Go(func() {
			for n := 0; !l.stop.Load(); n++ {
				err := l.kv.Update(context.Background(), func(x index.Txn) error {
					if _, err := x.Get(keyOf(w, n-1)); err != nil {
						return err
					}
					return x.Put(keyOf(w, n), keyOf(w, n))
				})
				switch {
				case err == nil:
					l.acked[w] = append(l.acked[w], n)
					l.total.Add(1)
				case errors.Is(err, index.ErrUnavailable):
					l.down.Add(1)
				default:
					t.Errorf("writer %d: %v", w, err)
					return
				}
			}
		})
	}
}

// until waits for a number of acknowledged writes.
func (l *load) until(t *testing.T, n int64) {
	for l.total.Load() < n && !t.Failed() {
		if err := l.kv.View(t.Context(), func(index.Txn) error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
}

// TestFailover kills the primary in the middle of writes. They go on on the standby that is promoted, through the same
// KV, and it has all that was acknowledged.
func TestFailover(t *testing.T) {
	r := testpg.NewReplicated(t, 2)
	kv, err := Open(t.Context(), r.URL("postgres"), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer kv.Close()
	l := &load{kv: kv}
	l.run(t)
	defer l.group.Wait()
	defer l.stop.Store(true)
	l.until(t, 500)
	r.KillPrimary()
	for l.down.Load() < writers && !t.Failed() { // each was told, or could have been
		if _, err := kv.Now(t.Context()); err != nil && !errors.Is(err, index.ErrUnavailable) {
			t.Fatal(err)
		}
	}
	if err := kv.View(t.Context(), read("1/00000000")); !errors.Is(err, index.ErrUnavailable) ||
		strings.Contains(err.Error(), testpg.Password()) || strings.Contains(err.Error(), "\n") {
		t.Errorf("a view without a primary: %v", err)
	}
	before := l.total.Load()
	r.Promote(t)
	l.until(t, before+500)
	l.stop.Store(true)
	l.group.Wait()
	lost := 0
	err = kv.View(t.Context(), func(x index.Txn) error {
		for w, acked := range l.acked {
			for _, n := range acked {
				v, err := x.Get(keyOf(w, n))
				if err != nil {
					return err
				}
				if string(v) != string(keyOf(w, n)) {
					lost++
				}
			}
		}
		return nil
	})
	if err != nil || lost > 0 {
		t.Errorf("%d acknowledged, %d lost (%v)", l.total.Load(), lost, err)
	}
	t.Logf("acknowledged %d, %d of them before the promotion; lost %d; told that it is not available %d times",
		l.total.Load(), before, lost, l.down.Load())
}

func read(key string) func(index.Txn) error {
	return func(x index.Txn) error {
		_, err := x.Get([]byte(key))
		return err
	}
}

// TestStandbysGone: without a standby a write is not acknowledged, and when the wait for one is broken off nobody knows
// whether it was kept.
func TestStandbysGone(t *testing.T) {
	r := testpg.NewReplicated(t, 1)
	kv, err := Open(t.Context(), r.URL("postgres"), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer kv.Close()
	r.Standbys[0].Kill()
	done := make(chan error, 1)
	go func() {
		done <- kv.Update(context.Background(), func(x index.Txn) error { return x.Put([]byte("a"), []byte("b")) })
	}()
	url := r.Primary.URL("postgres")
	for testpg.Exec(t, url, "select count(*) from pg_stat_activity where wait_event = 'SyncRep'") != "1" {
		select {
		case err := <-done:
			t.Fatalf("acknowledged without a standby: %v", err)
		default:
		}
	}
	testpg.Exec(t, url, "select pg_cancel_backend(pid) from pg_stat_activity where wait_event = 'SyncRep'")
	if err := <-done; !errors.Is(err, index.ErrUnavailable) || !strings.Contains(err.Error(), "not known") {
		t.Errorf("a commit of which no standby knows: %v", err)
	}
}
