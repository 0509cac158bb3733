package fetch

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
)

func whoever(*source) bool { return true }

func take(t *testing.T, p *pool) *lease {
	t.Helper()
	l, err := p.take(t.Context(), whoever)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// link stands for what is between here and a source: bytes a second over all connections.
func (p *pool) drive(t *testing.T, of time.Duration, link func(connections int) float64) {
	t.Helper()
	const tick = 10 * time.Millisecond
	var open []*lease
	for begun := time.Now(); time.Since(begun) < of; {
		for len(open) < p.sources[0].limit {
			open = append(open, take(t, p))
		}
		for len(open) > p.sources[0].limit {
			open[0].end()
			open = open[1:]
		}
		time.Sleep(tick) // of the test's own clock
		each := link(len(open)) * tick.Seconds() / float64(len(open))
		for _, l := range open {
			if err := l.moved(int(each), 0); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, l := range open {
		l.end()
	}
}

// TestGrow: connections are added while they bring more, and given back where they do not.
func TestGrow(t *testing.T) {
	for name, tt := range map[string]struct {
		link        func(n int) float64
		least, most int
	}{
		"each brings as much":   {func(n int) float64 { return 50e6 * float64(n) }, 64, 64},
		"ten fill the link":     {func(n int) float64 { return 50e6 * float64(min(n, 10)) }, 8, 17},
		"one fills the link":    {func(int) float64 { return 50e6 }, 1, 5},
		"more are worse":        {func(n int) float64 { return 800e6 / float64(max(n, 4)) }, 1, 5},
		"a little more by each": {func(n int) float64 { return 100e6 + 1e6*float64(n) }, 4, 9},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPool(Source{}, nil, 64)
				p.drive(t, time.Minute, tt.link)
				if n := p.sources[0].limit; n < tt.least || n > tt.most {
					t.Errorf("%d connections, want %d to %d", n, tt.least, tt.most)
				}
			})
		})
	}
}

// TestBack: a refusal halves the connections, a burst of them once; then they grow one by one.
func TestBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(Source{}, nil, 32)
		more := func(n int) float64 { return 50e6 * float64(n) }
		p.drive(t, 10*time.Second, more)
		if n := p.sources[0].limit; n != 32 {
			t.Fatalf("%d connections", n)
		}
		l := take(t, p)
		for range 10 {
			l.back()
		}
		l.end()
		if n := p.sources[0].limit; n != 16 {
			t.Errorf("%d connections after a refusal, want 16", n)
		}
		p.drive(t, (settle+3)*epoch, more)
		if n := p.sources[0].limit; n < 17 || n > 20 {
			t.Errorf("%d connections some time later", n)
		}
		for range 10 {
			l := take(t, p)
			time.Sleep(2 * epoch)
			l.back()
			l.end()
		}
		if n := p.sources[0].limit; n != 1 {
			t.Errorf("%d connections at last", n)
		}
	})
}

// TestSlowMirror: a source that is far slower than another gives its request up, and is asked again only where there is
// no other; one that is about as fast is asked for what the fastest has no room for.
func TestSlowMirror(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(Source{}, []Source{{}, {}}, 8)
		slow, fair := take(t, p), take(t, p)
		registry := take(t, p)
		if slow.s != p.sources[1] || fair.s != p.sources[2] || registry.s != p.sources[0] {
			t.Fatal("not each source is tried")
		}
		for range 4 {
			time.Sleep(100 * time.Millisecond)
			registry.moved(8e6, 0)
			fair.moved(4e6, 0)
		}
		registry.end()
		fair.end()
		if err := slow.moved(1000, 0); err != nil {
			t.Errorf("given up at once: %v", err)
		}
		time.Sleep(patience)
		if err := slow.moved(1000, 0); !errors.Is(err, errSlow) {
			t.Errorf("after %s: %v", patience, err)
		}
		slow.end()
		used := map[*source]int{}
		for range 6 {
			used[take(t, p).s]++
		}
		if used[p.sources[0]] != firstLimit || used[p.sources[2]] != 2 || used[p.sources[1]] != 0 {
			t.Errorf("connections: %v", used)
		}
		only := func(s *source) bool { return s == p.sources[1] }
		if l, err := p.take(t.Context(), only); err != nil || l.s != p.sources[1] {
			t.Errorf("as the last resort: %v", err)
		}
	})
}

// TestFaults: a mirror rests after a fault, longer each time and as long as it asks for, and is let alone after some.
func TestFaults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(Source{}, []Source{{}}, 8)
		m := p.sources[1]
		only := func(s *source) bool { return s == m }
		for i, asked := range []time.Duration{0, 10 * time.Second} {
			begun := time.Now()
			if rest, last := p.fault(m, asked); last || rest != max(asked, firstRest) {
				t.Fatalf("rests for %s, let alone: %v, after %d faults", rest, last, i+1)
			}
			if rest, last := p.fault(m, 0); last || rest != 0 {
				t.Error("what fails while it rests is told, or counted")
			}
			l, err := p.take(t.Context(), only)
			if err != nil {
				t.Fatal(err)
			}
			if rested := time.Since(begun); rested < max(asked, firstRest) {
				t.Errorf("asked again after %s", rested)
			}
			l.end()
		}
		for _, want := range []bool{true, false} {
			if _, last := p.fault(m, 0); last != want {
				t.Error("want the third fault to be told as the last, once")
			}
		}
		if _, err := p.take(t.Context(), only); !errors.Is(err, errNoSource) {
			t.Errorf("got %v", err)
		}
		if p.drop(m) || !p.drop(p.sources[0]) {
			t.Error("drop does not tell whether the source was in use")
		}
		if !p.lack(p.sources[0], identity.Digest{}) || p.lack(p.sources[0], identity.Digest{1}) {
			t.Error("lack does not tell the first time")
		}
	})
}

