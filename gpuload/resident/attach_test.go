package resident_test

import (
	"path/filepath"
	"testing"

	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/gpuload/resident"
)

// attached starts s with a socket in a folder of its own, and loads a model.
func attached(t *testing.T, s *resident.Server) (*running, attach.Client) {
	t.Helper()
	s.Socket = filepath.Join(t.TempDir(), "s", "kiln.sock")
	r := start(t, s, loadModel(t))
	close(r.load)
	r.weights = <-r.held
	return r, attach.Client{Socket: s.Socket}
}

func TestAttach(t *testing.T) {
	r, c := attached(t, &resident.Server{Backend: "host", Model: "demo"})
	a, err := c.Attach(t.Context(), r.weights.Manifest().Aggregate)
	if err != nil {
		t.Fatal(err)
	}
	if len(a.Blocks) != 2 || len(a.Document.Tensors) != 2 {
		t.Fatalf("%d blocks, %+v", len(a.Blocks), a.Document)
	}
	for i, tensor := range a.Document.Tensors {
		if got, want := string(a.Bytes(tensor)), string([]byte{1, 2, 3, byte(i)}); got != want {
			t.Errorf("tensor %d: %q, want %q", i, got, want)
		}
	}
	if s, err := c.Status(t.Context()); err != nil || s.Leases != 1 {
		t.Errorf("%+v, %v", s, err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if err := r.stop(); err != nil {
		t.Error(err)
	}
}
