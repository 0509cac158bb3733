package gpuload

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/kiln-registry/kiln-registry/internal/bench/report"
)

// Memory measures what a load takes besides the weights, by the size of the model.
func (b *Bench) Memory(ctx context.Context) ([]report.Row, error) {
	if err := b.build(ctx); err != nil {
		return nil, err
	}
	sizes := []int64{1 << 28, 1 << 29, 1 << 30}
	if b.Full {
		sizes = []int64{1 << 28, 1 << 30, 1 << 32}
	}
	device, err := b.memory(ctx, device, sizes)
	if err != nil {
		return nil, err
	}
	host, err := b.memory(ctx, host, sizes)
	if err != nil {
		return nil, err
	}
	small, large := device[0], device[len(device)-1]
	pinned := report.Row{
		What:  fmt.Sprintf("pinned to load %d MiB to a device / %d MiB", large.Bytes>>20, small.Bytes>>20),
		Value: float64(large.Pinned) / float64(small.Pinned),
		Notes: list(device, func(l loaded) float64 { return float64(l.Pinned) / (1 << 20) }),
	}
	if small.Pinned == 0 {
		return nil, fmt.Errorf("nothing was pinned")
	}
	return []report.Row{pinned.AtMost(1), beyond("a device", device), beyond("host memory", host)}, nil
}

// memory loads models of these sizes and watches.
func (b *Bench) memory(ctx context.Context, target string, sizes []int64) (all []loaded, err error) {
	for _, size := range sizes {
		dir, err := b.Model(ctx, shards, size/shards)
		if err != nil {
			return nil, err
		}
		l, err := b.load(ctx, dir, run{program: b.built.verified, target: target, args: []string{"-peak"}})
		if err != nil {
			return nil, err
		}
		if err := os.RemoveAll(dir); err != nil {
			return nil, err
		}
		all = append(all, l)
	}
	return all, nil
}

// beyond is the anonymous memory that the process had at most, without the buffers.
func beyond(target string, all []loaded) report.Row {
	of := func(l loaded) float64 { return l.Anonymous - float64(l.Buffer)/(1<<20) }
	r := report.Row{
		What: "anonymous memory besides the buffers, to " + target, Unit: " MiB",
		Notes: list(all, of) + list(all, func(l loaded) float64 { return float64(l.Buffer) / (1 << 20) }, "; buffers"),
	}
	for _, l := range all {
		r.Value = max(r.Value, of(l))
	}
	return r.AtMost(64)
}

// list gives a number of MiB for each model.
func list(all []loaded, of func(loaded) float64, before ...string) string {
	texts := make([]string, len(all))
	for i, l := range all {
		texts[i] = fmt.Sprintf("%.1f MiB at %d", of(l), l.Bytes>>20)
	}
	return strings.TrimSpace(strings.Join(before, "") + " " + strings.Join(texts, ", "))
}
