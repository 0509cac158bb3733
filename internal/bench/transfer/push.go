package transfer

import (
	"context"
	"fmt"
	"net/http"
	"os"

	"golang.org/x/sync/errgroup"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/bench/report"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

// Push measures pushes: of a model that the registry has, and of blobs that it does not have.
func (b *Bench) Push(ctx context.Context) ([]report.Row, error) {
	rows, err := b.pushAgain(ctx)
	if err != nil {
		return nil, fmt.Errorf("push of what is there: %w", err)
	}
	fresh, err := b.pushNew(ctx)
	if err != nil {
		return nil, fmt.Errorf("push of new blobs: %w", err)
	}
	return append(rows, fresh...), nil
}

func (b *Bench) pushAgain(ctx context.Context) ([]report.Row, error) {
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
	h, err := b.hold(ctx, dir, "bench/again", reg)
	if err != nil {
		return nil, err
	}
	m, err := rig.NewMeter(reg.URL)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	const identify = "identify"
	rs, err := rig.Turns(b.Rounds,
		rig.Side{Name: kiln, Work: func(int) (rig.Cost, error) {
			m.Take()
			c, err := rig.Run(ctx, b.path("kiln-push"), "base", "-q", dir, h.ref(m.URL))
			sent, _ := m.Take()
			c.Bytes = float64(sent)
			return c, err
		}},
		rig.Side{Name: identify, Work: func(int) (rig.Cost, error) {
			return rig.Run(ctx, b.path("kiln-push"), "identify", "-q", dir)
		}},
	)
	if err != nil {
		return nil, err
	}
	sent := rs.Each(func(r rig.Round) float64 { return r[kiln].Bytes })
	share := report.Row{
		What: "push of what is there: bytes sent / bytes of the shards", Value: 100 * sent.Median / b.payload(), Unit: " %",
		Notes: fmt.Sprintf("%.0f bytes for %d MiB, headers too", sent.Median, shards*b.Size>>20),
	}
	return []report.Row{
		share.AtMost(0.01),
		row("its wall / `kiln-push identify`", rs.WallRatio(kiln, identify),
			b.perGB(rs.Wall, "s", kiln, identify)).AtMost(1.03).OfWall(),
		row("its CPU / `kiln-push identify`", rs.CPURatio(kiln, identify), b.perGB(rs.CPU, "cpu-s", kiln, identify)),
	}, nil
}

// pushNew sends blobs that nobody has, all at once, by one client to both servers.
func (b *Bench) pushNew(ctx context.Context) ([]report.Row, error) {
	const file, synced = "bare PUT to file", "with fsync"
	put := func(sync string) func(int) (rig.Cost, error) {
		return func(round int) (rig.Cost, error) { return b.putFiles(ctx, round, sync) }
	}
	rs, err := rig.Turns(b.Rounds,
		rig.Side{Name: kiln, Work: func(round int) (rig.Cost, error) { return b.pushBlobs(ctx, round) }},
		rig.Side{Name: file, Work: put("no")},
		rig.Side{Name: synced, Work: put("yes")},
		rig.Side{Name: pure, Work: func(int) (rig.Cost, error) { return b.hashing() }},
	)
	if err != nil {
		return nil, err
	}
	beside := func(reference string) rig.Spread {
		return rs.Each(func(r rig.Round) float64 { return r[kiln].CPU / r[reference].Plus(r[pure]).CPU })
	}
	return []report.Row{
		row(fmt.Sprintf("push of %d new blobs at once: server CPU / (bare PUT to file + crypto/sha256)", shards),
			beside(file), b.perGB(rs.CPU, "cpu-s", kiln, file, pure)).AtMost(0.85),
		row("server CPU / (bare PUT to file with fsync + crypto/sha256)", beside(synced),
			b.perGB(rs.CPU, "cpu-s", synced)),
	}, nil
}

// number is that of a blob that no other round has.
func number(round, i int) uint64 { return uint64(round*shards + i) }

func (b *Bench) pushBlobs(ctx context.Context, round int) (c rig.Cost, err error) {
	reg, err := rig.Kiln(ctx, b.path("kiln-registry"), b.Dir) // a new one, so that the disk does not fill
	if err != nil {
		return c, err
	}
	defer rig.Settle()
	defer reg.Stop()
	var digests [shards]identity.Digest
	for i := range digests {
		digests[i] = rig.DigestOf(number(round, i), b.Size)
	}
	return serving(reg, together(func(i int) error {
		body := rig.Stream(number(round, i), b.Size)
		return b.Client.Push(ctx, reg.URL, "bench/new", digests[i], body, b.Size)
	}))
}

func (b *Bench) putFiles(ctx context.Context, round int, sync string) (c rig.Cost, err error) {
	dir, err := os.MkdirTemp(b.Dir, "put-")
	if err != nil {
		return c, err
	}
	defer rig.Settle()
	defer os.RemoveAll(dir)
	s, err := startSelf(ctx, "bare", dir)
	if err != nil {
		return c, err
	}
	defer s.Stop()
	return serving(s, together(func(i int) error {
		url := fmt.Sprintf("%s/file/%d?sync=%s", s.URL, i, sync)
		_, err := b.Client.Do(ctx, "PUT", url, rig.Stream(number(round, i), b.Size), b.Size, http.StatusCreated)
		return err
	}))
}

// together is work for every shard at once.
func together(work func(i int) error) func() error {
	return func() error {
		var all errgroup.Group
		for i := range shards {
			all.Go(func() error { return work(i) })
		}
		return all.Wait()
	}
}