// TestLongRest: a mirror that wants to rest for long is let alone at once.
func TestLongRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(Source{}, []Source{{}}, 8)
		if _, last := p.fault(p.sources[1], 100000*time.Second); !last {
			t.Error("it is waited for")
		}
		if _, err := p.take(t.Context(), func(s *source) bool { return s.mirror }); !errors.Is(err, errNoSource) {
			t.Errorf("got %v", err)
		}
	})
}

// TestUseless: bytes that are of no use forget no fault.
func TestUseless(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(Source{}, []Source{{}}, 8)
		faults := func(useful bool) (n int) {
			for last := false; !last && n < 10; n++ {
				l, err := p.take(t.Context(), func(s *source) bool { return s.mirror })
				if err != nil {
					t.Fatal(err)
				}
				l.moved(1, 0)
				if useful {
					l.useful()
				}
				_, last = p.fault(l.s, 0)
				l.end()
			}
			return n
		}
		if n := faults(true); n != 10 {
			t.Errorf("let alone after %d faults, though it is of use", n)
		}
		if n := faults(false); n > maxFaults {
			t.Errorf("let alone after %d faults", n)
		}
	})
}

// TestCrawl: a mirror that sends next to nothing is left for a source that was not tried and can give the same, also
// where there is one connection only; after that for one that is known to be faster.
func TestCrawl(t *testing.T) {
	for name, tt := range map[string]struct {
		bytes   int
		held    time.Duration // by the limit of the user
		instead bool
		used    int // connections to the other
		want    error
	}{
		"crawls":                {3, 0, true, 0, errCrawl},
		"is held to a limit":    {3, patience, true, 0, nil},
		"is not so slow":        {floor * 4, 0, true, 0, nil},
		"there is no other":     {3, 0, false, 0, nil},
		"the other is on trial": {3, 0, true, 1, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPool(Source{}, []Source{{}}, 1+tt.used)
				l := take(t, p)
				l.instead = func(*source) bool { return tt.instead }
				if tt.used > 0 {
					take(t, p)
				}
				time.Sleep(patience)
				if err := l.moved(tt.bytes, tt.held); err != tt.want || !l.s.mirror {
					t.Errorf("got %v", err)
				}
				if l.end(); tt.want == nil {
					return
				}
				other := take(t, p)
				if other.s.mirror {
					t.Fatal("the other is not tried")
				}
				time.Sleep(patience)
				other.moved(1e6, 0)
				if other.end(); take(t, p).s.mirror {
					t.Error("the slow one is asked, though the other is known to be faster")
				}
			})
		})
	}
}

// zeros is a body without end.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }
func (zeros) Close() error               { return nil }

// TestLimitIsNotSlow: what a limit of the user holds up does not make a mirror slow.
func TestLimitIsNotSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(Source{}, []Source{{}}, 1)
		l := take(t, p)
		l.instead = whoever
		r := &reader{ReadCloser: zeros{}, ctx: t.Context(), f: &fetcher{limit: newLimiter(10_000)}, l: l}
		if n, err := io.CopyN(io.Discard, r, 10*10_000); err != nil || !l.s.mirror {
			t.Errorf("%d bytes, %v", n, err)
		}
	})
}

// TestTakeEnds: who waits for a source stops when the work ends.
func TestTakeEnds(t *testing.T) {
	p := newPool(Source{}, nil, 1)
	l := take(t, p)
	defer l.end()
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("enough")
	cancel(why)
	if _, err := p.take(ctx, whoever); !errors.Is(err, why) {
		t.Errorf("got %v", err)
	}
}

// TestLimiter: whatever comes in, in whatever pieces, is held to the rate.
func TestLimiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, rate := range []int64{1000, 1e6, 10e9} {
			l := newLimiter(rate)
			begun := time.Now()
			var got int64
			for time.Since(begun) < 10*time.Second && got < 100*rate {
				if err := l.wait(t.Context(), int(l.piece())); err != nil {
					t.Fatal(err)
				}
				got += l.piece()
			}
			if got > 11*rate || got < 9*rate {
				t.Errorf("%d bytes in 10 s at %d a second", got, rate)
			}
			time.Sleep(time.Hour) // which saves nothing up
			begun = time.Now()
			for got = 0; got < rate; got += l.piece() {
				if err := l.wait(t.Context(), int(l.piece())); err != nil {
					t.Fatal(err)
				}
			}
			if took := time.Since(begun); took < 800*time.Millisecond {
				t.Errorf("a second's bytes in %s after a pause", took)
			}
		}
		if err := newLimiter(0).wait(t.Context(), 1<<30); err != nil {
			t.Error(err)
		}
	})
}
