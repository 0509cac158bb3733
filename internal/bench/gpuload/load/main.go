// Command load loads the shards of a folder once, or attaches to what another process holds, and says in JSON what that
// took. Package gpuload of bench builds it twice: as it is, and with a copy of the loader that hashes nothing.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda/fakecuda"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

// Result is what is printed. Sizes are in bytes, times in seconds.
type Result struct {
	Wall      float64 `json:"wall"` // from the opening of the folder to publication
	CPU       float64 `json:"cpu"`
	Bytes     int64   `json:"bytes"`
	Buffer    int64   `json:"buffer"`
	Lanes     int     `json:"lanes"`
	Pinned    int64   `json:"pinned"`    // the most that the driver had, where it tells
	Anonymous float64 `json:"anonymous"` // the most that was seen, in MiB; 0 without -peak
	Aggregate string  `json:"aggregate"`
	Line      string  `json:"line"`

	Files []string `json:"files,omitempty"` // of -attach: the inodes of the memory that is mapped
}

func main() {
	r, err := run(context.Background(), os.Args[1:])
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(r)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// load is what to load, and how.
type load struct {
	dir, target string
	rate        float64
	direct      bool
	options     gpuload.Options
}

func run(ctx context.Context, args []string) (r Result, err error) {
	var l load
	fs := flag.NewFlagSet("load", flag.ContinueOnError)
	fs.StringVar(&l.target, "target", hostmem.Backend, "host, cuda or discard")
	fs.Float64Var(&l.rate, "rate", 0, "bytes that the source gives in a second, at most; 0: as many as it has")
	fs.BoolVar(&l.direct, "direct", false, "read past the page cache")
	fs.IntVar(&l.options.Lanes, "lanes", 0, "shards in work at once; 0: the default")
	fs.Int64Var(&l.options.ChunkBytes, "chunk", 0, "bytes of a buffer; 0: what kiln-pull takes")
	peak := fs.Bool("peak", false, "watch the memory")
	socket := fs.String("socket", "", "load nothing: attach here to the AGGREGATE that is named in place of the folder")
	if err := fs.Parse(args); err != nil {
		return r, err
	}
	if fs.NArg() != 1 {
		return r, errors.New("want one folder")
	}
	if *socket != "" {
		return attached(ctx, *socket, fs.Arg(0))
	}
	l.dir = fs.Arg(0)
	if l.options.ChunkBytes == 0 && l.target != cuda.Backend && !l.direct {
		l.options.ChunkBytes = hostmem.Chunk
	}
	if !*peak {
		return l.measured(ctx)
	}
	r.Anonymous, err = rig.Peak(os.Getpid(), func() error {
		most := r.Anonymous
		r, err = l.measured(ctx)
		r.Anonymous = most
		return err
	})
	return r, err
}

// measured loads and says what that took. What is freed afterwards is no part of it.
func (l load) measured(ctx context.Context) (r Result, err error) {
	t, pinned, err := l.open()
	if err != nil {
		return r, err
	}
	l.options.Progress = func(string, int64) { pinned() }
	before, err := seconds()
	if err != nil {
		return r, err
	}
	began := time.Now()
	held, err := l.load(ctx, t)
	if err != nil {
		return r, errors.Join(err, t.Free())
	}
	r.Wall = time.Since(began).Seconds()
	after, err := seconds()
	s := held.Stats()
	r.CPU, r.Bytes, r.Buffer, r.Lanes, r.Pinned = after-before, s.Bytes, s.Buffer, s.Lanes, pinned()
	r.Aggregate, r.Line = held.Manifest().Aggregate.String(), s.String()
	return r, errors.Join(err, held.Close(ctx))
}

func (l load) load(ctx context.Context, t gpuload.Target) (*gpuload.Resident, error) {
	names, err := filepath.Glob(filepath.Join(l.dir, "*.safetensors"))
	if err != nil {
		return nil, err
	}
	for i := range names {
		names[i] = filepath.Base(names[i])
	}
	dir, err := gpuload.OpenDir(l.dir, l.direct, note)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	var src gpuload.Source = dir
	if l.rate > 0 {
		src = &throttled{Source: dir, rate: l.rate}
	}
	p, err := gpuload.NewPlan(ctx, src, names, gpuload.Want{})
	if err != nil {
		return nil, err
	}
	l.options.Notify = note
	return gpuload.Load(ctx, p, src, t, l.options)
}

func note(line string) { fmt.Fprintln(os.Stderr, line) }

// open returns the target, and what says how much memory its driver has pinned at most so far.
func (l load) open() (gpuload.Target, func() int64, error) {
	switch l.target {
	case hostmem.Backend:
		return new(hostmem.Target), func() int64 { return 0 }, nil
	case "discard":
		return new(hostmem.Discard), func() int64 { return 0 }, nil
	case cuda.Backend:
		t, err := cuda.Open(0)
		if err != nil {
			return nil, nil, err
		}
		fake, err := fakecuda.Load(os.Getenv(cuda.EnvLibrary))
		if err != nil {
			return nil, nil, errors.Join(err, t.Free())
		}
		return t, (&most{of: func() int64 { return fake.Get("PINNED") }}).now, nil
	}
	return nil, nil, fmt.Errorf("no target %q", l.target)
}

// seconds returns the processor time of this process so far.
func seconds() (float64, error) {
	var u unix.Rusage
	err := unix.Getrusage(unix.RUSAGE_SELF, &u)
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9, err
}
