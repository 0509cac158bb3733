package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

// diskSize is that of the filesystem that is filled, in MiB.
const diskSize = 24

// full fills a real filesystem under a server: it says so, serves what is there, and goes on as soon as there is space,
// without a restart and after one on a full disk.
func (c chaos) full(ctx context.Context) error {
	return c.at("", func(s *site) (err error) {
		disk := s.folder()
		if err := os.Mkdir(disk, 0o700); err != nil {
			return err
		}
		if err := unix.Mount("none", disk, "tmpfs", 0, fmt.Sprintf("size=%dm", diskSize)); err != nil {
			return fmt.Errorf("mount a small filesystem: %w (hint: this needs the right to mount: run it as root)", err)
		}
		defer func() { err = errors.Join(err, unix.Unmount(disk, 0)) }()
		s.sub = "store"
		f := filling{breaking: newBreaking(s, c.seed), disk: disk}
		err = f.all(ctx)
		fmt.Fprintf(c.out, "full: refused %s, acknowledged %d, lost %d\n", told(f.refused), f.c.acked, len(f.k.lost))
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
	f.c.small = true
	if err := f.start(ctx); err != nil {
		return err
	}
	defer func() { f.v.kill() }()
	if err := f.steps(healthySteps, false); err != nil {
		return err
	}
	for _, spare := range spares {
		if err := f.one(ctx, spare); err != nil {
			return fmt.Errorf("%d bytes left: %w\n%s", spare, err, f.v.log)
		}
	}
	f.k.rebuild(ctx, f.v)
	return errors.Join(f.k.err(), ctx.Err())
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
	f.c.codes[full.code]++ // of push
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
	f.v.kill()
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
	f.c.faulty = true
	b := f.c.fresh(int(size))
	u, err := f.c.begin("team/model", b)
	if err == nil {
		err = f.c.end(u)
	}
	if !errors.Is(err, errRefused) || f.c.refuse.code() != api.CodeStoreFull || f.c.refuse.status != http.StatusInsufficientStorage {
		return fmt.Errorf("a blob of %d bytes on a full disk: %w", size, err)
	}
	return nil
}

// flip damages a blob by one bit: kiln-pull never takes it for good.
func (c chaos) flip(ctx context.Context) error {
	return c.at("", func(s *site) error {
		f := flipping{site: s, c: newClient(1, c.seed)}
		err := f.all(ctx)
		fmt.Fprintf(c.out, "flip: damaged %d, caught by kiln-pull and by scrub, and healed %d, lost %d\n", flipShards, f.caught,
			flipShards-f.caught)
		return err
	})
}

const flipShards = 3

// flipping is a run in which bits of stored blobs are flipped.
type flipping struct {
	site   *site
	c      *client
	v      *server
	caught int
}

func (f *flipping) start(ctx context.Context) (err error) {
	if f.v, err = f.site.start(); err != nil {
		return err
	}
	if err := f.v.ready(ctx); err != nil {
		return err
	}
	f.c.wire = f.v.wire()
	return nil
}

func (f *flipping) all(ctx context.Context) error {
	if err := f.start(ctx); err != nil {
		return err
	}
	defer func() { f.v.kill() }()
	m, err := f.c.base("team/model", flipShards, "v1")
	if err != nil {
		return err
	}
	if err := f.pulls(ctx, "whole"); err != nil {
		return fmt.Errorf("before anything is damaged: %w", err)
	}
	for p, b := range f.c.blobs {
		if b.size < 0 || !m.lists(p.digest) {
			continue
		}
		if err := f.one(ctx, b); err != nil {
			return fmt.Errorf("a bit of shard %s: %w", b.digest, err)
		}
	}
	return f.pulls(ctx, "at last")
}

// one flips a bit of a blob on the disk and pulls, has the registry find it, and pushes the bytes again.
func (f *flipping) one(ctx context.Context, b blob) error {
	bit := f.c.rng.Int64N(8 * b.length)
	if err := f.site.flip(b.digest, bit); err != nil {
		return err
	}
	to := "damaged-" + b.digest.Hex()[:12]
	err := f.pulls(ctx, to)
	if err == nil {
		return fmt.Errorf("kiln-pull took bit %d", bit)
	}
	if !strings.Contains(err.Error(), "exit status 1") || !strings.Contains(err.Error(), b.digest.Hex()[:12]) {
		return fmt.Errorf("kiln-pull does not say what is damaged: %w", err)
	}
	if _, err := os.Stat(filepath.Join(f.site.dir, to)); err == nil {
		return errors.New("kiln-pull left a folder of damaged files under the name that was asked for")
	}
	if err := f.heal(ctx, b); err != nil {
		return err
	}
	f.caught++
	return nil
}

// heal has the registry find a damaged blob: it is set aside, refused to clients and shown to operators until its bytes
// come again.
func (f *flipping) heal(ctx context.Context, b blob) error {
	out, err := f.site.registry(ctx, "scrub")
	if err == nil || !strings.Contains(err.Error(), "exit status 1") || !strings.Contains(out, b.digest.String()) {
		return fmt.Errorf("scrub did not find it: %s, %w", out, err)
	}
	if a, err := f.c.ask(http.StatusNotFound, "GET", api.PathBlob("team/model", b.digest), nil); err != nil ||
		a.code() != api.CodeBlobUnknown || !strings.Contains(string(a.body), "damaged") {
		return fmt.Errorf("a blob in quarantine: %s, %w", a, err)
	}
	if n, err := f.quarantined(); n != 1 {
		return fmt.Errorf("health says that %d blobs are in quarantine, want 1, %w", n, err)
	}
	if err := f.c.post("team/model", b); err != nil {
		return err
	}
	if n, err := f.quarantined(); n != 0 || err != nil {
		return fmt.Errorf("after the bytes came again health says that %d blobs are in quarantine, %w", n, err)
	}
	_, err = f.site.registry(ctx, "scrub")
	return err
}

// quarantined is how many blobs health says are in quarantine.
func (f *flipping) quarantined() (int, error) {
	var h api.Health
	err := f.c.wire.json(api.PathHealthV1, &h)
	return h.Quarantined, err
}

// flip changes one bit of a stored blob.
func (s *site) flip(d identity.Digest, bit int64) error {
	path := filepath.Join(s.folder(), "blobs/sha256", d.Hex()[:2], d.Hex())
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	data[bit/8] ^= 1 << (bit % 8)
	if err := os.Chmod(path, 0o600); err != nil {
		return err
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		return err
	}
	return os.Chmod(path, 0o444)
}

// pulls has the real kiln-pull get the base into a folder.
func (f *flipping) pulls(ctx context.Context, to string) error {
	ref := strings.TrimPrefix(f.v.url, "http://") + "/team/model:v1"
	_, err := f.site.command(ctx, "kiln-pull", "pull", ref, to)
	return err
}
