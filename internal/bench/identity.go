package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/identity/lanes/block"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

// identity compares the bytes that kiln-push identify hashes in a processor second, page cache warm, with what the
// standard library's SHA-256 does in memory.
func (b *bench) identity(ctx context.Context) ([]row, error) {
	dir, err := b.model(ctx, 4, b.size)
	if err != nil {
		return nil, err
	}
	var ratios, rates []float64
	for i := range b.rounds + 1 {
		var pure, ours float64
		for side := range 2 {
			if (side+i)%2 == 0 {
				pure, err = pureRate()
			} else {
				ours, err = b.identifyRate(ctx, dir)
			}
			if err != nil {
				return nil, err
			}
		}
		if i > 0 { // round 0 fills the page cache
			ratios, rates = append(ratios, ours/pure), append(rates, pure/1e9)
		}
	}
	ratio, spread := median(ratios)
	rate, _ := median(rates)
	kernels, err := b.kernels()
	return append([]row{{
		"identify, page cache: bytes per cpu-s / crypto/sha256", ratio, "", ">= 0.80", ratio >= 0.80,
		fmt.Sprintf("%s; crypto/sha256 %.2f GB per cpu-s", spread, rate),
	}}, kernels...), err
}

// kernelBytes are hashed by each side of a round of the kernels.
const kernelBytes = 256 << 20

// kernels compares the kernels of identity/lanes/block over memory in the caches, and Write as it is used, with
// crypto/sha256 over one buffer that stays in cache. A kernel that this processor lacks has no row.
func (b *bench) kernels() ([]row, error) {
	sides := []rig.Side{onThread("library", pureWork)}
	type goal struct {
		what  string
		least float64
	}
	var goals []goal
	add := func(kernel string, streams int, apart string, work func(), least float64) {
		what := fmt.Sprintf("%s, %d streams, %s: bytes per cpu-s / crypto/sha256", kernel, streams, apart)
		sides, goals = append(sides, onThread(what, work)), append(goals, goal{what, least})
	}
	for _, c := range []struct {
		name    string
		streams int
		least   float64
	}{{"x4", 2, 0}, {"x4", 3, 0}, {"x4", 4, 1.6}, {"x16", 8, 0}, {"x16", 12, 0}, {"x16", 16, 2.1}} {
		k, err := block.Named(c.name)
		if err != nil {
			continue
		}
		add(c.name, c.streams, "16 KiB each", kernelWork(k, lanes.Buffers(c.streams, 16<<10)), c.least)
		if c.least > 0 {
			add(c.name, c.streams, "at equal offsets", kernelWork(k, inLine(c.streams, 16<<10)), 0)
			add("Write", c.streams, "256 KiB each", writeWork(lanes.Buffers(c.streams, rig.Piece)), c.least)
		}
	}
	rs, err := rig.Turns(max(b.rounds, 7), sides...)
	if err != nil {
		return nil, err
	}
	rows := make([]row, 0, len(goals))
	for _, g := range goals {
		s := rs.CPURatio("library", g.what)
		r := row{what: g.what, value: s.Median, notes: s.String()}
		if g.least > 0 {
			r = r.atLeast(g.least)
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// inLine are buffers whose addresses are equal in their last twelve bits.
func inLine(n, size int) [][]byte {
	all, bufs := make([]byte, n*size), make([][]byte, n)
	for i := range bufs {
		bufs[i] = all[i*size : (i+1)*size]
	}
	return bufs
}

// onThread is a side of which the processor time of one thread counts.
func onThread(name string, work func()) rig.Side {
	return rig.Side{Name: name, Work: func(int) (rig.Cost, error) {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		before, err := threadSeconds()
		if err != nil {
			return rig.Cost{}, err
		}
		work()
		after, err := threadSeconds()
		return rig.Cost{CPU: after - before}, err
	}}
}

func pureWork() {
	buf, h := make([]byte, rig.Piece), sha256.New()
	for range kernelBytes / rig.Piece {
		h.Write(buf)
	}
}

// kernelWork gives all streams to one call of the kernel again and again.
func kernelWork(k block.Kernel, bufs [][]byte) func() {
	states := make([]block.State, len(bufs))
	return func() {
		for range kernelBytes / (len(bufs) * len(bufs[0])) {
			k.Run(states, bufs)
		}
	}
}

// writeWork writes to as many hashes, by whatever kernel this processor is best at.
func writeWork(bufs [][]byte) func() {
	pieces := make([]lanes.Piece, len(bufs))
	for i := range pieces {
		pieces[i] = lanes.Piece{To: identity.NewHash(), Data: bufs[i]}
	}
	return func() {
		for range kernelBytes / (len(bufs) * len(bufs[0])) {
			lanes.Write(pieces...)
		}
	}
}

// identifyRate returns the shard bytes per processor second of one run of kiln-push identify.
func (b *bench) identifyRate(ctx context.Context, dir string) (float64, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(b.bin, "kiln-push"), "identify", dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("identify: %w: %s", err, out)
	}
	used := cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	return float64(4*b.size) / used.Seconds(), nil
}

// pureRate returns the bytes per processor second of crypto/sha256 over a buffer that stays in cache.
func pureRate() (float64, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	const total = 1 << 30
	buf, h := make([]byte, rig.Piece), sha256.New()
	before, err := threadSeconds()
	if err != nil {
		return 0, err
	}
	for range total / rig.Piece {
		h.Write(buf)
	}
	after, err := threadSeconds()
	return total / (after - before), err
}

func threadSeconds() (float64, error) {
	var u unix.Rusage
	err := unix.Getrusage(unix.RUSAGE_THREAD, &u)
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9, err
}

// model writes a model folder of the given shards and bytes a shard.
func (b *bench) model(ctx context.Context, shards int, size int64) (string, error) {
	dir := filepath.Join(b.dir, fmt.Sprintf("model-%d-%d", shards, size))
	cmd := exec.CommandContext(ctx, "go", "run", "./internal/testmodel", "-shards", strconv.Itoa(shards),
		"-size", strconv.FormatInt(int64(shards)*size, 10), dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("testmodel: %w: %s", err, out)
	}
	return dir, nil
}
