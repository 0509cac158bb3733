package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/internal/chaos/rig"
)

// diskSize is that of the filesystem that is filled, in MiB.
const diskSize = 24

// full fills a real filesystem under a server: it says so, serves what is there, and goes on as soon as there is space,
// without a restart and after one on a full disk.
func (c chaos) full(ctx context.Context) error {
	return c.at("", func(s *rig.Site) (err error) {
		disk := s.Folder()
		if err := os.Mkdir(disk, 0o700); err != nil {
			return err
		}
		if err := unix.Mount("none", disk, "tmpfs", 0, fmt.Sprintf("size=%dm", diskSize)); err != nil {
			return fmt.Errorf("mount a small filesystem: %w (hint: this needs the right to mount: run it as root)", err)
		}
		defer func() { err = errors.Join(err, unix.Unmount(disk, 0)) }()
		s.Sub = "store"
		f := filling{breaking: newBreaking(s, c.seed), disk: disk}
		err = f.all(ctx)
		fmt.Fprintf(c.out, "full: refused %s, acknowledged %d, lost %d\n", told(f.refused), f.c.Acked, len(f.k.Lost))
		return err
	})
}

// filling is a run on a disk that gets full.
type filling struct {
	*breaking
	disk string
}

func (f *filling) filler() string { return filepath.Join(f.disk, "filler") }

// fill takes all space of the disk but so many bytes.
func (f *filling) fill(spare int64) error {
	file, err := os.Create(f.filler())
	if err != nil {
		return err
	}
	defer file.Close()
	piece := make([]byte, 64<<10)
	for size := int64(0); ; {
		n, err := file.Write(piece)
		size += int64(n)
		switch {
		case errors.Is(err, unix.ENOSPC) && len(piece) > 1:
			piece = piece[:len(piece)/2]
		case errors.Is(err, unix.ENOSPC):
			return file.Truncate(max(0, size-spare))
		case err != nil:
			return err
		}
	}
}

// spares are how many bytes are left of a full disk, so that different writes are the first to fail, and some by half.
var spares = []int64{0, 4 << 10, 20 << 10, 100 << 10, 400 << 10}

func (f *filling) all(ctx context.Context) error {
	f.c.Small = true
	if err := f.start(ctx); err != nil {
		return err
	}
	defer func() { f.v.Kill() }()
	if err := f.steps(healthySteps, false); err != nil {
		return err
	}
	for _, spare := range spares {
		if err := f.one(ctx, spare); err != nil {
			return fmt.Errorf("%d bytes left: %w\n%s", spare, err, f.v.Log)
		}
	}
	f.k.Rebuild(ctx, f.v)
	return errors.Join(f.k.Err(), ctx.Err())
}

// one fills the disk but for some bytes, and has the client go on.
func (f *filling) one(ctx context.Context, spare int64) error {
	full := rule{code: api.CodeStoreFull}
	if err := f.fill(spare); err != nil {
		return err
	}
	if err := f.push(spare + 1<<20); err != nil {
		return err
	}
	if err := f.steps(faultySteps, true); err != nil {
		return err
	}
	f.c.Codes[full.code]++ // of push
	if err := errors.Join(f.told(full), f.serves()); err != nil {
		return err
	}
	if err := os.Remove(f.filler()); err != nil {
		return err
	}
	if err := f.steps(healthySteps, false); err != nil {
		return fmt.Errorf("with space again: %w", err)
	}
	if err := f.fill(spare); err != nil {
		return err
	}
	f.v.Kill()
	if err := f.start(ctx); err != nil {
		return fmt.Errorf("a start on a full disk: %w", err)
	}
	if err := f.serves(); err != nil {
		return fmt.Errorf("after a start on a full disk: %w", err)
	}
	if err := os.Remove(f.filler()); err != nil {
		return err
	}
	return f.restart(ctx)
}

// push sends a blob for which there is no room, without saying how large it is.
func (f *filling) push(size int64) error {
	f.c.Faulty = true
	b := f.c.Fresh(int(size))
	u, err := f.c.Begin("team/model", b)
	if err == nil {
		err = f.c.End(u)
	}
	said := f.c.Refusal
	full := said.Code() == api.CodeStoreFull && said.Status == http.StatusInsufficientStorage
	if !errors.Is(err, rig.ErrRefused) || !full {
		return fmt.Errorf("a blob of %d bytes on a full disk: %w", size, err)
	}
	return nil
}
