package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
)

// adapterOf writes the folder of an adapter of a base.
func adapterOf(t *testing.T, seed byte, base *identity.Manifest) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "adapter")
	if err := testartifact.Adapter(dir, seed, base); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestAdapterProcesses loads adapters onto a base that another process holds: from its start, later, in use, of another
// base, and of none. The base stays as it was.
func TestAdapterProcesses(t *testing.T) {
	dir, m := residentModel(t)
	first, second := adapterOf(t, 1, &m), adapterOf(t, 2, &m)
	other, err := identity.New([]identity.Shard{{Filename: "model.safetensors", Size: 9, Digest: identity.Sum(nil)}})
	if err != nil {
		t.Fatal(err)
	}
	wrong, none := adapterOf(t, 3, &other), filepath.Join(t.TempDir(), "none")
	h := hold(t, nil, dir, socketIn(t), "--adapter", first)
	a := m.Aggregate.String()
	h.ends(t, nil, 0, "LEASES", "adapter", "list", a)
	h.ends(t, nil, 0, "loaded: adapter", "adapter", "load", a, second)
	h.ends(t, nil, 0, "loaded before: adapter", "adapter", "load", a, second)
	h.ends(t, nil, cli.CodeNo, attach.CodeAdapterOtherBase, "adapter", "load", a, wrong)
	h.ends(t, nil, cli.CodeNotFound, "none", "adapter", "load", a, none)
	h.ends(t, nil, cli.CodeUsage, "no aggregate", "adapter", "load", dir, second)
	h.ends(t, nil, cli.CodeNo, attach.CodeOtherBase, "adapter", "list", other.Aggregate.String())

	list, err := h.client.Adapters(t.Context(), m.Aggregate)
	if err != nil || len(list) != 2 {
		t.Fatalf("%+v, %v", list, err)
	}
	generation, err := h.client.Generation(t.Context(), m.Aggregate, 0)
	if err != nil || generation != 3 {
		t.Errorf("generation %d, %v; want 3", generation, err)
	}
	for _, x := range list {
		held, err := h.client.AttachAdapter(t.Context(), m.Aggregate, x.Digest)
		if err != nil {
			t.Fatal(err)
		}
		matched := false
		for _, dir := range []string{first, second} {
			file, err := os.ReadFile(filepath.Join(dir, "adapter_model.safetensors"))
			if err != nil {
				t.Fatal(err)
			}
			matched = matched || bytes.HasSuffix(file, held.Blocks[0].Data)
		}
		if !matched {
			t.Errorf("adapter %s has other bytes than its folder", x.Digest)
		}
		h.ends(t, nil, 0, "intact", "attach", a, "--adapter", x.Digest.String(), "--check")
		h.ends(t, nil, cli.CodeTryAgain, attach.CodeAdapterInUse, "adapter", "unload", a, x.Digest.String())
		if err := held.Close(); err != nil {
			t.Error(err)
		}
		waitFor(t, func() bool { return h.leases(t) == 0 })
		h.ends(t, nil, 0, "unloaded", "adapter", "unload", a, x.Digest.String())
		h.ends(t, nil, cli.CodeNotFound, attach.CodeAdapterUnknown, "adapter", "unload", a, x.Digest.String())
	}
	h.ends(t, nil, 0, "intact", "attach", a, "--check")
	h.ends(t, nil, cli.CodeUsage, "--adapter", "attach", a, "--adapter", "first")
}

// TestAdapterRefused: an adapter that can't be loaded keeps the holder from becoming ready.
func TestAdapterRefused(t *testing.T) {
	dir, _ := residentModel(t)
	other, err := identity.New([]identity.Shard{{Filename: "model.safetensors", Size: 9, Digest: identity.Sum(nil)}})
	if err != nil {
		t.Fatal(err)
	}
	for adapter, code := range map[string]int{adapterOf(t, 3, &other): cli.CodeNo, "./not-there": cli.CodeNotFound} {
		socket := socketIn(t)
		p := begin(t, nil, "resident", dir, "--listen", "127.0.0.1:0", "--socket", socket, "--adapter", adapter)
		if got := p.code(); got != code {
			t.Errorf("%s: exit code %d, want %d\n%s", adapter, got, code, p.stderr)
		}
		if _, err := os.Stat(socket); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: a socket was left: %v", adapter, err)
		}
	}
	p := begin(t, nil, "resident", "--synthetic", "--listen", "127.0.0.1:0", "--adapter", dir)
	if got := p.code(); got != cli.CodeUsage {
		t.Errorf("exit code %d, want %d\n%s", got, cli.CodeUsage, p.stderr)
	}
}
