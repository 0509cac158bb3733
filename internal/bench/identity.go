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
	return []row{{
		"identify, page cache: bytes per cpu-s / crypto/sha256", ratio, "", ">= 0.80", ratio >= 0.80,
		fmt.Sprintf("%s; crypto/sha256 %.2f GB per cpu-s", spread, rate),
	}}, nil
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
