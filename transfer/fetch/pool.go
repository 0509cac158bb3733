package fetch

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
)

const (
	firstLimit = 4                      // connections to a source before anything is measured
	epoch      = 500 * time.Millisecond // over which the rate of a source is measured
	gain       = 1.05                   // more connections must bring that much more, or they are given back
	settle     = 8                      // epochs after which more connections are tried once more
	slowness   = 8                      // a source so many times slower than the fastest is only the last resort
	floor      = 64 << 10               // bytes a second below which a mirror is left for a source that was not tried
	patience   = 3 * time.Second        // after which a request to a source that is that slow is broken off
	maxFaults  = 3                      // with no use in between, after which a mirror is not asked any more
	firstRest  = time.Second            // of a mirror after a fault; doubled with each more
	longRest   = 10 * time.Second       // is told of each time
	maxRest    = time.Minute            // a mirror that asks for more is not asked any more
)

// errNoSource: no source is left that could give the bytes.
var errNoSource = errors.New("no source is left")

// pool shares connections out: each goes to the source that is likely to be fastest, as long as that has room. How many
// each source gets follows what it can give.
type pool struct {
	jobs int // connections over all sources

	mu      sync.Mutex // guards the rest, and what the sources say is guarded by it
	sources []*source  // the registry is the first
	used    int
	changed chan struct{} // closed and replaced when a waiter may find room
}

func newPool(registry Source, mirrors []Source, jobs int) *pool {
	p := &pool{jobs: jobs, changed: make(chan struct{})}
	for i, s := range append([]Source{registry}, mirrors...) {
		p.sources = append(p.sources, &source{
			Source: s, mirror: i > 0, limit: min(jobs, firstLimit), most: jobs, lacks: map[identity.Digest]bool{},
		})
	}
	return p
}

// source is one place that has the bytes.
type source struct {
	Source
	mirror bool

	used   int
	limit  int // connections that it may have
	most   int
	out    bool // it is not asked any more
	faults int  // since it was of use
	told   bool // that it rests
	rested time.Time
	lacks  map[identity.Digest]bool
	rate   float64 // bytes a second of one connection; zero: not known
	meter  meter
}

// meter finds out whether more connections bring more bytes.
type meter struct {
	since  time.Time // of this epoch; zero: none has begun
	bytes  int64     // in this epoch
	full   bool      // all connections were used at some time of this epoch
	best   float64   // bytes a second over all connections, at most
	at     int       // how many connections brought that
	calm   int       // epochs left in which no more are tried
	slow   bool      // add one at a time, do not double
	halved time.Time
}

// lease is one connection to a source.
type lease struct {
	p     *pool
	s     *source
	begun time.Time
	bytes int64
	held  time.Duration // that no bytes were read, as the limit of the user wants it
	// instead says, with the pool locked, whether another source might give the same. Nil: none.
	instead func(*source) bool
}

// take waits until a source that fits has room, and takes it. fits is called with the pool locked. errNoSource.
func (p *pool) take(ctx context.Context, fits func(*source) bool) (*lease, error) {
	for {
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		p.mu.Lock()
		now := time.Now()
		s, rest, any := p.choose(now, fits)
		if s != nil {
			s.used++
			p.used++
			s.meter.full = s.meter.full || s.used >= s.limit
			p.mu.Unlock()
			return &lease{p: p, s: s, begun: now}, nil
		}
		changed := p.changed
		p.mu.Unlock()
		if !any {
			return nil, errNoSource
		}
		if err := waitFor(ctx, changed, rest); err != nil {
			return nil, err
		}
	}
}

// room returns how many connections the sources may have now, all together.
func (p *pool) room() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.sources {
		if !s.out {
			n += s.limit
		}
	}
	return min(n, p.jobs)
}

