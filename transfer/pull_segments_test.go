package transfer_test

import (
	"bytes"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/transfer"
)

const segment = 16 * mib // of midstates

// TestSegmentPull: a real registry's midstates let a large shard come in parts, from it and a mirror, and cost no byte.
func TestSegmentPull(t *testing.T) {
	s := newSite(t)
	files := model(2, 5*segment+100)
	s.push("m", "v1", files)
	m, repo, err := client.NewMirror(s.past.Host()+"/m", client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	o := s.options()
	o.Mirrors = []transfer.Mirror{{Client: m, Repo: repo}}
	dir := filepath.Join(t.TempDir(), "m")
	s.onBlob(nil)
	done, err := transfer.Pull(t.Context(), s.c, s.resolve("m", "v1"), dir, o)
	if err != nil || done.Received != total(files) {
		t.Fatalf("%+v, %v", done, err)
	}
	s.holds(dir, files)
	if n := s.sent(); n == 0 || n >= total(files) {
		t.Errorf("%d bytes of %d came from the registry, not from the mirror", n, total(files))
	}
	if s.notes.String() != "" {
		t.Errorf("notes: %s", &s.notes)
	}
}

// TestRepairSegment: one flipped byte in a large shard costs a part of a segment; the folder is as it was until it is
// replaced.
func TestRepairSegment(t *testing.T) {
	s := newSite(t)
	files := model(2, 9*segment+100)
	s.push("m", "v1", files)
	dir := filepath.Join(t.TempDir(), "m")
	s.pull(dir, files)
	name := "model-b.safetensors"
	path := filepath.Join(dir, name)
	damaged := bytes.Clone(files[name])
	damaged[4*segment+77] ^= 1
	if err := os.WriteFile(path, damaged, 0o644); err != nil {
		t.Fatal(err)
	}
	s.onBlob(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if b, err := os.ReadFile(path); err != nil || !bytes.Equal(b, damaged) {
			t.Errorf("the folder was changed while it was repaired: %v", err)
		}
		next.ServeHTTP(w, r)
	})
	done := s.pull(dir, files)
	const part = 4 * mib
	if s.sentOf(files[name]) != part || done.Received != part || done.Reused != len(files)-1 ||
		done.Adopted != int64(len(damaged))-part {
		t.Errorf("%d bytes sent, %+v", s.sentOf(files[name]), done)
	}
	s.onBlob(nil)
	if again := s.pull(dir, files); !again.Already || s.requests() != 0 {
		t.Errorf("not recorded: %+v", again)
	}
}

// TestRepairInterrupted: what was adopted and fetched of a damaged file is there for the next try.
func TestRepairInterrupted(t *testing.T) {
	s := newSite(t)
	files := map[string][]byte{"model.safetensors": shard(5*segment, 1)}
	b := files["model.safetensors"]
	s.push("m", "v1", files)
	dir := filepath.Join(t.TempDir(), "m")
	s.pull(dir, files)
	path := filepath.Join(dir, "model.safetensors")
	damaged := bytes.Clone(b)
	damaged[segment] ^= 1
	damaged[3*segment] ^= 1
	if err := os.WriteFile(path, damaged, 0o644); err != nil {
		t.Fatal(err)
	}
	s.onBlob(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if strings.HasPrefix(r.Header.Get("Range"), "bytes=16777216-") {
			next.ServeHTTP(w, r)
			return
		}
		w.WriteHeader(http.StatusForbidden)
	})
	o := s.options()
	o.Jobs = 1
	if _, err := transfer.Pull(t.Context(), s.c, s.resolve("m", "v1"), dir, o); err == nil {
		t.Fatal("repaired without the bytes")
	}
	if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, damaged) {
		t.Errorf("the folder was changed: %v", err)
	}
	if err := errors.Join(os.Remove(path), os.WriteFile(path, nil, 0o644)); err != nil { // nothing to adopt any more
		t.Fatal(err)
	}
	s.onBlob(nil)
	done := s.pull(dir, files)
	if s.sent() != segment || done.Resumed != 4*segment {
		t.Errorf("%d bytes sent, %+v", s.sent(), done)
	}
}
