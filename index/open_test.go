package index_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/memkv"
)

func TestSequences(t *testing.T) {
	disk := new(memkv.Disk)
	ctx := t.Context()
	next := func(ix *index.Index, repo string) uint64 {
		n, err := ix.NextSeq(ctx, repo)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	ix, err := index.New(ctx, openMemory(t, disk))
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	issued := map[string][]uint64{}
	var wg sync.WaitGroup
	for i := range 8 {
		repo := fmt.Sprint("repo-", i%2)
		wg.Go(func() {
			for range 100 {
				n := next(ix, repo)
				mu.Lock()
				issued[repo] = append(issued[repo], n)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	for repo, numbers := range issued {
		slices.Sort(numbers)
		if len(slices.Compact(numbers)) != 400 || numbers[0] != 1 {
			t.Errorf("%s: %v", repo, numbers)
		}
	}
	apply(t, ix, index.DeleteTag{Repo: "repo-0", Tag: "v", Seq: 5000}, index.DeleteTag{Repo: "repo-2", Tag: "v", Seq: 70})
	if n := next(ix, "repo-0"); n <= 5000 {
		t.Errorf("issued %d after 5000 was seen", n)
	}
	ix = opened(t, openMemory(t, disk.Copy()))
	for repo, last := range map[string]uint64{"repo-0": 5001, "repo-1": 400, "repo-2": 70} {
		if n := next(ix, repo); n <= last {
			t.Errorf("%s: issued %d after a crash, %d before", repo, n, last)
		}
	}
	if err := ix.Reset(ctx); err != nil {
		t.Fatal(err)
	}
	if n := next(ix, "repo-0"); n <= 5001 {
		t.Errorf("issued %d after a reset", n)
	}
	if _, err := ix.NextSeq(ctx, ""); err == nil {
		t.Error("numbered a change of no repository")
	}
}

func TestFormat(t *testing.T) {
	for name, c := range map[string]struct {
		key, value string
		want       error
	}{
		"strange rows":  {"something", "else", index.ErrDamaged},
		"bad format":    {"zformat", "x", index.ErrDamaged},
		"later version": {"zformat", string(index.Seal("zformat", string(rune(index.Format+1)))), index.ErrFormat},
		"no version":    {"zformat", string(index.Seal("zformat", "")), index.ErrFormat},
	} {
		kv := openMemory(t, new(memkv.Disk))
		err := kv.Update(t.Context(), func(x index.Txn) error { return x.Put([]byte(c.key), []byte(c.value)) })
		if err != nil {
			t.Fatal(err)
		}
		if _, err := index.New(t.Context(), kv); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

// TestRenewed: an index of an earlier format is emptied when it is opened, but for its counters, and says so.
func TestRenewed(t *testing.T) {
	disk, ctx := new(memkv.Disk), t.Context()
	kv := openMemory(t, disk)
	ix := opened(t, kv)
	apply(t, ix, adapter("a", "text", 70, aggregate("x")), index.Checkpoint{Position: 9},
		index.Note{Name: "n", Value: []byte{1}})
	err := kv.Update(ctx, func(x index.Txn) error {
		return x.Put([]byte("zformat"), index.Seal("zformat", string(rune(index.Format-1))))
	})
	if err != nil || ix.Renewed() != 0 {
		t.Fatal(err)
	}
	ix = opened(t, openMemory(t, disk.Copy()))
	if ix.Renewed() != int(index.Format)-1 {
		t.Errorf("renewed %d", ix.Renewed())
	}
	equal(t, "export", all(t, ix.Export(ctx)), nil)
	if p, err := ix.Checkpoint(ctx); p != 0 || err != nil {
		t.Error(p, err)
	}
	if n, err := ix.NextSeq(ctx, "a"); n <= 70 || err != nil {
		t.Error(n, err)
	}
}
