package transfer_test

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// TestBring: what the caller brings is not fetched, and the folder is as any other.
func TestBring(t *testing.T) {
	s := newSite(t)
	files := model(3, 40*mib) // with midstates
	s.push("m", "v1", files)
	dir := filepath.Join(t.TempDir(), "m")
	o := s.options()
	var brought int64
	o.Bring = func(_ context.Context, missing []staging.File, to *staging.Area) error {
		if len(missing) != len(files) {
			t.Errorf("missing: %v", missing)
		}
		for _, f := range missing {
			if !strings.HasSuffix(f.Name, "-a.safetensors") {
				continue
			}
			in, err := to.Bring(f.Digest, f.Size)
			if err != nil {
				return err
			}
			brought += f.Size
			if _, err := in.WriteAt(files[f.Name], 0); err != nil {
				return err
			}
			if err := errors.Join(in.Commit(identity.Sum(files[f.Name])), in.Close()); err != nil {
				return err
			}
		}
		return nil
	}
	done, err := transfer.Pull(t.Context(), s.c, s.resolve("m", "v1"), dir, o)
	if err != nil {
		t.Fatal(err)
	}
	if done.Received != total(files) || brought == 0 || s.sent() != total(files)-brought {
		t.Errorf("%+v, %d bytes sent, %d brought", done, s.sent(), brought)
	}
	s.onBlob(nil)
	if again := s.pull(dir, files); !again.Already || s.requests() != 0 {
		t.Errorf("second pull: %+v, %d requests", again, s.requests())
	}
	for _, f := range done.Record.Files {
		if f.Size > 32*mib && staging.Midstates(done.Target, f) == nil {
			t.Errorf("%s has no midstates", f.Name)
		}
	}
}

// TestBringFails: nothing is at the target, and the next pull goes on with what was brought.
func TestBringFails(t *testing.T) {
	s := newSite(t)
	files := model(1, 5*mib)
	s.push("m", "v1", files)
	dir := filepath.Join(t.TempDir(), "m")
	why := errors.New("no more")
	o := s.options()
	o.Bring = func(_ context.Context, missing []staging.File, to *staging.Area) error {
		for _, f := range missing {
			in, err := to.Bring(f.Digest, f.Size)
			if err != nil {
				return err
			}
			if _, err := in.WriteAt(files[f.Name][:f.Size/2], 0); err != nil {
				return err
			}
			if err := in.Close(); err != nil {
				return err
			}
		}
		return why
	}
	if _, err := transfer.Pull(t.Context(), s.c, s.resolve("m", "v1"), dir, o); !errors.Is(err, why) || s.sent() != 0 {
		t.Fatalf("%v, %d bytes sent", err, s.sent())
	}
	s.nothingAt(dir)
	if done := s.pull(dir, files); done.Resumed == 0 || done.Received+done.Resumed != total(files) {
		t.Errorf("%+v", done)
	}
}
