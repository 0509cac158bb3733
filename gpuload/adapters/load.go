package adapters

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/identity"
)

// errAlone ends a load for which nobody waits any more.
var errAlone = errors.New("nobody waits for it")

// Load brings an adapter into memory and returns it once every byte was checked. before says that it was loaded
// already. It is named by the digest of its manifest, by a reference, by a folder's absolute path, or by the name that
// it gives itself: then the registry must hold exactly one of that name which was made from the base.
//
// However many ask for one adapter at once, one load runs; it ends early when all of them have gone. Where there is no
// room, adapters that nobody has attached are unloaded, the one that was not used for longest first; they stay so if
// the load fails. A load that fails leaves nothing else.
func (s *Set) Load(ctx context.Context, name string) (a Adapter, before bool, err error) {
	n, err := parse(name)
	if err != nil {
		return a, false, err
	}
	if x, loaded := s.join(n.digest()); x != nil {
		a, err = s.wait(ctx, x)
		return a, loaded, err
	}
	finding, end := s.until(ctx)
	f, err := s.resolve(finding, n)
	end()
	if err != nil {
		return a, false, s.failed(fmt.Errorf("load adapter %.300s: %w", name, err))
	}
	x, loaded, err := s.start(f)
	if err != nil {
		return a, false, errors.Join(fmt.Errorf("load adapter %.300s: %w", name, err), f.close())
	}
	a, err = s.wait(ctx, x)
	return a, loaded, err
}

// until is a context that ends with ctx or with the set.
func (s *Set) until(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	detach := context.AfterFunc(s.ctx, func() { cancel(ErrClosed) })
	return ctx, func() {
		detach()
		cancel(nil)
	}
}

// failed says that a set which was closed was the reason.
func (s *Set) failed(err error) error {
	if s.ctx.Err() != nil && !errors.Is(err, ErrClosed) {
		return fmt.Errorf("%w: %w", ErrClosed, err)
	}
	return err
}

// join returns the slot of an adapter that is loaded or on its way, and counts the caller among those who wait. Nil:
// there is none.
func (s *Set) join(d identity.Digest) (x *slot, loaded bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x = s.slots[d]
	if s.closed || x == nil {
		return nil, false
	}
	x.waiting++
	if x.weights != nil {
		s.touch(x)
	}
	return x, x.weights != nil
}

// start begins the load of what was found, unless it runs or is done. It takes f over when it returns no error.
func (s *Set) start(f *found) (x *slot, loaded bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, false, ErrClosed
	}
	if x := s.slots[f.Digest]; x != nil {
		x.waiting++
		return x, x.weights != nil, f.close()
	}
	ctx, cancel := context.WithCancelCause(s.ctx)
	x = &slot{Adapter: f.Adapter, done: make(chan struct{}), waiting: 1, cancel: cancel}
	s.slots[f.Digest] = x
	s.running++
	go s.run(ctx, x, f)
	return x, false, nil
}

