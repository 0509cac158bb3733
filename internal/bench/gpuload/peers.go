package gpuload

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/internal/bench/report"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

//go:embed peers.py
var script string

// The sides of the table of others.
const (
	kiln        = "kiln"
	direct      = "kiln past the page cache"
	runai       = "runai-model-streamer"
	safetensors = "safetensors"
)

// Peers brings the same files into host memory by this loader, which hashes them, and by others, which check nothing.
// Without the virtual environment of the others it has no rows.
func (b *Bench) Peers(ctx context.Context) ([]report.Row, error) {
	python := filepath.Join(b.Tools, "gpuload-peers", "bin", "python")
	if _, err := os.Stat(python); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	dir, remove, err := b.model(ctx)
	if err != nil {
		return nil, err
	}
	defer remove()
	sides := []rig.Side{
		b.side(ctx, kiln, dir, run{program: b.built.verified, target: host}),
		b.side(ctx, direct, dir, run{program: b.built.verified, target: host, args: []string{"-direct"}}),
		b.peer(ctx, python, runai, "runai", dir),
		b.peer(ctx, python, safetensors, "safetensors", dir),
	}
	warm, err := rig.Turns(b.Rounds, sides...)
	if err != nil {
		return nil, err
	}
	for i, s := range sides {
		sides[i].Work = func(round int) (rig.Cost, error) {
			if err := forget(dir); err != nil {
				return rig.Cost{}, err
			}
			return s.Work(round)
		}
	}
	cold, err := rig.Turns(b.Rounds, sides...)
	if err != nil {
		return nil, err
	}
	rows := b.beside("cold files", cold)
	rows[0], rows[2] = rows[0].AtMost(1.05).OfWall(), rows[2].AtMost(1.05).OfWall()
	rows = append(rows, row("cold files: wall, read past the page cache / through it", cold.WallRatio(direct, kiln),
		b.perGB(cold.Wall, "s", direct), b.perGB(cold.CPU, "cpu-s", direct)))
	return append(rows, b.beside("from the page cache", warm)...), nil
}

// beside compares this loader with each of the others.
func (b *Bench) beside(what string, rs rig.Rounds) (rows []report.Row) {
	for _, other := range []string{runai, safetensors} {
		rows = append(rows,
			row(fmt.Sprintf("%s: wall, verified / %s, not verified", what, other), rs.WallRatio(kiln, other),
				b.perGB(rs.Wall, "s", kiln, other)),
			row(fmt.Sprintf("%s: CPU / %s", what, other), rs.CPURatio(kiln, other), b.perGB(rs.CPU, "cpu-s", kiln, other)))
	}
	return rows
}

// peer is a loader of others on a folder.
func (b *Bench) peer(ctx context.Context, python, name, module, dir string) rig.Side {
	return rig.Side{Name: name, Work: func(int) (rig.Cost, error) {
		c, err := rig.Run(ctx, python, "-c", script, module, dir)
		if err != nil {
			return c, err
		}
		var size int64
		if _, err := fmt.Sscan(c.Said, &size, &c.Wall, &c.CPU); err != nil {
			return c, fmt.Errorf("%s: %w", name, err)
		}
		if header := int64(1 << 20); size < shards*b.Size-header || size > shards*b.Size {
			return c, fmt.Errorf("%s: %d bytes arrived", name, size)
		}
		return c, nil
	}}
}

// forget takes the files of a folder out of the page cache.
func forget(dir string) error {
	rig.Settle() // only what lies on the disk can go
	paths, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		return err
	}
	for _, path := range paths {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		err = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return nil
}
