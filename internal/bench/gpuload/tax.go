package gpuload

import (
	"context"
	"fmt"
	"runtime"

	"github.com/kiln-registry/kiln-registry/internal/bench/report"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

// The sides of the tables, as their notes call them.
const (
	with      = "with the hash"
	without   = "without"
	one       = "one pass"
	verify    = "read and hash"
	copyAfter = "then read and copy"
)

// Tax measures what the hash adds to a load: from the page cache on every number of cores, and from a source that gives
// half of what can be read and hashed, as a network or a cold disk does.
func (b *Bench) Tax(ctx context.Context) ([]report.Row, error) {
	dir, remove, err := b.model(ctx)
	if err != nil {
		return nil, err
	}
	defer remove()
	pair := func(r run) (rig.Rounds, error) {
		hashed, blind := r, r
		hashed.program, blind.program = b.built.verified, b.built.blind
		return rig.Turns(b.Rounds, b.side(ctx, with, dir, hashed), b.side(ctx, without, dir, blind))
	}
	most, err := b.rate(ctx, dir, run{program: b.built.verified, target: discard})
	if err != nil {
		return nil, err
	}
	var rows []report.Row
	for _, to := range []struct{ target, name string }{{host, "host memory"}, {device, "a device"}} {
		rs, err := pair(run{target: to.target, rate: most / 2})
		if err != nil {
			return nil, err
		}
		what := fmt.Sprintf("to %s, source at %.2f GB/s: wall with the hash / without", to.name, most/2e9)
		rows = append(rows, row(what, rs.WallRatio(with, without), b.perGB(rs.CPU, "cpu-s", with, without),
			b.perGB(rs.Wall, "s", with, without)).AtMost(1.05).OfWall())
	}
	for _, cores := range counts(runtime.NumCPU()) {
		for _, to := range []struct{ target, name string }{{host, "host memory"}, {device, "a device"}} {
			rs, err := pair(run{target: to.target, cores: cores})
			if err != nil {
				return nil, err
			}
			what := fmt.Sprintf("to %s, from the page cache, %d of %d cores: the same", to.name, cores, runtime.NumCPU())
			rows = append(rows, row(what, rs.WallRatio(with, without), rs[0][with].Said, b.perGB(rs.CPU, "cpu-s", with, without),
				b.perGB(rs.Wall, "s", with, without)))
		}
	}
	return rows, nil
}

// counts are 1, 2, 4 and so on, and all.
func counts(all int) (some []int) {
	for n := 1; n < all; n *= 2 {
		some = append(some, n)
	}
	return append(some, all)
}

// OnePass compares a load with a check of all files that is followed by a load of them, where the source gives as many
// bytes as are hashed: by one lane, which is one core, and by all.
func (b *Bench) OnePass(ctx context.Context) ([]report.Row, error) {
	dir, remove, err := b.model(ctx)
	if err != nil {
		return nil, err
	}
	defer remove()
	row := func(what, target string, args ...string) (report.Row, error) {
		most, err := b.rate(ctx, dir, run{program: b.built.verified, target: discard, args: args})
		if err != nil {
			return report.Row{}, err
		}
		rs, err := rig.Turns(b.Rounds,
			b.side(ctx, one, dir, run{program: b.built.verified, target: target, rate: most, args: args}),
			b.side(ctx, verify, dir, run{program: b.built.verified, target: discard, rate: most, args: args}),
			b.side(ctx, copyAfter, dir, run{program: b.built.blind, target: target, rate: most, args: args}),
		)
		if err != nil {
			return report.Row{}, err
		}
		both := rs.Each(func(r rig.Round) float64 { return r[one].Wall / (r[verify].Wall + r[copyAfter].Wall) })
		return row(fmt.Sprintf("%s, source at %.2f GB/s: one pass / two", what, most/1e9), both,
			b.perGB(rs.Wall, "s", one, verify, copyAfter), b.perGB(rs.CPU, "cpu-s", one, verify, copyAfter)), nil
	}
	host1, err := row("one lane, to host memory", host, "-lanes", "1")
	if err != nil {
		return nil, err
	}
	device1, err := row("one lane, to a device", device, "-lanes", "1")
	if err != nil {
		return nil, err
	}
	devices, err := row("all lanes, to a device", device)
	if err != nil {
		return nil, err
	}
	hosts, err := row("all lanes, to host memory", host)
	return []report.Row{
		host1.AtMost(0.6).OfWall(), device1.AtMost(0.6).OfWall(), devices.AtMost(0.6).OfWall(), hosts,
	}, err
}
