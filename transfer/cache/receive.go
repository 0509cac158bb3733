package cache

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// ErrStalled: another process has a file on its way in, and nothing of it came for long.
var ErrStalled = errors.New("another pull receives it and does not get on")

// Receive returns the file that f names. If the cache lacks it, it calls fetch, which brings it into an area, and then
// keeps it: fetched says so. At most one process at a time does so for a file; the others wait for it, and go on from
// what it left if it is gone. waiting, if not nil, is told now and then who is at work and how many bytes it has.
// ErrStalled, and what fetch returns; then what was fetched is kept for the next call.
func (c *Cache) Receive(ctx context.Context, f staging.File, fetch func(*staging.Area) error,
	waiting func(who error, have int64),
) (e Entry, fetched bool, err error) {
	w := wait{c: c, f: f, tell: waiting}
	for {
		e, ok, err := c.Find(ctx, f.Digest, f.Size)
		if err != nil || ok {
			return e, false, err
		}
		area, err := staging.Open(ctx, c.target(f.Digest), c.o.Staging)
		switch {
		case errors.Is(err, staging.ErrBusy):
			if err := w.wait(ctx, err); err != nil {
				return e, false, err
			}
			continue
		case errors.Is(err, fs.ErrNotExist): // its folder was removed by one that had just ended
			continue
		case err != nil:
			return e, false, err
		}
		e, fetched, err = c.receive(ctx, area, f, fetch)
		if err = errors.Join(err, area.Close()); errors.Is(err, staging.ErrLost) && ctx.Err() == nil {
			continue
		}
		return e, fetched, err
	}
}

// Missing returns how much disk space a file still needs in the cache, at most.
func (c *Cache) Missing(f staging.File) int64 {
	k, err := staging.Progress(c.target(f.Digest), f)
	if err != nil {
		return f.Size
	}
	return max(0, f.Size-k.Space)
}

// Free returns the number of bytes that can be stored in the cache.
func (c *Cache) Free() (int64, error) { return durable.Free(c.dir) }

// receive is Receive in the area of the file.
func (c *Cache) receive(ctx context.Context, area *staging.Area, f staging.File, fetch func(*staging.Area) error) (
	e Entry, fetched bool, err error,
) {
	e, ok, err := c.Find(ctx, f.Digest, f.Size) // it may have come just now
	if err != nil || ok {
		return e, false, err
	}
	if err := fetch(area); err != nil {
		return e, false, err
	}
	path := c.path(f.Digest)
	if err := c.disk().MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return e, true, err
	}
	var r record
	err = area.Give(f.Digest, path, func(part string) (err error) {
		r, err = c.keep(part, path)
		return err
	})
	return Entry{path, f.Size, r.Verified}, true, err
}

// wait is the wait for another process.
type wait struct {
	c     *Cache
	f     staging.File
	tell  func(who error, have int64)
	have  staging.Kept
	moved time.Time // when that was another one
}

func (w *wait) wait(ctx context.Context, who error) error {
	have, err := staging.Progress(w.c.target(w.f.Digest), w.f)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // it may end just now
		return err
	}
	if err == nil && have != w.have || w.moved.IsZero() {
		w.have, w.moved = have, time.Now()
	}
	if time.Since(w.moved) > w.c.o.Patience {
		return fmt.Errorf("%w: %w", ErrStalled, who)
	}
	if w.tell != nil {
		w.tell(who, w.have.Bytes)
	}
	t := time.NewTimer(w.c.o.Poll)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}
