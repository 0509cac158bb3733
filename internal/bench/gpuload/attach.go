package gpuload

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/internal/bench/report"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

// attaches are as many as a round has of what takes no time.
const attaches = 5

// The sides of the table of attaches.
const (
	loading   = "load"
	attaching = "attach"
)

// Attach measures how long it takes to use what kiln-pull resident holds in host memory, beside the load of it, and
// what memory that takes.
func (b *Bench) Attach(ctx context.Context) ([]report.Row, error) {
	if err := b.build(ctx); err != nil {
		return nil, err
	}
	size := b.Size
	if b.Full {
		size = 2e9
	}
	dir, err := b.Model(ctx, shards, size)
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	var rs rig.Rounds
	var extra, anonymous float64
	for range b.Rounds {
		r, err := b.attached(ctx, dir, float64(shards*size))
		if err != nil {
			return nil, err
		}
		rs = append(rs, rig.Round{loading: r.load, attaching: r.attach})
		extra, anonymous = max(extra, r.extra), max(anonymous, r.anonymous)
	}
	gb := float64(shards*size) / 1e9
	return []report.Row{
		row(fmt.Sprintf("wall of an attach / of the load of %.2f GB to host memory", gb), rs.WallRatio(attaching, loading),
			fmt.Sprintf("attach %.3g ms, load %.3g s", 1e3*rs.Wall(attaching).Median, rs.Wall(loading).Median)).AtMost(0.01),
		row("CPU of the process that attaches / of the load", rs.CPURatio(attaching, loading),
			fmt.Sprintf("attach %.3g ms, load %.3g cpu-s", 1e3*rs.CPU(attaching).Median, rs.CPU(loading).Median)),
		report.Row{
			What: "bytes of weights that an attach takes", Value: extra,
			Notes: fmt.Sprintf("mapped files that are not those of the holder; with every page touched the process has "+
				"%.1f MiB of anonymous memory more than before", anonymous),
		}.AtMost(0),
	}, nil
}

// use is what a load took, and the attaches to it.
type use struct {
	load, attach rig.Cost // attach: the median
	extra        float64  // bytes
	anonymous    float64  // MiB
}

// attached loads a model and attaches to it, some times.
func (b *Bench) attached(ctx context.Context, dir string, size float64) (u use, err error) {
	socket := filepath.Join(b.Dir, "socket", "base") // the folder is made for this user alone
	began := time.Now()
	holder, err := rig.Start(ctx, "/readyz", filepath.Join(b.Bin, "kiln-pull"), func(addr string) []string {
		return []string{"resident", dir, "--device", "host", "--listen", addr, "--socket", socket, "-q"}
	})
	if err != nil {
		return u, err
	}
	defer holder.Stop()
	u.load.Wall = time.Since(began).Seconds()
	if u.load.CPU, err = holder.CPU(); err != nil {
		return u, err
	}
	status, err := attach.Client{Socket: socket}.Status(ctx)
	if err != nil {
		return u, err
	}
	own, err := memoryFiles(holder.PID())
	if err != nil {
		return u, err
	}
	var walls, cpus []float64
	for range attaches {
		l, err := b.load(ctx, status.Aggregate.String(), run{
			program: b.built.verified, target: host, args: []string{"-socket", socket},
		})
		if err != nil {
			return u, err
		}
		if float64(l.Bytes) < 0.99*size || len(l.Files) == 0 {
			return u, fmt.Errorf("attach: %d bytes in %d files are mapped", l.Bytes, len(l.Files))
		}
		walls, cpus = append(walls, l.Wall), append(cpus, l.CPU)
		u.anonymous = max(u.anonymous, l.Anonymous)
		for _, f := range l.Files {
			if !slices.Contains(own, f) {
				u.extra += float64(l.Bytes) / float64(len(l.Files))
			}
		}
	}
	slices.Sort(walls)
	slices.Sort(cpus)
	u.attach.Wall, u.attach.CPU = walls[attaches/2], cpus[attaches/2]
	return u, nil
}

// memoryFiles are the inodes of the files that a process has open in memory.
func memoryFiles(pid int) (inodes []string, err error) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	links, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, l := range links {
		var st unix.Stat_t
		switch err := unix.Stat(filepath.Join(dir, l.Name()), &st); {
		case errors.Is(err, unix.ENOENT): // closed since
		case err != nil:
			return nil, err
		case st.Nlink == 0:
			inodes = append(inodes, fmt.Sprint(st.Ino))
		}
	}
	return inodes, nil
}
