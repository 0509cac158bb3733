package cache

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// ErrStalled: another process has a file on its way in, and nothing of it came for long.
var ErrStalled = errors.New("another pull receives it and does not get on")

// Receive returns the file that f names. If the cache lacks it, it calls fetch, which brings it into an area, and then
// keeps it: fetched says so. At most one process at a time does so for a file; the others wait for it, and go on from
// what it left if it is gone. waiting, if not nil, is told now and then who is at work and how many bytes it has.
// fetch is called a second time if what an earlier process left turns out to be changed. ErrStalled, ErrForeign, and
// what fetch returns; then what was fetched is kept for the next call.
func (c *Cache) Receive(ctx context.Context, f staging.File, fetch func(*staging.Area) error,
	waiting func(who error, have int64),
) (e Entry, fetched bool, err error) {
	w := wait{c: c, f: f, tell: waiting}
	for {
		e, ok, err := c.Find(ctx, f.Digest, f.Size)
		if err != nil || ok {
			return e, false, err
		}
		if err := c.ready(c.path(f.Digest)); err != nil {
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
	begun := area.Begun(f.Digest, f.Size)
	if err := fetch(area); err != nil {
		return e, false, err
	}
	e, err = c.give(ctx, area, f, begun)
	if !errors.Is(err, errSpoilt) {
		return e, true, err
	}
	c.o.Notify(fmt.Sprintf("received anew: %s: %v", f.Name, err))
	p, err := area.Partial(f.Digest, f.Size)
	if err == nil {
		err = errors.Join(p.Reset(), p.Close())
	}
	if err == nil {
		err = fetch(area)
	}
	if err != nil {
		return e, false, err
	}
	e, err = c.give(ctx, area, f, false)
	return e, true, err
}

// give gives a file its name in the cache. What an earlier process has begun is hashed before. errSpoilt.
func (c *Cache) give(ctx context.Context, area *staging.Area, f staging.File, begun bool) (e Entry, err error) {
	path := c.path(f.Digest)
	if err := c.ready(path); err != nil {
		return e, err
	}
	var r record
	err = area.Give(f.Digest, path, func(part string) (err error) {
		if begun {
			err = c.arrived(ctx, f.Digest, part)
		}
		if errors.Is(err, errSpoilt) {
			return errors.Join(err, os.Chmod(part, 0o644)) // to be written again
		}
		if err == nil {
			r, err = c.keep(part, path)
		}
		return err
	})
	return Entry{path, f.Size, r.Verified, r}, err
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