// wait returns when the load has ended or ctx has.
func (s *Set) wait(ctx context.Context, x *slot) (a Adapter, err error) {
	select {
	case <-x.done:
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	x.waiting--
	select {
	case <-x.done:
		return x.Adapter, x.err
	default:
	}
	if x.waiting == 0 {
		x.cancel(errAlone)
		s.forget(x)
	}
	return a, fmt.Errorf("load adapter %s: %w", x.Digest, context.Cause(ctx))
}

// forget takes a slot that is not loaded out of the way of the next load. The caller holds mu.
func (s *Set) forget(x *slot) {
	if s.slots[x.Digest] == x {
		delete(s.slots, x.Digest)
	}
}

// run loads one adapter. Only a load that succeeded shows.
func (s *Set) run(ctx context.Context, x *slot, f *found) {
	defer s.ended()
	defer x.cancel(nil)
	weights, texts, err := s.load(ctx, x, f)
	err = errors.Join(err, f.close())
	s.mu.Lock()
	gone := s.slots[x.Digest] != x // nobody waits
	switch {
	case err != nil:
	case s.closed:
		err = ErrClosed
	case gone:
		err = context.Cause(ctx)
	}
	if err == nil {
		x.weights, x.texts, x.LoadedAt = weights, texts, time.Now().UTC()
		s.touch(x)
		s.changes()
	} else {
		x.err = s.failed(fmt.Errorf("load adapter %s: %w", f.From, err))
		s.forget(x)
	}
	s.mu.Unlock()
	if err != nil {
		if weights != nil {
			x.err = errors.Join(x.err, weights.Close(context.Background()))
		}
		s.release(x)
	}
	close(x.done)
}

// load reads the adapter, takes room for it and fills it.
func (s *Set) load(ctx context.Context, x *slot, f *found) (*gpuload.Resident, map[string][]byte, error) {
	select {
	case s.loads <- struct{}{}:
		defer func() { <-s.loads }()
	case <-ctx.Done():
		return nil, nil, context.Cause(ctx)
	}
	texts, err := f.read(ctx)
	if err != nil {
		return nil, nil, err
	}
	m, err := identity.New([]identity.Shard{f.weights})
	if err != nil {
		return nil, nil, reason(err, ErrRefused)
	}
	src, done, err := f.source(m)
	if err != nil {
		return nil, nil, err
	}
	plan, err := gpuload.NewPlan(ctx, src, []string{f.weights.Filename}, gpuload.Want{Manifest: &m})
	if err == nil {
		err = s.reserve(x)
	}
	if err != nil {
		return nil, nil, errors.Join(f.reason(err), done())
	}
	weights, err := s.fill(ctx, plan, src)
	return weights, texts, errors.Join(f.reason(err), done())
}

// fill loads a plan into fresh memory. Where the device has too little, it gives up adapters that nobody uses.
func (s *Set) fill(ctx context.Context, plan gpuload.Plan, src gpuload.Source) (*gpuload.Resident, error) {
	for {
		target, err := s.o.Target()
		if err != nil {
			return nil, fmt.Errorf("%w: %w", gpuload.ErrDevice, err)
		}
		weights, err := gpuload.Load(ctx, plan, src, target, s.o.Load)
		if !errors.Is(err, gpuload.ErrMemory) {
			return weights, err
		}
		freed, e := s.evict()
		if !freed || e != nil {
			return nil, errors.Join(fmt.Errorf("%w: %w", ErrNoRoom, err), e)
		}
	}
}

// evict unloads the adapter that was not used for longest, of those that nobody has attached.
func (s *Set) evict() (freed bool, err error) {
	s.mu.Lock()
	x := s.oldest(nil)
	if x != nil {
		s.drop(x)
	}
	s.mu.Unlock()
	if x == nil {
		return false, nil
	}
	return true, x.weights.Close(context.Background())
}

// oldest returns the slot that may be unloaded next, none of those in but. The caller holds mu.
func (s *Set) oldest(but []*slot) (oldest *slot) {
next:
	for _, x := range s.slots {
		for _, y := range but {
			if x == y {
				continue next
			}
		}
		if x.weights != nil && x.Leases == 0 && (oldest == nil || x.last < oldest.last) {
			oldest = x
		}
	}
	return oldest
}

// reserve counts the bytes of a slot, and unloads others until the limits are kept. If they can't be, it unloads none.
func (s *Set) reserve(x *slot) error {
	s.mu.Lock()
	var victims []*slot
	room, places := s.o.Limit-s.used, s.o.Most-len(s.slots) // x has its place already
	for room < x.Bytes || places < 0 {
		v := s.oldest(victims)
		if v == nil {
			s.mu.Unlock()
			return fmt.Errorf("%w: it has %d bytes; beside the adapters in use there is room for %d bytes of %d, and for %d "+
				"adapters of %d", ErrNoRoom, x.Bytes, max(0, room), s.o.Limit, max(0, places+1), s.o.Most)
		}
		victims = append(victims, v)
		room, places = room+v.Bytes, places+1
	}
	for _, v := range victims {
		s.drop(v)
	}
	s.used += x.Bytes
	x.reserved = true
	s.mu.Unlock()
	var err error
	for _, v := range victims {
		err = errors.Join(err, v.weights.Close(context.Background()))
	}
	return err
}

// release gives back what reserve counted.
func (s *Set) release(x *slot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if x.reserved {
		s.used -= x.Bytes
	}
}
