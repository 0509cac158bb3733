package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// shard is one file of a model that was made here.
type shard struct {
	Name   string
	Data   int64  // bytes behind the header
	SHA256 string // of these bytes, hex
}

// makeModels writes both models in folders of their own, makes one for sockets, and says so in c. The large model takes
// at most half of the disk and a third of the memory, the small one a quarter of its file system. remove is never nil.
func makeModels(ctx context.Context, c *config) (remove func() error, err error) {
	var made []string
	remove = func() (err error) {
		for _, dir := range made {
			err = errors.Join(err, os.RemoveAll(dir))
		}
		return err
	}
	if c.Sockets, err = os.MkdirTemp("", "kiln-gpucheck-"); err != nil { // short: a socket's path has 107 bytes at most
		return remove, err
	}
	made = append(made, c.Sockets)
	available := availableMemory()
	if room(c.Shm) < 1<<20 {
		c.Shm = c.Dir
	}
	c.Small = min(c.Small, room(c.Shm)/4, available/8)
	c.Model = min(c.Model, room(c.Dir)/2, available/3)
	for _, m := range []struct {
		dir    *string
		bytes  int64
		shards *[]shard
	}{{&c.Dir, c.Model, &c.ModelShards}, {&c.Shm, c.Small, &c.SmallShards}} {
		if *m.dir, err = os.MkdirTemp(*m.dir, "kiln-gpucheck-"); err != nil {
			return remove, err
		}
		made = append(made, *m.dir)
		if *m.shards, err = makeModel(ctx, *m.dir, m.bytes, c.Shards); err != nil {
			return remove, fmt.Errorf("make a model of %d bytes: %w", m.bytes, err)
		}
	}
	return remove, nil
}

func makeModel(ctx context.Context, dir string, bytes int64, n int) ([]shard, error) {
	shards := make([]shard, n)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	for i := range shards {
		g.Go(func() (err error) {
			name := fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, n)
			shards[i], err = makeShard(ctx, dir, name, bytes/int64(n)/32*32, byte(i))
			return err
		})
	}
	return shards, g.Wait()
}

// makeShard writes a file of two tensors of n bytes together, whose values are random.
func makeShard(ctx context.Context, dir, name string, n int64, seed byte) (s shard, err error) {
	f, err := os.Create(filepath.Join(dir, name))
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	head := fmt.Sprintf(`{"%s.a":{"dtype":"BF16","shape":[%d],"data_offsets":[0,%d]},`+
		`"%s.b":{"dtype":"F32","shape":[%d],"data_offsets":[%d,%d]}}`, name, n/4, n/2, name, n/8, n/2, n)
	head += strings.Repeat(" ", (16-(8+len(head))%16)%16)
	if _, err := f.Write(append(binary.LittleEndian.AppendUint64(nil, uint64(len(head))), head...)); err != nil {
		return s, err
	}
	h, values := sha256.New(), rand.NewChaCha8([32]byte{seed})
	buf := make([]byte, 1<<20)
	for left := n; left > 0; left -= int64(len(buf)) {
		buf = buf[:min(int64(len(buf)), left)]
		_, _ = values.Read(buf) // it can't fail
		h.Write(buf)
		if _, err := f.Write(buf); err != nil || ctx.Err() != nil {
			return s, errors.Join(err, context.Cause(ctx))
		}
	}
	return shard{name, n, hex.EncodeToString(h.Sum(nil))}, nil
}

// room is the free space of a file system in bytes, 0 where there is none.
func room(dir string) int64 {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0
	}
	return int64(st.Bavail) * st.Bsize
}

// availableMemory is what the kernel says that can be had without paging.
func availableMemory() int64 {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 1 << 30
	}
	defer f.Close()
	return meminfo(f)
}

func meminfo(r io.Reader) int64 {
	for lines := bufio.NewScanner(r); lines.Scan(); {
		if v, found := strings.CutPrefix(lines.Text(), "MemAvailable:"); found {
			if kib, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(v, "kB")), 10, 64); err == nil {
				return kib << 10
			}
		}
	}
	return 1 << 30
}
