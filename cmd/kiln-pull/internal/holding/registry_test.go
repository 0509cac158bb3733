package holding

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// TestKeepTwins: of two shards with the same bytes one is written, and the folder has both.
func TestKeepTwins(t *testing.T) {
	target := filepath.Join(t.TempDir(), "m")
	area, err := staging.Open(t.Context(), target, staging.Options{})
	if err != nil {
		t.Fatal(err)
	}
	b := bytes.Repeat([]byte("weights"), 1000)
	d := identity.Sum(b)
	r := staging.Record{Files: []staging.File{
		{Name: "a.safetensors", Size: int64(len(b)), Digest: d}, {Name: "b.safetensors", Size: int64(len(b)), Digest: d},
	}}
	if err := area.Begin(r); err != nil {
		t.Fatal(err)
	}
	k := &keeper{
		to: area, digests: map[string]identity.Digest{"a.safetensors": d, "b.safetensors": d},
		begun: map[identity.Digest]bool{},
	}
	first, err := k.Keep("a.safetensors", int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	second, err := k.Keep("b.safetensors", int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	for off := 0; off < len(b); off += 1000 {
		for _, to := range []interface {
			WriteAt([]byte, int64) (int, error)
		}{first, second} {
			if n, err := to.WriteAt(b[off:off+1000], int64(off)); n != 1000 || err != nil {
				t.Fatal(n, err)
			}
		}
	}
	if err := errors.Join(second.Commit(d), second.Close()); err != nil || area.Has(d) {
		t.Errorf("%v, or it is there before the one that is written", err)
	}
	if err := errors.Join(first.Commit(d), first.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := area.Publish(r, false); err != nil {
		t.Fatal(err)
	}
	for _, f := range r.Files {
		if got, err := os.ReadFile(filepath.Join(target, f.Name)); err != nil || !bytes.Equal(got, b) {
			t.Errorf("%s: other bytes, %v", f.Name, err)
		}
	}
	if err := area.Close(); err != nil {
		t.Error(err)
	}
}
