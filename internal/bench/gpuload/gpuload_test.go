package gpuload

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/bench/report"
	"github.com/kiln-registry/kiln-registry/internal/testenv"
)

// late is what a source may make up for.
const late = 20 * time.Millisecond

const testSize = 4 << 20 // of a shard

// newBench has what the tables have, with small shards.
func newBench(t *testing.T) (*Bench, string) {
	t.Helper()
	bin := t.TempDir()
	if out, err := exec.Command("go", "build", "-o", bin, "../../../cmd/kiln-pull").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	b := &Bench{
		Bin: bin, Tools: filepath.Join(testenv.Root(t), ".tools"), Dir: t.TempDir(), Size: testSize, Rounds: 1,
	}
	b.Model = func(ctx context.Context, shards int, size int64) (string, error) {
		dir := filepath.Join(t.TempDir(), "model")
		cmd := exec.CommandContext(ctx, "go", "run", "../../testmodel", "-shards", "4", "-size", "16MiB", dir)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return dir, nil
	}
	dir, _, err := b.model(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return b, dir
}

// aggregate is the identity of the shards of a folder.
func aggregate(t *testing.T, dir string) string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	var all []identity.Shard
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, identity.Shard{Filename: filepath.Base(path), Size: uint64(len(b)), Digest: identity.Sum(b)})
	}
	m, err := identity.New(all)
	if err != nil {
		t.Fatal(err)
	}
	return m.Aggregate.String()
}

// TestPrograms: one program hashes every byte and the other none of the data, both read all of it, and a source gives
// no more than it is said to.
func TestPrograms(t *testing.T) {
	b, dir := newBench(t)
	want := aggregate(t, dir)
	for _, target := range []string{host, device, discard} {
		const rate = 100e6
		hashed, err := b.load(t.Context(), dir, run{program: b.built.verified, target: target, args: []string{"-peak"}})
		if err != nil {
			t.Fatal(err)
		}
		blind, err := b.load(t.Context(), dir, run{program: b.built.blind, target: target, rate: rate})
		if err != nil {
			t.Fatal(err)
		}
		if hashed.Aggregate != want || blind.Aggregate == want || blind.Aggregate == "" {
			t.Errorf("%s: %s with the hash, %s without, want %s", target, hashed.Aggregate, blind.Aggregate, want)
		}
		if hashed.Bytes != blind.Bytes || hashed.Bytes <= shards*testSize-1<<16 || hashed.Wall <= 0 || hashed.CPU <= 0 {
			t.Errorf("%s: %+v, %+v", target, hashed, blind)
		}
		if least := float64(blind.Bytes)/rate - late.Seconds(); blind.Wall < least*0.9 { // the last bytes come early
			t.Errorf("%s: %d bytes in %f s at %.0f bytes a second", target, blind.Bytes, blind.Wall, rate)
		}
		if hashed.Anonymous <= 0 || blind.Anonymous != 0 {
			t.Errorf("%s: %f MiB seen, %f unwatched", target, hashed.Anonymous, blind.Anonymous)
		}
		if (target == device) != (hashed.Pinned > 0) {
			t.Errorf("%s: %d bytes pinned", target, hashed.Pinned)
		}
	}
}

// TestEdits: a text that is not there once stops the build.
func TestEdits(t *testing.T) {
	for _, e := range []edit{
		{"gpuload/lane.go", "no such text", ""}, {"gpuload/lane.go", "return", ""}, {"gpuload/none.go", "", ""},
	} {
		err := build(t.Context(), filepath.Join(t.TempDir(), "x"), []edit{e})
		if err == nil || !strings.Contains(err.Error(), e.file) {
			t.Errorf("%q: %v", e.old, err)
		}
	}
}

// TestTables: every table has rows.
func TestTables(t *testing.T) {
	b, _ := newBench(t)
	for name, rows := range map[string]func(context.Context) ([]report.Row, error){
		"tax": b.Tax, "onepass": b.OnePass, "buffers": b.Memory, "attach": b.Attach, "loaders": b.Peers,
	} {
		t.Run(name, func(t *testing.T) {
			all, err := rows(t.Context())
			if err != nil || len(all) == 0 && name != "loaders" { // the loaders of others need not be installed
				t.Errorf("%d rows, %v", len(all), err)
			}
			for _, r := range all {
				if r.What == "" || r.Notes == "" || r.Value < 0 {
					t.Errorf("%+v", r)
				}
			}
		})
	}
}