// waitFor waits for a change, or for so long if that is not zero.
func waitFor(ctx context.Context, changed <-chan struct{}, d time.Duration) error {
	var later <-chan time.Time
	if d > 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		later = t.C
	}
	select {
	case <-changed:
	case <-later:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

// choose returns the source to ask next. If it is nil, any says whether one could be asked later, and rest after which
// time, zero: when a connection ends.
func (p *pool) choose(now time.Time, fits func(*source) bool) (best *source, rest time.Duration, any bool) {
	top := p.top(now, fits)
	for _, s := range p.sources {
		if s.out || !fits(s) {
			continue
		}
		any = true
		if left := s.rested.Sub(now); left > 0 {
			if rest == 0 || left < rest {
				rest = left
			}
			continue
		}
		if p.used < p.jobs && s.room() && !s.slow(top) && (best == nil || s.before(best)) {
			best = s
		}
	}
	return best, rest, any
}

// top returns the rate of the fastest source that fits.
func (p *pool) top(now time.Time, fits func(*source) bool) (top float64) {
	for _, s := range p.sources {
		if !s.out && !s.rested.After(now) && fits(s) {
			top = max(top, s.rate)
		}
	}
	return top
}

// room says whether one more connection may be opened. A mirror of which nothing is known gets one.
func (s *source) room() bool { return s.used < s.limit && (!s.mirror || s.rate > 0 || s.used == 0) }

func (s *source) slow(top float64) bool { return s.rate > 0 && s.rate*slowness < top }

// before says whether s is to be asked rather than o: what is not known is found out first, mirrors before the registry.
func (s *source) before(o *source) bool {
	switch {
	case (s.rate == 0) != (o.rate == 0):
		return s.rate == 0
	case s.rate > 0:
		return s.rate > o.rate
	case s.used != o.used:
		return s.used < o.used
	}
	return s.mirror && !o.mirror
}

func (p *pool) wake() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// end gives the connection back.
func (l *lease) end() {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	l.s.used--
	l.p.used--
	l.learn(time.Now())
	l.p.wake()
}

// useful forgets the faults of a source: it gave what it was asked for.
func (l *lease) useful() {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	l.s.faults = 0
}

// rate returns bytes a second of the time that the source had.
func (l *lease) rate(now time.Time) float64 {
	return float64(l.bytes) / max(now.Sub(l.begun)-l.held, time.Millisecond).Seconds()
}

// learn takes the rate of a connection into the average of its source.
func (l *lease) learn(now time.Time) {
	const enough = 64 << 10 // bytes below which it is the distance that was measured
	if l.bytes < enough {
		return
	}
	rate := l.rate(now)
	if l.s.rate > 0 {
		rate = (l.s.rate + rate) / 2
	}
	l.s.rate = rate
}

// moved counts bytes of the connection, which the limit of the user held up for so long. errSlow, errCrawl: another
// source should be asked.
func (l *lease) moved(n int, held time.Duration) error {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	now := time.Now()
	l.bytes += int64(n)
	l.held += held
	if l.s.meter.count(n, now) {
		l.s.adapt(now)
		l.p.wake()
	}
	if !l.s.mirror || now.Sub(l.begun)-l.held < patience {
		return nil
	}
	rate := l.rate(now)
	for _, s := range l.p.sources {
		switch {
		case s == l.s || s.out:
		case rate*slowness < s.rate:
			l.s.rate = rate
			return errSlow
		case rate < floor && s.untried(now) && l.instead != nil && l.instead(s):
			l.s.rate = rate
			return errCrawl
		}
	}
	return nil
}

func (s *source) untried(now time.Time) bool {
	return s.rate == 0 && s.used == 0 && !s.rested.After(now)
}

var (
	// errSlow: a mirror is far slower than another source.
	errSlow = errors.New("it is far slower than the others")
	// errCrawl: a mirror is so slow that a source of which nothing is known is likely to be faster.
	errCrawl = fmt.Errorf("it sends less than %d KiB a second", floor>>10)
)

// count says whether an epoch has ended.
func (m *meter) count(n int, now time.Time) bool {
	if m.since.IsZero() {
		m.since, m.bytes = now, 0
	}
	m.bytes += int64(n)
	return now.Sub(m.since) >= epoch
}

// adapt ends an epoch: it allows more connections while they bring more, and takes them back when they do not.
func (s *source) adapt(now time.Time) {
	m := &s.meter
	rate, full := float64(m.bytes)/now.Sub(m.since).Seconds(), m.full
	m.since, m.bytes, m.full = now, 0, s.used >= s.limit
	switch {
	case !full: // nobody asked for more
	case m.calm > 1:
		m.calm--
	case m.calm == 1:
		m.calm, m.best, m.at = 0, rate, s.limit
		s.limit = min(s.most, s.limit+1)
	case rate > m.best*gain:
		m.best, m.at = rate, s.limit
		more := s.limit
		if m.slow {
			more = 1
		}
		s.limit = min(s.most, s.limit+more)
	default:
		s.limit, m.calm, m.slow = m.at, settle, true
	}
}

// back halves the connections to a source that said it is asked too much. One burst of refusals counts once.
func (l *lease) back() {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	now := time.Now()
	if m := &l.s.meter; now.Sub(m.halved) > epoch {
		l.s.limit = max(1, l.s.limit/2)
		*m = meter{halved: now, calm: settle, slow: true}
	}
}

// drop ends the use of a source and says whether it was in use.
func (p *pool) drop(s *source) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	was := !s.out
	s.out = true
	p.wake()
	return was
}

// fault lets a mirror rest, for at least the time that it asked for. last: it is not asked any more, as that was one
// fault too many, or it asked for too much. Else rest is how long it rests, or zero where that need not be told. What
// fails while a mirror rests was under way before, and is no fault of its own.
func (p *pool) fault(s *source, asked time.Duration) (rest time.Duration, last bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	defer p.wake()
	now := time.Now()
	if s.out {
		return 0, false
	}
	if asked <= maxRest && s.rested.After(now) {
		s.rested = now.Add(max(asked, s.rested.Sub(now)))
		return 0, false
	}
	s.faults++
	if s.faults >= maxFaults || asked > maxRest {
		s.out = true
		return 0, true
	}
	rest = max(asked, firstRest<<(s.faults-1))
	s.rested = now.Add(rest)
	if s.told && rest < longRest {
		return 0, false
	}
	s.told = true
	return rest, false
}

// lack notes that a source does not have a blob, and says whether that is the first one it lacks.
func (p *pool) lack(s *source, d identity.Digest) (first bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	first = len(s.lacks) == 0
	s.lacks[d] = true
	p.wake()
	return first
}

// best returns the source to ask for a whole file: the registry, if no mirror has room.
func (p *pool) best(d identity.Digest) *source {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, _, _ := p.choose(time.Now(), func(s *source) bool { return !s.lacks[d] })
	if s == nil {
		return p.sources[0]
	}
	return s
}
