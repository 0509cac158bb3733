package main

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/internal/chaos/rig"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

// bin is a folder of programs that TestMain builds.
var bin string

func TestMain(m *testing.M) {
	code, err := built(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		code = 1
	}
	os.Exit(code)
}

func built(m *testing.M) (code int, err error) {
	if bin, err = os.MkdirTemp("", "kiln-chaos-bin-"); err != nil {
		return 0, err
	}
	defer os.RemoveAll(bin)
	for _, args := range [][]string{{"-tags", "chaos", "../../cmd/kiln-registry"}, {"../../cmd/kiln-pull"}} {
		out, err := exec.Command("go", append([]string{"build", "-o", bin + "/"}, args...)...).CombinedOutput()
		if err != nil {
			return 0, fmt.Errorf("go build %v: %w: %s", args, err, out)
		}
	}
	return tests3.M{M: m}.Run(), nil
}

// newChaos is a short run. Stores are made in memory where that is possible: no test here needs a disk that is one.
func newChaos(t *testing.T) (c chaos, out *bytes.Buffer) {
	t.Helper()
	out = new(bytes.Buffer)
	dir, err := os.MkdirTemp("/dev/shm", "kiln-chaos-test-")
	if err != nil {
		dir = t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return chaos{bin: bin, dir: dir, seed: rand.Uint64(), kills: 6, limit: time.Minute, every: 61, some: 6, out: out}, out
}

// ends checks how a part of a run ended.
func ends(t *testing.T, out *bytes.Buffer, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	if line := strings.TrimSpace(out.String()); !strings.HasSuffix(line, " lost 0") {
		t.Errorf("it says %q", line)
	}
	t.Log(out)
}

func TestKill(t *testing.T) {
	c, out := newChaos(t)
	ends(t, out, c.kill(t.Context()))
}

func TestKillOnS3(t *testing.T) {
	s3 := tests3.Shared(t)
	t.Setenv("AWS_ACCESS_KEY_ID", s3.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", s3.SecretKey)
	c, out := newChaos(t)
	c.kills = 3
	c.store = "s3://" + s3.Bucket(t) + "/store?region=" + s3.Region + "&endpoint=http://" + s3.Endpoint()
	ends(t, out, c.kill(t.Context()))
}

func TestBoundaries(t *testing.T) {
	c, out := newChaos(t)
	ends(t, out, c.boundaries(t.Context()))
}

func TestFaults(t *testing.T) {
	c, out := newChaos(t)
	ends(t, out, c.faults(t.Context()))
}

func TestFullDisk(t *testing.T) {
	c, out := newChaos(t)
	ends(t, out, c.full(t.Context()))
}

func TestFlip(t *testing.T) {
	c, out := newChaos(t)
	ends(t, out, c.flip(t.Context()))
}

// TestLossIsSeen breaks what was acknowledged: a check that does not see that is worth nothing.
func TestLossIsSeen(t *testing.T) {
	c, _ := newChaos(t)
	for name, lose := range map[string]func(t *testing.T, b *breaking) (lost string){
		"refs that are not written": func(t *testing.T, b *breaking) string {
			m := must(b.c.Base("lab/x", 1, "v1"))(t)
			b.lie(t, "lie|write|refs.log")
			must(0, b.c.DeleteManifest(m))(t)
			b.v.Kill()
			must(0, os.Remove(filepath.Join(b.site.State(), "index.db")))(t) // which knows that refs are missing
			return "lab/x:v1 is " + m.Digest.String() + ", acknowledged was that it is deleted"
		},
		"an upload that got shorter": func(t *testing.T, b *breaking) string {
			u := must(b.c.Begin("lab/x", b.c.Fresh(1000)))(t)
			must(0, b.c.Patch(u, 500))(t)
			path := filepath.Join(b.site.Folder(), "uploads", filepath.Base(u.At)+".data")
			must(0, os.Truncate(path, 400))(t)
			return "acknowledged 500, sent 500"
		},
		"an upload that is gone": func(t *testing.T, b *breaking) string {
			u := must(b.c.Begin("lab/x", b.c.Fresh(1000)))(t)
			must(0, os.Remove(filepath.Join(b.site.Folder(), "uploads", filepath.Base(u.At)+".data")))(t)
			return string(api.CodeBlobUploadUnknown)
		},
		"a blob that is gone": func(t *testing.T, b *breaking) string {
			blob := b.c.Fresh(1000)
			must(0, b.c.Post("lab/x", blob))(t)
			must(0, os.Remove(filepath.Join(b.site.Folder(), "blobs/sha256", blob.Digest.Hex()[:2], blob.Digest.Hex())))(t)
			return "blob " + blob.Digest.String() + " is not on the disk"
		},
		"a blob that was damaged": func(t *testing.T, b *breaking) string {
			blob := b.c.Fresh(1000)
			must(0, b.c.Post("lab/x", blob))(t)
			must(0, b.site.Flip(blob.Digest, 4321))(t)
			return "blob " + blob.Digest.String() + " on the disk has the digest"
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := must(rig.NewSite(c.bin, c.dir, ""))(t)
			b := newBreaking(s, 1)
			must(0, b.start(t.Context()))(t)
			defer func() { b.v.Kill() }()
			want := lose(t, b)
			if err := b.restart(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("got %v, want %q", err, want)
			}
		})
	}
}

// lie has the server say that changes are made that are not.
func (b *breaking) lie(t *testing.T, rule string) {
	t.Helper()
	must(0, os.WriteFile(b.file(), []byte(rule+"\n"), 0o600))(t)
}

// must returns the value if there is no error.
func must[T any](v T, err error) func(t *testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}
