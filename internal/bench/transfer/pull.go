package transfer

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/kiln-registry/kiln-registry/internal/bench/report"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

// More sides, as the notes call them.
const (
	curl     = "curl"
	curlAll  = "curl --parallel"
	oras     = "oras pull"
	hub      = "huggingface_hub"
	discard  = "GET, discard"
	toFile   = "write"
	toDisk   = "write with fsync"
	verified = " then openssl dgst"
)

// Pull measures the pull of a model beside what others do with the same files, and what it is made of at least.
func (b *Bench) Pull(ctx context.Context) ([]report.Row, error) {
	if err := found("curl", "openssl", "xargs"); err != nil {
		return nil, err
	}
	reg, err := rig.Kiln(ctx, b.path("kiln-registry"), b.Dir)
	if err != nil {
		return nil, err
	}
	defer reg.Stop()
	dir, err := b.Model(ctx, shards, b.Size)
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	h, err := b.hold(ctx, dir, "bench/model", reg)
	if err != nil {
		return nil, err
	}
	hubServer, err := startSelf(ctx, "hub", dir)
	if err != nil {
		return nil, err
	}
	defer hubServer.Stop()
	rs, err := rig.Turns(b.Rounds, b.pullSides(ctx, h, reg, hubServer)...)
	if err != nil {
		return nil, fmt.Errorf("pull: %w", err)
	}
	rows := append(b.pullRows(rs), b.rates(rs)...)
	serving, err := b.servers(ctx, h, reg)
	return append(rows, serving...), err
}

// pullSides are what takes turns. Each side has a new folder, and what it wrote is gone before the next one begins.
func (b *Bench) pullSides(ctx context.Context, h held, reg, hubServer *rig.Server) []rig.Side {
	urls := h.blobs(reg.URL)
	in := func(name string, work func(dir string) (rig.Cost, error)) rig.Side {
		return rig.Side{Name: name, Work: func(int) (rig.Cost, error) {
			dir, err := os.MkdirTemp(b.Dir, "pull-")
			if err != nil {
				return rig.Cost{}, err
			}
			defer os.RemoveAll(dir)
			return rig.Synced(dir, work)
		}}
	}
	writing := func(sync string) func(string) (rig.Cost, error) {
		return func(dir string) (rig.Cost, error) {
			return self(ctx, "write", dir, fmt.Sprint(shards), fmt.Sprint(b.Size), sync)
		}
	}
	fetching := func(flags ...string) func(string) (rig.Cost, error) {
		return func(dir string) (rig.Cost, error) { return fetch(ctx, dir, urls, flags...) }
	}
	return []rig.Side{
		in(kiln, func(dir string) (rig.Cost, error) {
			return rig.Run(ctx, b.path("kiln-pull"), "pull", "-q", h.ref(reg.URL), filepath.Join(dir, "model"))
		}),
		in(curl+verified, func(dir string) (rig.Cost, error) {
			c, err := fetching()(dir)
			if err != nil {
				return c, err
			}
			d, err := rig.Run(ctx, "openssl", append([]string{"dgst", "-sha256"}, files(dir)...)...)
			return c.Plus(d), err
		}),
		in(curlAll+verified, func(dir string) (rig.Cost, error) {
			c, err := fetching("--parallel", "--parallel-immediate")(dir)
			if err != nil {
				return c, err
			}
			d, err := xargs(ctx, files(dir), "-P", fmt.Sprint(runtime.NumCPU()), "-n", "1", "openssl", "dgst", "-sha256")
			return c.Plus(d), err
		}),
		in(curlAll, fetching("--parallel", "--parallel-immediate")),
		in(oras, func(dir string) (rig.Cost, error) {
			return rig.RunWith(ctx, []string{"ORAS_CACHE="}, filepath.Join(b.Tools, "bin", "oras"), "pull", "--plain-http",
				"--no-tty", h.ref(reg.URL), "-o", dir)
		}),
		in(hub, func(dir string) (rig.Cost, error) { return b.snapshot(ctx, hubServer, dir) }),
		in(discard, func(string) (rig.Cost, error) { return self(ctx, append([]string{"get"}, urls...)...) }),
		in(toFile, writing("no")),
		in(toDisk, writing("yes")),
		in(pure, func(string) (rig.Cost, error) { return b.hashing() }),
	}
}

