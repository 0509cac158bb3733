package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/transfer/cache"
	"github.com/kiln-registry/kiln-registry/transfer/fetch"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// uncached takes what is missing from the cache, and returns what is not there, each digest once.
func (p *pull) uncached(ctx context.Context, have map[identity.Digest]bool) (files []fetch.File, err error) {
	var mu sync.Mutex // guards files
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(p.o.Jobs)
	for _, f := range p.plan.Files {
		if have[f.Digest] {
			continue
		}
		have[f.Digest] = true
		g.Go(func() error {
			there, err := p.cached(ctx, f)
			if err != nil || there {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			files = append(files, fetch.File{File: f, Damaged: p.damaged[f.Digest], Place: p.through(f)})
			return nil
		})
	}
	err = g.Wait()
	slices.SortFunc(files, func(a, b fetch.File) int { return cmp.Compare(a.Name, b.Name) })
	return files, err
}

// cached takes a file from the cache, if it is there.
func (p *pull) cached(ctx context.Context, f staging.File) (bool, error) {
	if p.o.Cache == nil {
		return false, nil
	}
	if path := p.damaged[f.Digest]; path != "" && p.o.Cache.Is(path, f.Digest) {
		p.note("dropped from the cache: damaged through a name of it: " + path)
		if err := p.o.Cache.Drop(f.Digest); err != nil {
			return false, err
		}
	}
	e, ok, err := p.o.Cache.Find(ctx, f.Digest, f.Size)
	if err == nil && ok {
		ok, err = p.take(ctx, f, e)
	}
	if err == nil && ok {
		p.o.Watch.tell(Event{Step: Skipped, Phase: PhaseDownload, File: f.Name, Note: "in the cache"})
	}
	return ok, err
}

func (p *pull) note(s string) { p.o.Watch.tell(Event{Step: Noted, Note: s}) }

// take makes a file of the cache one of the area: a link, or where that must not or can't be, a twin that shares its
// blocks, or a copy. It is the file that was found, whatever has its name by now. False: it is not there any more, or is
// damaged.
func (p *pull) take(ctx context.Context, f staging.File, e cache.Entry) (bool, error) {
	in, err := e.Open()
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer in.Close()
	alone := p.plan.Kind == api.KindCheckpoint
	err = p.area.Take(durable.Path(in), f.Digest, alone, e.Verified)
	if errors.Is(err, errors.ErrUnsupported) && !alone {
		err = p.area.Take(durable.Path(in), f.Digest, true, e.Verified)
	}
	var copied int64
	ok := err == nil
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case errors.Is(err, errors.ErrUnsupported):
		ok, err = p.copy(ctx, f, e, in)
		copied = f.Size
	}
	if err != nil {
		return false, fmt.Errorf("%s: %w", e.Path, err)
	}
	if !ok {
		return false, nil
	}
	if states := p.o.Cache.Midstates(f.Digest, f.Size); states != nil {
		p.area.KeepMidstates(states)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done.Cached, p.done.CachedBytes, p.done.Copied = p.done.Cached+1, p.done.CachedBytes+f.Size, p.done.Copied+copied
	return true, nil
}

// links says whether a file of the cache will most likely take no more space at the target.
func (p *pull) links() bool {
	a, err := os.Stat(p.o.Cache.Dir())
	b, berr := os.Stat(filepath.Dir(p.done.Target))
	return err == nil && berr == nil && staging.StatOf(a).Dev == staging.StatOf(b).Dev &&
		p.plan.Kind != api.KindCheckpoint
}

// copy brings a file of the cache into the area, and hashes it as it is written. One that does not match is dropped.
func (p *pull) copy(ctx context.Context, f staging.File, e cache.Entry, from *os.File) (ok bool, err error) {
	to, err := p.area.Partial(f.Digest, f.Size)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	have := to.Offset()
	total := f.Size - have
	p.o.Watch.tell(Event{Step: Planned, Phase: PhaseCopy, File: f.Name, Total: total})
	buf := pieces.Get().(*piece)
	defer pieces.Put(buf)
	for to.Offset() < f.Size {
		if err := context.Cause(ctx); err != nil {
			return false, err
		}
		n, err := from.ReadAt(buf[:min(int64(len(buf)), f.Size-to.Offset())], to.Offset())
		if _, werr := to.Write(buf[:n]); werr != nil {
			return false, werr
		}
		p.o.Watch.tell(Event{Step: Moved, Phase: PhaseCopy, File: f.Name, Bytes: to.Offset() - have, Total: total})
		if n == 0 {
			return false, fmt.Errorf("copy %s from the cache: %w", f.Name, err)
		}
	}
	got, err := to.Finish()
	if err != nil {
		return false, err
	}
	if got != f.Digest {
		p.note("dropped from the cache: damaged: " + e.Path)
		return false, errors.Join(to.Reset(), p.o.Cache.Drop(f.Digest))
	}
	p.o.Watch.tell(Event{Step: Done, Phase: PhaseCopy, File: f.Name, Bytes: total, Total: total})
	return true, nil
}

// through is how a file is fetched through the cache: by one pull of the machine at a time, into the cache and from
// there to the area. What an earlier pull received without a cache goes on without it. Nil: there is no cache, or it is
// not used for the file.
func (p *pull) through(f staging.File) func(context.Context, func(*staging.Area) error) error {
	if p.o.Cache == nil || !p.o.Cache.Uses(f.Digest) {
		return nil
	}
	return func(ctx context.Context, fetch func(*staging.Area) error) error {
		if p.area.Begun(f.Digest, f.Size) {
			return fetch(p.area)
		}
		began := false
		e, fetched, err := p.o.Cache.Receive(ctx, f, func(a *staging.Area) error {
			began = true
			err := fetch(a)
			if states := staging.Midstates(p.done.Target, f); err == nil && states != nil {
				p.o.Cache.KeepMidstates(states)
			}
			return err
		}, p.waits(f))
		switch {
		case errors.Is(err, cache.ErrForeign) && !began: // only just; it was told
			return fetch(p.area)
		case errors.Is(err, cache.ErrStalled), cache.ReadOnly(err) && !began:
			p.note(fmt.Sprintf("%s: not through the cache: %v", f.Name, err))
			return fetch(p.area)
		case err != nil:
			return err
		}
		if !fetched {
			p.o.Watch.tell(Event{Step: Skipped, Phase: PhaseDownload, File: f.Name, Note: "in the cache"})
		}
		ok, err := p.take(ctx, f, e)
		if err == nil && ok && fetched {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.done.Cached, p.done.CachedBytes = p.done.Cached-1, p.done.CachedBytes-f.Size
		}
		if err == nil && !ok { // removed just now
			err = fetch(p.area)
		}
		return err
	}
}

// waits tells of a file that another pull receives: once for people, and how it gets on.
func (p *pull) waits(f staging.File) func(who error, have int64) {
	said := false
	return func(who error, have int64) {
		if !said {
			said = true
			p.o.Watch.tell(Event{Step: Noted, File: f.Name, Note: fmt.Sprintf("%s: waiting for it: %v", f.Name, who)})
			p.o.Watch.tell(Event{Step: Planned, Phase: phaseWait, File: f.Name, Total: f.Size})
		}
		p.o.Watch.tell(Event{Step: Moved, Phase: phaseWait, File: f.Name, Bytes: have, Total: f.Size})
	}
}

// phaseWait is that of a file that another pull receives.
const phaseWait = "wait"
