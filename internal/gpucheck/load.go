package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
)

const ring = gpuload.DefaultRing

// verified loads a model with every byte hashed, as kiln-pull resident does, and leaves it resident.
func verified(
	ctx context.Context, dir string, shards []shard, t gpuload.Target, o gpuload.Options,
) (*gpuload.Resident, error) {
	src, err := gpuload.OpenDir(dir, false, nil)
	if err != nil {
		return nil, errors.Join(err, t.Free())
	}
	defer src.Close()
	var names []string
	for _, s := range shards {
		names = append(names, s.Name)
	}
	plan, err := gpuload.NewPlan(ctx, src, names, gpuload.Want{})
	if err != nil {
		return nil, errors.Join(err, t.Free())
	}
	return gpuload.Load(ctx, plan, src, t, o)
}

// timed is verified, and gives the memory back.
func timed(
	ctx context.Context, dir string, shards []shard, t gpuload.Target, o gpuload.Options,
) (gpuload.Stats, error) {
	w, err := verified(ctx, dir, shards, t, o)
	if err != nil {
		return gpuload.Stats{}, err
	}
	return w.Stats(), w.Close(ctx)
}

// unhashed brings the same bytes to the device by the same calls, without a look at them.
func unhashed(ctx context.Context, dir string, shards []shard, device, lanes int) (_ time.Duration, err error) {
	t, err := cuda.Open(device)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, t.Free()) }()
	start := time.Now()
	blocks := make([]gpuload.Block, len(shards))
	for i, s := range shards {
		if blocks[i], err = t.Alloc(ctx, device, s.Data); err != nil {
			return 0, err
		}
	}
	chunk := int64(gpuload.DefaultChunk)
	for _, s := range shards {
		chunk = min(chunk, s.Data)
	}
	buf, err := hostMemory(int64(lanes) * ring * chunk)
	if err != nil {
		return 0, err
	}
	if _, err := t.Pin(buf); err != nil {
		return 0, err
	}
	var next atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for lane := range int64(lanes) {
		own := buf[lane*ring*chunk:][:ring*chunk]
		g.Go(func() error {
			for i := next.Add(1) - 1; i < int64(len(shards)); i = next.Add(1) - 1 {
				if err := send(ctx, t, filepath.Join(dir, shards[i].Name), shards[i].Data, blocks[i], own, chunk); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err = g.Wait(); err == nil {
		err = t.Wait(context.WithoutCancel(ctx))
	}
	return time.Since(start), err
}

// send brings the last n bytes of a file to a block, with as many copies under way as buf has chunks.
func send(ctx context.Context, t *cuda.Target, path string, n int64, to gpuload.Block, buf []byte, chunk int64) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	var open [ring]gpuload.Token
	for off, i := int64(0), 0; off < n; off, i = off+chunk, (i+1)%ring {
		if open[i] != nil {
			if err := open[i].Wait(ctx); err != nil {
				return err
			}
		}
		part := buf[int64(i)*chunk:][:min(chunk, n-off)]
		if _, err := f.ReadAt(part, info.Size()-n+off); err != nil {
			return err
		}
		if open[i], err = t.Submit(ctx, part, to, off); err != nil {
			return err
		}
	}
	for _, o := range open {
		if o != nil {
			err = errors.Join(err, o.Wait(ctx))
		}
	}
	return err
}

// overlap compares one pass with its stages, from a file system in memory.
func overlap(ctx context.Context, r *report) error {
	lanes := min(gpuload.DefaultLanes, runtime.GOMAXPROCS(0), r.Shards)
	hash, err := timed(ctx, r.Shm, r.SmallShards, new(hostmem.Discard), gpuload.Options{})
	if err != nil {
		return err
	}
	if _, err := unhashed(ctx, r.Shm, r.SmallShards, r.Device, lanes); err != nil { // touches what is touched once
		return err
	}
	plain, err := unhashed(ctx, r.Shm, r.SmallShards, r.Device, lanes)
	if err != nil {
		return err
	}
	t, err := cuda.Open(r.Device)
	if err != nil {
		return err
	}
	one, err := timed(ctx, r.Shm, r.SmallShards, t, gpuload.Options{})
	if err != nil {
		return err
	}
	where := fmt.Sprintf("%.1f GB of tmpfs, %d lanes: ", float64(one.Bytes)/1e9, lanes)
	return errors.Join(
		r.figure("cores", "%d", runtime.NumCPU()),
		r.figure(where+"read, hash", "%.2f GB/s", gbps(hash.Bytes, hash.Elapsed)),
		r.figure(where+"read, copy", "%.2f GB/s", gbps(one.Bytes, plain)),
		r.figure(where+"read, hash, copy", "%.2f GB/s", gbps(one.Bytes, one.Elapsed)),
		r.figure("one pass / two passes, in time", "%.2f", over(one.Elapsed, hash.Elapsed+plain)),
		r.figure("one pass / its slower half, in time", "%.2f", over(one.Elapsed, max(hash.Elapsed, plain))),
		r.figure("with hash / without, in time", "%.2f", over(one.Elapsed, plain)),
	)
}

func over(a, b time.Duration) float64 { return a.Seconds() / max(b.Seconds(), 1e-9) }

// loadLarge loads the large model out of the page cache and compares with plain copies.
func loadLarge(ctx context.Context, r *report) error {
	best, err := r.plain()
	if err != nil {
		return err
	}
	few := min(gpuload.DefaultLanes, runtime.GOMAXPROCS(0), r.Shards)
	many := min(r.Shards, runtime.GOMAXPROCS(0))
	for _, lanes := range []int{few, many} {
		where := fmt.Sprintf("%.1f GB of page cache, %d lanes: ", float64(r.Model)/1e9, lanes)
		t, err := unhashed(ctx, r.Dir, r.ModelShards, r.Device, lanes)
		if err != nil {
			return err
		}
		target, err := cuda.Open(r.Device)
		if err != nil {
			return err
		}
		o := gpuload.Options{Lanes: lanes, MaxBuffer: int64(lanes) * ring * gpuload.DefaultChunk}
		s, err := timed(ctx, r.Dir, r.ModelShards, target, o)
		if err != nil {
			return err
		}
		rate := gbps(s.Bytes, s.Elapsed)
		if err := errors.Join(
			r.figure(where+"no hash", "%.2f GB/s", gbps(s.Bytes, t)),
			r.figure(where+"load", "%.2f GB/s", rate),
			r.figure(where+"busy", "%s", busy(s)),
			r.goal(where+"load / plain copies", "≥ 0.90", rate >= 0.9*best, "%.2f of %.2f GB/s", rate/best, best),
			r.figure(where+"with hash / without", "%.2f", over(s.Elapsed, t)),
		); err != nil {
			return err
		}
		if many == few {
			break
		}
	}
	return r.readBack(ctx)
}

// busy says how long each stage of a load was at work, in parts of the time of its lanes.
func busy(s gpuload.Stats) string {
	all := s.Elapsed * time.Duration(s.Lanes)
	return fmt.Sprintf("read %.0f %%, hash %.0f %%, copy %.0f %%", 100*over(s.Read, all), 100*over(s.Hash, all),
		100*over(s.Copy, all))
}

// plain is the rate of copies from pinned memory in GB/s.
func (r *report) plain() (rate float64, err error) {
	d, err := openDriver(r.Device)
	if err != nil {
		return 0, err
	}
	buf, err := hostMemory(r.Buffer)
	if err != nil {
		return 0, err
	}
	var p uint64
	if err := errors.Join(d.check("cuMemAlloc", d.alloc(&p, uint64(len(buf)))),
		d.check("cuMemHostRegister", d.pin(buf, uint64(len(buf)), 1))); err != nil {
		return 0, err
	}
	rate, err = d.rate(buf, p, min(usualChunk, r.Buffer), r.Copy, d.toDeviceFrom)
	return rate, errors.Join(err, d.check("cuMemHostUnregister", d.unpin(buf)), d.check("cuMemFree", d.free(p)), d.close())
}

// readBack loads with every byte read back, then audits.
func (r *report) readBack(ctx context.Context) error {
	t, err := cuda.Open(r.Device)
	if err != nil {
		return err
	}
	w, err := verified(ctx, r.Dir, r.ModelShards, t, gpuload.Options{VerifyDevice: true})
	if err != nil {
		return r.need("digests of what is read back", "as on the disk", false, "%v", err)
	}
	s, start := w.Stats(), time.Now()
	err = w.Audit(ctx, nil)
	took := time.Since(start)
	return errors.Join(
		r.need("digests of what is read back", "as on the disk", s.ReadBack > 0, "%d bytes", s.ReadBack),
		r.figure("load with read-back", "%.2f GB/s", gbps(s.Bytes, s.Elapsed)),
		r.need("audit", "the same digests", err == nil, "%.2f GB/s", gbps(s.ReadBack, took)),
		w.Close(ctx),
	)
}
