package main

import (
	"errors"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
	"github.com/kiln-registry/kiln-registry/internal/testregistry"
	"github.com/kiln-registry/kiln-registry/registry"
)

// TestAgainst: a ratio is taken inside a round, and the row is about the peer that does best.
func TestAgainst(t *testing.T) {
	all := []contender{{name: "ours"}, {name: "slow"}, {name: "fast"}}
	s := series{{1, 10, 4}, {4, 20, 8}, {2, 5, 4}}
	costs := s.against(all, "cost", "%.0f", less)
	if costs.value != 1 || costs.notes != "0.50 to 2.00; ours 4, slow 8, fast 4" {
		t.Errorf("cost: %+v", costs)
	}
	if rates := s.against(all, "rate", "%.0f", more); rates.value != 0.5 {
		t.Errorf("rate: %+v", rates)
	}
}

// TestGrow: what is planted is what the registry makes of the same records when it makes its index anew.
func TestGrow(t *testing.T) {
	b := &bench{client: rig.NewClient()}
	p := planted{t.TempDir(), 40}
	export := func(use func(r *registry.Registry) error) string {
		t.Helper()
		var closers []func()
		r, err := testregistry.Open(filepath.Join(p.dir, "data"), func(f func()) { closers = append(closers, f) })
		if err != nil {
			t.Fatal(err)
		}
		var rows strings.Builder
		if err := use(r); err != nil {
			t.Fatal(err)
		}
		if err := r.Export(t.Context(), &rows); err != nil {
			t.Fatal(err)
		}
		for i := range closers {
			closers[len(closers)-1-i]()
		}
		return rows.String()
	}
	export(func(r *registry.Registry) error {
		s := httptest.NewServer(r)
		defer s.Close()
		if err := b.pushParts(t.Context(), &rig.Server{URL: s.URL}, manifests); err != nil {
			return err
		}
		return b.client.PushManifest(t.Context(), s.URL, manifests, "base", baseManifest)
	})
	if err := grow(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	got := export(func(*registry.Registry) error { return nil })
	want := export(func(r *registry.Registry) error { return r.Reindex(t.Context()) })
	if n := strings.Count(got, "\n"); n != 2*(p.artifacts+1) {
		t.Errorf("%d rows", n)
	}
	if got != want {
		t.Errorf("planted:\n%s\nmade anew:\n%s", got, want)
	}
}

// TestDebian: a program of the system is linked whatever an earlier run left, though make has that on its PATH.
func TestDebian(t *testing.T) {
	script, err := os.ReadFile("../../scripts/debian.sh")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	tool, system := filepath.Join(dir, ".tools/bin/kiln-peer"), filepath.Join(dir, "system/kiln-peer")
	for path, text := range map[string][]byte{filepath.Join(dir, "scripts/debian.sh"): script, tool: nil, system: nil} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o777), os.WriteFile(path, text, 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	for run := range 3 { // over a copy, then over a link
		cmd := exec.Command("scripts/debian.sh", "kiln-peer", "kiln-peer")
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "PATH="+filepath.Join(dir, ".bin")+":"+filepath.Dir(tool)+":"+filepath.Dir(system)+":"+
			os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		to, lerr := os.Readlink(tool)
		if err != nil || lerr != nil || to != system {
			t.Errorf("run %d: %v, it is a link to %q, %v\n%s", run, err, to, lerr, out)
		}
	}
}