// pullRows say what a pull costs the client, and how long it takes.
func (b *Bench) pullRows(rs rig.Rounds) []report.Row {
	parts := func(write string) rig.Spread {
		return rs.Each(func(r rig.Round) float64 {
			return r[kiln].CPU / r[discard].Plus(r[pure]).Plus(r[write]).CPU
		})
	}
	wall := func(side string) string {
		synced := rs.Each(func(r rig.Round) float64 { return r[side].Synced }).Median
		return b.perGB(rs.Wall, "s", side) + fmt.Sprintf(", %.3g until its files are on the disk", synced/b.gb())
	}
	return []report.Row{
		row(fmt.Sprintf("pull and verify %d shards: client CPU / (GET, discard + crypto/sha256 + file write)", shards),
			parts(toFile), b.perGB(rs.CPU, "cpu-s", kiln, discard, pure, toFile)).AtMost(0.90),
		row("client CPU / the same with fsync, as kiln-pull does", parts(toDisk), b.perGB(rs.CPU, "cpu-s", toDisk)),
		row("wall / `curl`, then `openssl dgst`", rs.WallRatio(kiln, curl+verified),
			wall(kiln), wall(curl+verified)).AtMost(0.55).OfWall(),
		row("CPU / `curl`, then `openssl dgst`", rs.CPURatio(kiln, curl+verified),
			b.perGB(rs.CPU, "cpu-s", curl+verified)),
		row("wall / `curl --parallel`, then `openssl dgst` on all cores", rs.WallRatio(kiln, curlAll+verified),
			wall(curlAll+verified)),
		row("wall / `oras pull`", rs.WallRatio(kiln, oras), wall(oras)).AtMost(1).OfWall(),
		row("CPU / `oras pull`", rs.CPURatio(kiln, oras), b.perGB(rs.CPU, "cpu-s", oras)),
		row("wall / `huggingface_hub` snapshot_download, which checks sizes only", rs.WallRatio(kiln, hub),
			wall(hub)).AtMost(1).OfWall(),
		row("wall / `curl --parallel`, which checks nothing", rs.WallRatio(kiln, curlAll), wall(curlAll)),
	}
}

// rates say how many bytes each receives in a processor second, and so up to which link it waits for the link alone:
// there a pull that verifies is as fast as one that does not.
func (b *Bench) rates(rs rig.Rounds) (rows []report.Row) {
	cores := runtime.NumCPU()
	most := map[string]float64{}
	for _, c := range []struct {
		side  string
		cores int // that it can use
		does  string
	}{
		{kiln, cores, "verified and on the disk"}, {oras, cores, "verified"}, {curlAll, 1, "not verified; one thread"},
		{hub, 1, "sizes only; one Python process"},
	} {
		s := rs.Each(func(r rig.Round) float64 { return b.gb() / r[c.side].CPU })
		most[c.side] = 8 * s.Median * float64(c.cores)
		r := row("received by "+c.side+" in a second of one core", s, c.does,
			fmt.Sprintf("keeps up with a link of %.1f Gbit/s", most[c.side]))
		r.Unit = " GB"
		rows = append(rows, r)
	}
	link := report.Row{
		What: "link that a pull keeps up with, verified", Value: most[kiln], Unit: " Gbit/s",
		Notes: fmt.Sprintf("%d cores; up to there no other can be faster", cores),
	}
	beyond := []string{}
	for _, side := range []string{oras, curlAll, hub} {
		if most[kiln] >= most[side] {
			beyond = append(beyond, side)
		}
	}
	if len(beyond) > 0 {
		link.Notes += ", nor beyond it: " + strings.Join(beyond, ", ")
	}
	return append(rows, link)
}

// fetch has curl write every address to a file.
func fetch(ctx context.Context, dir string, urls []string, flags ...string) (rig.Cost, error) {
	args := append([]string{"--silent", "--show-error", "--fail"}, flags...)
	for i, url := range urls {
		args = append(args, "--output", filepath.Join(dir, fmt.Sprint("shard-", i)), url)
	}
	return rig.Run(ctx, "curl", args...)
}

// files are the regular files of a folder.
func files(dir string) (paths []string) {
	entries, _ := os.ReadDir(dir) // what is not there fails where it is used
	for _, e := range entries {
		paths = append(paths, filepath.Join(dir, e.Name()))
	}
	return paths
}
