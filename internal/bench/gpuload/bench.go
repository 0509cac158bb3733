// Package gpuload measures what it costs to load a model and to check every byte of it: beside the same loader without
// the hash, beside two passes, and beside the loaders of others that check nothing.
package gpuload

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda/fakecuda"
	"github.com/kiln-registry/kiln-registry/internal/bench/report"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

// Bench is how much is measured, and with what.
type Bench struct {
	Bin    string // folder of the three binaries
	Tools  string // folder of what is installed for measurements
	Dir    string // scratch
	Size   int64  // bytes of a large shard
	Rounds int
	Full   bool // the sizes that the goals name

	// Model makes a folder of so many shards of so many bytes, or finds it made.
	Model func(ctx context.Context, shards int, size int64) (string, error)

	built programs
}

// shards are as many as a model of some gigabytes has.
const shards = 4

// The targets of program load.
const (
	host    = "host"
	device  = "cuda" // a fake one, whose copies take time and no processor
	discard = "discard"
)

// deviceRate is what the fake device takes in a second: as much as PCIe 4 brings to a card.
const deviceRate = 25e9

// loaded is what program load says.
type loaded struct {
	Wall      float64  `json:"wall"`
	CPU       float64  `json:"cpu"`
	Bytes     int64    `json:"bytes"`
	Buffer    int64    `json:"buffer"`
	Lanes     int      `json:"lanes"`
	Pinned    int64    `json:"pinned"`
	Anonymous float64  `json:"anonymous"` // MiB
	Aggregate string   `json:"aggregate"`
	Files     []string `json:"files"`
}

// run is one load by a program.
type run struct {
	program string
	target  string
	rate    float64  // of the source, in bytes a second; 0: as fast as it is
	cores   int      // 0: all
	args    []string // more of them
}

// load runs it on a folder.
func (b *Bench) load(ctx context.Context, dir string, r run) (l loaded, err error) {
	args := append([]string{r.program, "-target", r.target, "-rate", strconv.FormatFloat(r.rate, 'f', 0, 64)}, r.args...)
	if r.cores > 0 {
		args = append([]string{"taskset", "-c", fmt.Sprintf("0-%d", r.cores-1)}, args...)
	}
	env := []string{
		cuda.EnvLibrary + "=" + b.built.driver, fmt.Sprintf("FAKECUDA_BANDWIDTH=%.0f", deviceRate), "FAKECUDA_NO_BYTES=1",
		fmt.Sprintf("FAKECUDA_MEMORY=%d", int64(1)<<40),
	}
	c, err := rig.RunWith(ctx, env, args[0], append(args[1:], dir)...)
	if err != nil {
		return l, err
	}
	if err := json.Unmarshal([]byte(c.Said), &l); err != nil {
		return l, fmt.Errorf("%s: %w", r.program, err)
	}
	return l, nil
}

// side is a run on a folder that takes turns with others.
func (b *Bench) side(ctx context.Context, name, dir string, r run) rig.Side {
	return rig.Side{Name: name, Work: func(int) (rig.Cost, error) {
		l, err := b.load(ctx, dir, r)
		return rig.Cost{CPU: l.CPU, Wall: l.Wall, Said: fmt.Sprintf("%d lanes", l.Lanes)}, err
	}}
}

// rate returns how many bytes a second a run takes, the median of some.
func (b *Bench) rate(ctx context.Context, dir string, r run) (float64, error) {
	rs, err := rig.Turns(3, b.side(ctx, r.target, dir, r))
	if err != nil {
		return 0, err
	}
	return b.payload() / rs.Wall(r.target).Median, nil
}

// payload is the bytes of all shards.
func (b *Bench) payload() float64 { return float64(shards * b.Size) }

// model makes the folder of a table.
func (b *Bench) model(ctx context.Context) (dir string, remove func(), err error) {
	if err := b.build(ctx); err != nil {
		return "", nil, err
	}
	dir, err = b.Model(ctx, shards, b.Size)
	return dir, func() { os.RemoveAll(dir) }, err
}

// row is a median with its spread, and what else there is to say.
func row(what string, s rig.Spread, notes ...string) report.Row {
	return report.Row{What: what, Value: s.Median, Notes: strings.Join(append([]string{s.String()}, notes...), "; ")}
}

// perGB says what sides take for a gigabyte each.
func (b *Bench) perGB(of func(side string) rig.Spread, unit string, sides ...string) string {
	texts := make([]string, len(sides))
	for i, side := range sides {
		texts[i] = fmt.Sprintf("%s %.3g", side, of(side).Median/(b.payload()/1e9))
	}
	return strings.Join(texts, ", ") + " " + unit + " per GB"
}

// programs are what is built for the tables.
type programs struct{ verified, blind, driver string }

// build builds them, once.
func (b *Bench) build(ctx context.Context) (err error) {
	if b.built.driver != "" {
		return nil
	}
	p := programs{verified: filepath.Join(b.Dir, "load"), blind: filepath.Join(b.Dir, "load-without-hash")}
	if err := build(ctx, p.verified, nil); err != nil {
		return err
	}
	if err := build(ctx, p.blind, withoutHash); err != nil {
		return err
	}
	lib := filepath.Join(b.Dir, "driver")
	if err := os.Mkdir(lib, 0o777); err != nil {
		return err
	}
	if p.driver, err = fakecuda.Build(lib); err != nil {
		return err
	}
	b.built = p
	return nil
}
