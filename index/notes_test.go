package index_test

import (
	"bytes"
	"path/filepath"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/index/memkv"
)

// TestNotes: a note stays until it is replaced, also over a restart, and a Reset forgets it.
func TestNotes(t *testing.T) {
	ctx := t.Context()
	path := filepath.Join(t.TempDir(), "index.db")
	kv, err := boltkv.Open(path, boltkv.Options{})
	if err != nil {
		t.Fatal(err)
	}
	ix := opened(t, kv)
	want := func(name, value string) {
		t.Helper()
		if b, err := ix.Note(ctx, name); err != nil || string(b) != value || value == "" && b != nil {
			t.Fatalf("note %s is %q, %v; want %q", name, b, err, value)
		}
	}
	want("scrub", "")
	apply(t, ix, index.Note{Name: "scrub", Value: []byte("one")}, index.Note{Name: "zz", Value: bytes.Repeat([]byte{0}, 99)})
	apply(t, ix, index.Note{Name: "scrub", Value: []byte("two")})
	if err := ix.Close(); err != nil {
		t.Fatal(err)
	}
	if kv, err = boltkv.Open(path, boltkv.Options{}); err != nil {
		t.Fatal(err)
	}
	ix = opened(t, kv)
	want("scrub", "two")
	apply(t, ix, index.Note{Name: "scrub"})
	want("scrub", "")
	if err := ix.Reset(ctx); err != nil {
		t.Fatal(err)
	}
	want("zz", "")
	if err := ix.Apply(ctx, index.Note{Value: []byte("x")}); err == nil {
		t.Fatal("a note without a name was taken")
	}
}

// TestEmpty: what no refs bring back outlives an Empty, and nothing else does; nor do rows that do not read back.
func TestEmpty(t *testing.T) {
	ctx, disk := t.Context(), new(memkv.Disk)
	kv := openMemory(t, disk)
	ix := opened(t, kv)
	d, bad := identity.Sum([]byte("leased")), identity.Sum([]byte("leased, and its row is damaged"))
	lease := index.LinkBlob{Repo: "a", Digest: d, Size: 6, Until: epoch.Add(time.Hour)}
	worse := index.LinkBlob{Repo: "a", Digest: bad, Size: 1, Until: epoch.Add(time.Hour)}
	u := index.Upload{ID: "u", Repo: "a", Caller: "me", Size: -1, Expires: epoch.Add(time.Hour)}
	apply(t, ix, adapter("a", "one", 1, aggregate("x")), lease, worse, index.PutUpload{Upload: u},
		index.Checkpoint{Position: 9}, index.Note{Name: "lease", Value: []byte("1")}, index.Note{Name: "gone", Value: []byte("2")})
	key := append(append([]byte{'l'}, bad[:]...), "a\x00"...)
	if err := kv.Update(ctx, func(x index.Txn) error { return x.Put(key, []byte("damage")) }); err != nil {
		t.Fatal(err)
	}
	check := func(when string) {
		t.Helper()
		equal(t, when, all(t, ix.Export(ctx)), nil)
		equal(t, when, all(t, ix.LinkBlobs(ctx)), []index.LinkBlob{lease})
		equal(t, when, all(t, ix.ExpiredUploads(ctx, u.Expires)), []index.Upload{u})
		kept, err1 := ix.Note(ctx, "lease")
		gone, err2 := ix.Note(ctx, "gone")
		at, err3 := ix.Checkpoint(ctx)
		if string(kept) != "1" || gone != nil || at != 0 || err1 != nil || err2 != nil || err3 != nil {
			t.Errorf("%s: %q %q %d, %v %v %v", when, kept, gone, at, err1, err2, err3)
		}
		if n, err := ix.Purge(ctx, lease.Until.Add(-1)); n != 0 || err != nil {
			t.Error(when, n, err)
		}
	}
	for _, when := range []string{"emptied", "twice"} {
		if err := ix.Empty(ctx, "lease"); err != nil {
			t.Fatal(err)
		}
		check(when)
	}
	ix = opened(t, openMemory(t, disk.Copy()))
	check("after a restart")
	if n, err := ix.Purge(ctx, lease.Until); n != 1 || err != nil {
		t.Error(n, err)
	}
}

// TestHowABlobIsHeld: Referred counts manifests only, Uses also links that last.
func TestHowABlobIsHeld(t *testing.T) {
	onEngines(t, func(t *testing.T, ix *index.Index) {
		ctx := t.Context()
		m := adapter("a", "one", 1, aggregate("x"))
		d := identity.Sum([]byte("blob of one"))
		until := epoch.Add(time.Hour)
		check := func(when string, referred bool, linked time.Time, uses bool, now time.Time) {
			t.Helper()
			r, err1 := ix.Referred(ctx, d)
			l, err2 := ix.LinkedUntil(ctx, "a", d)
			u, err3 := ix.Uses(ctx, d, now)
			if err1 != nil || err2 != nil || err3 != nil {
				t.Fatal(err1, err2, err3)
			}
			if r != referred || !l.Equal(linked) || u != uses {
				t.Errorf("%s: referred %v, linked until %v, uses %v", when, r, l, u)
			}
		}
		check("at first", false, time.Time{}, false, epoch)
		apply(t, ix, index.LinkBlob{Repo: "a", Digest: d, Size: 1, Until: until})
		check("linked", false, until, true, epoch)
		check("after the link", false, until, false, until)
		apply(t, ix, m)
		check("referred", true, until, true, until)
		apply(t, ix, index.DeleteManifest{Repo: "a", Digest: m.Digest, Seq: 2})
		check("deleted", false, until, false, until)
		if _, err := ix.Purge(ctx, until); err != nil {
			t.Fatal(err)
		}
		check("purged", false, time.Time{}, false, epoch)
	})
}
