package transfer

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/kiln-registry/kiln-registry/internal/bench/report"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

// The sides of the tables, as their notes call them.
const (
	kiln     = "kiln"
	pure     = "crypto/sha256"
	openssl  = "openssl dgst"
	parallel = "openssl dgst on all cores"
	coreutil = "sha256sum"
	plain    = "plain Go loop"
	one      = "kiln on one core"
)

// Identity measures the hashing of files that lie in the page cache: of several shards whose digests nobody knows, and
// of one large shard that was pulled before.
func (b *Bench) Identity(ctx context.Context) ([]report.Row, error) {
	if err := found("openssl", "sha256sum", "xargs"); err != nil {
		return nil, err
	}
	rows, err := b.identify(ctx)
	if err != nil {
		return nil, err
	}
	again, err := b.reverify(ctx)
	return append(rows, again...), err
}

func (b *Bench) identify(ctx context.Context) ([]report.Row, error) {
	dir, err := b.Model(ctx, shards, b.Size)
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	paths, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	if err != nil {
		return nil, err
	}
	command := func(name string, args ...string) func(int) (rig.Cost, error) {
		return func(int) (rig.Cost, error) { return rig.Run(ctx, name, args...) }
	}
	many := []string{"-P", strconv.Itoa(runtime.NumCPU()), "-n", "1", "openssl", "dgst", "-sha256"}
	rs, err := rig.Turns(b.Rounds,
		rig.Side{Name: pure, Work: func(int) (rig.Cost, error) { return b.hashing() }},
		rig.Side{Name: kiln, Work: command(b.path("kiln-push"), "identify", "-q", dir)},
		rig.Side{Name: openssl, Work: command("openssl", append([]string{"dgst", "-sha256"}, paths...)...)},
		rig.Side{Name: parallel, Work: func(int) (rig.Cost, error) { return xargs(ctx, paths, many...) }},
		rig.Side{Name: coreutil, Work: command("sha256sum", paths...)},
		rig.Side{Name: plain, Work: func(int) (rig.Cost, error) { return self(ctx, append([]string{"sum"}, paths...)...) }},
	)
	if err != nil {
		return nil, err
	}
	return []report.Row{
		row(fmt.Sprintf("identify %d shards: bytes per CPU second / crypto/sha256 in memory", shards),
			rs.CPURatio(pure, kiln), b.perGB(rs.CPU, "cpu-s", kiln, pure)).AtLeast(1.35),
		row("CPU / `openssl dgst`", rs.CPURatio(kiln, openssl), b.perGB(rs.CPU, "cpu-s", openssl)).AtMost(1 / 2.1),
		row("CPU / `sha256sum`", rs.CPURatio(kiln, coreutil), b.perGB(rs.CPU, "cpu-s", coreutil)).AtMost(1 / 5.5),
		row("CPU / plain Go loop", rs.CPURatio(kiln, plain), b.perGB(rs.CPU, "cpu-s", plain)),
		row("wall / `openssl dgst` on all cores", rs.WallRatio(kiln, parallel),
			b.perGB(rs.Wall, "s", kiln, parallel)),
	}, nil
}

// xargs hands paths to a command.
func xargs(ctx context.Context, paths []string, args ...string) (rig.Cost, error) {
	list, err := os.CreateTemp("", "kiln-bench-")
	if err != nil {
		return rig.Cost{}, err
	}
	defer os.Remove(list.Name())
	defer list.Close()
	if _, err := list.WriteString(strings.Join(paths, "\n")); err != nil {
		return rig.Cost{}, err
	}
	return rig.Run(ctx, "xargs", append([]string{"-a", list.Name()}, args...)...)
}

// reverify pulls one large shard and then verifies it: its digest is known, and the registry has recorded midstates.
func (b *Bench) reverify(ctx context.Context) ([]report.Row, error) {
	reg, err := rig.Kiln(ctx, b.path("kiln-registry"), b.Dir)
	if err != nil {
		return nil, err
	}
	defer reg.Stop()
	size := shards * b.Size
	dir, err := b.Model(ctx, 1, size)
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	h, err := b.hold(ctx, dir, "bench/one", reg)
	if err != nil {
		return nil, err
	}
	out := filepath.Join(b.Dir, "one")
	defer os.RemoveAll(out)
	if _, err := rig.Run(ctx, b.path("kiln-pull"), "pull", "-q", h.ref(reg.URL), out); err != nil {
		return nil, err
	}
	verify := func(env ...string) func(int) (rig.Cost, error) {
		return func(int) (rig.Cost, error) {
			return rig.RunWith(ctx, env, b.path("kiln-pull"), "verify", "-q", out)
		}
	}
	shard := filepath.Join(out, h.shards[0].Filename)
	rs, err := rig.Turns(b.Rounds,
		rig.Side{Name: plain, Work: func(int) (rig.Cost, error) { return self(ctx, "sum", shard) }},
		rig.Side{Name: kiln, Work: verify()},
		rig.Side{Name: one, Work: verify("GOMAXPROCS=1")},
	)
	if err != nil {
		return nil, err
	}
	cores := float64(runtime.NumCPU())
	return []report.Row{
		row(fmt.Sprintf("verify one shard of %d MiB, pulled before: bytes per CPU second / plain Go loop", size>>20),
			rs.CPURatio(plain, kiln), b.perGB(rs.CPU, "cpu-s", kiln, plain)).AtLeast(1.6),
		row(fmt.Sprintf("its speed on %d cores / on one", runtime.NumCPU()), rs.WallRatio(one, kiln),
			b.perGB(rs.Wall, "s", kiln, one)).AtLeast(0.8 * cores).OfWall(),
	}, nil
}
