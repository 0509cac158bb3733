package index_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/index/memkv"
)

// shared runs a test on an index that two processes use, as two Index values stand for: on each engine.
func shared(t *testing.T, test func(t *testing.T, a, b *index.Index)) {
	for name, open := range map[string]func() (index.KV, error){
		"memory": func() (index.KV, error) { return new(memkv.Disk).Open(7) },
		"bolt": func() (index.KV, error) {
			return boltkv.Open(filepath.Join(t.TempDir(), "index.db"), boltkv.Options{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			kv, err := open()
			if err != nil {
				t.Fatal(err)
			}
			a, err := index.New(t.Context(), kv)
			if err != nil {
				t.Fatal(err)
			}
			defer a.Close()
			b, err := index.New(t.Context(), kv)
			if err != nil {
				t.Fatal(err)
			}
			test(t, a, b)
		})
	}
}

// TestNext: of those who decide by one state of a repository one goes on, whichever process they are of.
func TestNext(t *testing.T) {
	shared(t, func(t *testing.T, a, b *index.Index) {
		const each = 50
		var wg sync.WaitGroup
		for n, ix := range []*index.Index{a, b, a, b} {
			wg.Go(func() {
				for done := 0; done < each; {
					last, err := ix.Last(t.Context(), "r")
					if err != nil {
						t.Error(err)
						return
					}
					at := index.Owe{Repo: "r", Seq: last + 1, At: time.Unix(1, 0), Refs: fmt.Append(nil, n, done)}
					switch err := ix.Apply(t.Context(), index.Next{Repo: "r", Seq: last + 1}, at); {
					case err == nil:
						done++
					case !errors.Is(err, index.ErrChanged):
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		want := uint64(0)
		for o, err := range a.Owed(t.Context(), "") {
			if want++; err != nil || o.Seq != want || o.Repo != "r" {
				t.Fatalf("owed: %v, change %d, want %d", err, o.Seq, want)
			}
		}
		if want != 4*each {
			t.Errorf("%d changes, want %d", want, 4*each)
		}
		if err := a.Apply(t.Context(), index.Paid{Repo: "r", Seq: 1}, index.Paid{Repo: "s", Seq: 1}); err != nil {
			t.Fatal(err)
		}
		for o, err := range b.Owed(t.Context(), "r") {
			if err != nil || o.Seq != 2 {
				t.Errorf("owed first: %d, %v, want 2", o.Seq, err)
			}
			break
		}
	})
}

// TestLeases: one holder has a lease at a time, and one that lost it is told so where it matters.
func TestNamedLeases(t *testing.T) {
	shared(t, func(t *testing.T, a, b *index.Index) {
		at := func(s int) time.Time { return time.Unix(int64(s), 0) }
		take := func(ix *index.Index, holder string, now, until int, want string) {
			t.Helper()
			l, err := ix.TakeLease(t.Context(), index.Lease{Name: "chores", Holder: holder, Until: at(until)}, at(now))
			if err != nil || l.Holder != want {
				t.Errorf("%s takes the lease at %d: %v has it, want %s: %v", holder, now, l.Holder, want, err)
			}
		}
		take(a, "x", 0, 30, "x")
		take(b, "y", 10, 40, "x")
		take(a, "x", 20, 50, "x")
		take(b, "y", 49, 80, "x")
		take(b, "y", 50, 80, "y")
		err := a.Apply(t.Context(), index.Held{Name: "chores", Holder: "x"}, index.Note{Name: "n", Value: []byte("x")})
		if v, _ := a.Note(t.Context(), "n"); !errors.Is(err, index.ErrLeaseLost) || v != nil {
			t.Errorf("a change of who lost the lease: %v, %q", err, v)
		}
		if err := a.EndLease(t.Context(), "chores", "x"); err != nil { // which it does not have
			t.Error(err)
		}
		take(a, "x", 60, 90, "y")
		if err := b.EndLease(t.Context(), "chores", "y"); err != nil {
			t.Error(err)
		}
		take(a, "x", 60, 90, "x")
		if err := a.Apply(t.Context(), index.Held{Name: "chores", Holder: "x"}); err != nil {
			t.Error(err)
		}

		r := index.Replica{ID: "1", Host: "h", Heard: at(1), Until: at(9)}
		gone := index.Present{Replica: index.Replica{ID: "0"}}
		if err := a.Apply(t.Context(), index.Present{Replica: r}, gone); err != nil {
			t.Fatal(err)
		}
		if err := b.Empty(t.Context()); err != nil {
			t.Fatal(err)
		}
		for got, err := range b.Replicas(t.Context()) {
			if err != nil || got.Host != r.Host || !got.Heard.Equal(r.Heard) || !got.Until.Equal(r.Until) || got.ID != r.ID {
				t.Errorf("replica %+v, %v", got, err)
			}
			r.ID = "seen"
		}
		if r.ID != "seen" {
			t.Error("the replica is forgotten")
		}
	})
}

// TestRemoval: makers of references to blobs meet those who remove them, by random steps and in either process: who saw
// a copy, and whose change was made, has it in the end.
func TestRemoval(t *testing.T) {
	shared(t, func(t *testing.T, a, b *index.Index) {
		ixs, random := []*index.Index{a, b}, rand.New(rand.NewPCG(1, 2))
		blobs, stored := sums("0", "1", "2", "3", "4", "5"), map[identity.Digest]bool{}
		type maker struct {
			since uint64
			saw   []identity.Digest
		}
		var makers []maker
		var batch index.Removal
		now, made, refused, removed := time.Unix(1000, 0), 0, 0, 0
		any := func() *index.Index { return ixs[random.IntN(2)] }
		w := func() index.Waiting { return index.Waiting{Now: now, Then: now} }
		for range 4000 {
			now = now.Add(time.Second)
			switch random.IntN(6) {
			case 0:
				stored[blobs[random.IntN(len(blobs))]] = true // only where no batch has it: the next upload is another copy
			case 1: // look
				m, err := any().Removal(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				mk := maker{since: m.Number}
				for _, d := range blobs {
					if stored[d] && !m.Has(d) && random.IntN(2) == 0 {
						mk.saw = append(mk.saw, d)
					}
				}
				makers = append(makers, mk)
			case 2: // refer
				if len(makers) == 0 {
					continue
				}
				n := random.IntN(len(makers))
				mk := makers[n]
				makers = slices.Delete(makers, n, n+1)
				ops := []index.Op{index.Unremoved{Since: mk.since, Blobs: mk.saw}}
				for _, d := range mk.saw {
					ops = append(ops, index.LinkBlob{Repo: "r", Digest: d, Size: 1, Until: now.Add(20 * time.Second)})
				}
				err := any().Apply(t.Context(), ops...)
				if errors.Is(err, index.ErrRemoved) {
					refused++
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				made++
				for _, d := range mk.saw {
					if !stored[d] {
						t.Fatalf("%s is referred to and gone", d)
					}
				}
			case 3: // mark
				var copies []index.Copy
				for _, d := range blobs {
					if stored[d] {
						copies = append(copies, index.Copy{Digest: d, Size: 1, Created: now, Generation: "g"})
					}
				}
				m, err := any().Condemn(t.Context(), copies, w())
				if errors.Is(err, index.ErrRemoving) != (len(batch.Copies) > 0) {
					t.Fatalf("a batch of %d, and the next one: %v", len(batch.Copies), err)
				}
				if err == nil {
					batch = m
				}
			case 4: // remove one and, if it is the last one, end
				if n := len(batch.Copies); n > 0 {
					delete(stored, batch.Copies[n-1].Digest)
					batch.Copies, removed = batch.Copies[:n-1], removed+1
					if err := any().Removed(t.Context(), batch.Number, batch.Copies); err != nil {
						t.Fatal(err)
					}
				}
			case 5:
				if err := any().ForgetRemoved(t.Context(), now.Add(-time.Minute)); err != nil {
					t.Fatal(err)
				}
			}
			for _, d := range blobs {
				if uses, err := a.Uses(t.Context(), d, now); err != nil || uses && !stored[d] {
					t.Fatalf("%s is in use and gone: %v", d, err)
				}
			}
		}
		if made < 100 || refused < 20 || removed < 100 {
			t.Errorf("made %d, refused %d, removed %d", made, refused, removed)
		}
	})
}
