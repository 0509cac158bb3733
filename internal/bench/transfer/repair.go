package transfer

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kiln-registry/kiln-registry/internal/bench/report"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

const (
	segment  = 16 << 20 // bytes between two midstates
	quarters = 4        // of a segment, each with its damaged byte
	answers  = 1 << 20  // bytes that all other answers of a repair may take
	large    = 5e9      // bytes of the shard that the goal names
	goalBy   = 300.0    // part of it that a repair may fetch
	fewFiles = 4
	allFiles = 68
	small    = 1 << 20 // bytes of a shard where the bytes do not count
)

// Repair measures what a pull fetches again for one flipped byte in a large shard, and a pull of what the node's cache
// has.
func (b *Bench) Repair(ctx context.Context) ([]report.Row, error) {
	reg, err := rig.Kiln(ctx, b.path("kiln-registry"), b.Dir)
	if err != nil {
		return nil, err
	}
	defer reg.Stop()
	damaged, err := b.damage(ctx, reg)
	if err != nil {
		return nil, fmt.Errorf("repair: %w", err)
	}
	cached, err := b.cached(ctx, reg)
	if err != nil {
		return nil, fmt.Errorf("cache: %w", err)
	}
	return append(damaged, cached...), nil
}

func (b *Bench) damage(ctx context.Context, reg *rig.Server) ([]report.Row, error) {
	size := b.Size
	if b.Full {
		size = large
	}
	dir := filepath.Join(b.Dir, "large")
	defer os.RemoveAll(dir)
	if err := zeros(dir, size); err != nil {
		return nil, err
	}
	h, err := b.hold(ctx, dir, "bench/large", reg)
	if err != nil {
		return nil, err
	}
	m, err := rig.NewMeter(reg.URL)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	out := filepath.Join(b.Dir, "large-pulled")
	defer os.RemoveAll(out)
	pull := func() error {
		_, err := rig.Run(ctx, b.path("kiln-pull"), "pull", "-q", h.ref(m.URL), out)
		return err
	}
	if err := pull(); err != nil {
		return nil, err
	}
	shard := filepath.Join(out, h.shards[0].Filename)
	var fetched []float64
	for _, at := range places(size) {
		if err := flip(shard, at); err != nil {
			return nil, err
		}
		m.Take()
		if err := pull(); err != nil {
			return nil, err
		}
		_, received := m.Take()
		fetched = append(fetched, float64(received))
	}
	if _, err := rig.Run(ctx, b.path("kiln-pull"), "verify", "-q", out); err != nil {
		return nil, err
	}
	return []report.Row{b.refetched(float64(size), fetched)}, nil
}

// places are the bytes of a shard that are flipped, one after the other: one in the middle of each quarter of a segment,
// and its last one.
func places(size int64) (at []int64) {
	first := (size/2 + size/7) / segment * segment
	for i := range int64(quarters) {
		at = append(at, first+i*segment/quarters+segment/quarters/2)
	}
	return append(at, first+segment-1)
}

// refetched is the row of what was fetched for each of places.
func (b *Bench) refetched(size float64, fetched []float64) report.Row {
	quarter, last := fetched[:quarters], fetched[quarters]
	var sum float64
	for _, n := range quarter {
		sum += n
	}
	mean := sum / quarters
	limit := size / goalBy
	if !b.Full { // too small for that
		limit = segment*(quarters+1)/(2*quarters) + answers
	}
	r := report.Row{
		What:  fmt.Sprintf("one flipped byte in a shard of %.0f MB: fetched again, mean of four places", size/1e6),
		Value: mean / 1e6, Unit: " MB",
		Notes: fmt.Sprintf("mean 1/%.0f of the shard, headers too, of one place in each quarter of a segment; worst of these "+
			"1/%.0f; worst of all places, the last byte of a segment, 1/%.0f: %.2f MB",
			size/mean, size/slices.Max(quarter), size/last, last/1e6),
	}
	return r.AtMost(limit / 1e6)
}

// zeros makes a model of one shard whose tensor is all zeros, and takes no room on a disk that can leave holes.
func zeros(dir string, size int64) error {
	if err := os.Mkdir(dir, 0o777); err != nil {
		return err
	}
	const room = 128 // of the header: what follows it has its place whatever the size is called
	header := fmt.Sprintf(`{"weight":{"dtype":"U8","shape":[%[1]d],"data_offsets":[0,%[1]d]}}`, size-8-room)
	header += strings.Repeat(" ", room-len(header))
	var b bytes.Buffer
	b.Write(binary.LittleEndian.AppendUint64(nil, room))
	b.WriteString(header)
	path := filepath.Join(dir, "model.safetensors")
	if err := os.WriteFile(path, b.Bytes(), 0o666); err != nil {
		return err
	}
	return os.Truncate(path, size)
}

// flip changes one byte of a file.
func flip(path string, at int64) error {
	if err := os.Chmod(path, 0o644); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var p [1]byte
	if _, err := f.ReadAt(p[:], at); err != nil {
		return err
	}
	p[0] ^= 1
	_, err = f.WriteAt(p[:], at)
	return err
}

// cached pulls models of few and of many small shards that the cache has. What they differ by is what a shard takes.
func (b *Bench) cached(ctx context.Context, reg *rig.Server) ([]report.Row, error) {
	const few, many = "few", "many"
	cache := filepath.Join(b.Dir, "cache")
	defer os.RemoveAll(cache)
	m, err := rig.NewMeter(reg.URL)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	var sides []rig.Side
	for _, model := range []struct {
		name   string
		shards int
	}{{few, fewFiles}, {many, allFiles}} {
		name := model.name
		dir, err := b.Model(ctx, model.shards, small)
		if err != nil {
			return nil, err
		}
		h, err := b.hold(ctx, dir, "bench/cached-"+name, reg)
		if err != nil {
			return nil, err
		}
		sides = append(sides, rig.Side{Name: name, Work: func(int) (rig.Cost, error) {
			out := filepath.Join(b.Dir, "cached-"+name)
			defer os.RemoveAll(out)
			m.Take()
			c, err := rig.Run(ctx, b.path("kiln-pull"), "pull", "-q", "--cache", cache, h.ref(m.URL), out)
			_, received := m.Take()
			c.Bytes = float64(received)
			return c, err
		}})
	}
	rs, err := rig.Turns(b.Rounds, sides...)
	if err != nil {
		return nil, err
	}
	each := row("pull of what the cache has: wall for each shard", rs.Each(func(r rig.Round) float64 {
		return 1000 * (r[many].Wall - r[few].Wall) / (allFiles - fewFiles)
	}), fmt.Sprintf("%d shards %.0f ms, %d shards %.0f ms", allFiles, 1000*rs.Wall(many).Median, fewFiles,
		1000*rs.Wall(few).Median))
	each.Unit = " ms"
	written := row("bytes that it writes for each / bytes of a shard", rs.Each(func(r rig.Round) float64 {
		return 100 * (r[many].Written - r[few].Written) / ((allFiles - fewFiles) * small)
	}), "folder entries and the record of the pull too")
	written.Unit = " %"
	received := row("bytes received for each / bytes of a shard", rs.Each(func(r rig.Round) float64 {
		return 100 * (r[many].Bytes - r[few].Bytes) / ((allFiles - fewFiles) * small)
	}))
	received.Unit = " %"
	return []report.Row{each.AtMost(1).OfWall(), written.AtMost(0.1), received.AtMost(0.1)}, nil
}
