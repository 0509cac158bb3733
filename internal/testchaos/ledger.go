package testchaos

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kiln-registry/kiln-registry/identity"
)

// op is a change that was asked for. It took effect, if it did, at some time between start and end.
type op struct {
	start, end int64           // ticks of the ledger; end is never while there is no answer
	acked      bool            // it was acknowledged
	digest     identity.Digest // what a tag was pointed to; zero for a delete
}

const never = 1<<63 - 1

// history is what was asked for of one name. Changes that were certainly overtaken are forgotten.
type history struct {
	puts, deletes []*op
	deleted       int64 // the last end of a delete that was forgotten
}

// name is a manifest or a tag of a repository.
type name struct{ repo, ref string }

// ledger remembers what was acknowledged, and what may have happened. Only the order of events counts, as the load
// itself saw it.
type ledger struct {
	clock atomic.Int64
	mu    sync.Mutex
	names map[name]*history
}

func (l *ledger) tick() int64 { return l.clock.Add(1) }

func (l *ledger) of(n name) *history {
	if l.names == nil {
		l.names = map[name]*history{}
	}
	h := l.names[n]
	if h == nil {
		h = new(history)
		l.names[n] = h
	}
	return h
}

// begin notes changes that are about to be asked for in one request, and returns what notes how it ended.
func (l *ledger) begin(deletes bool, d identity.Digest, names ...name) (end func(acked, refused bool)) {
	o := &op{start: l.tick(), end: never, digest: d}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range names {
		h := l.of(n)
		if deletes {
			h.deletes = append(h.deletes, o)
		} else {
			h.puts = append(h.puts, o)
		}
	}
	return func(acked, refused bool) {
		l.mu.Lock()
		defer l.mu.Unlock()
		o.end, o.acked = l.tick(), acked
		for _, n := range names {
			h := l.of(n)
			if refused {
				h.puts = slices.DeleteFunc(h.puts, func(p *op) bool { return p == o })
				h.deletes = slices.DeleteFunc(h.deletes, func(p *op) bool { return p == o })
			} else if acked {
				h.forget(o.start)
			}
		}
	}
}

// forget drops what had ended before a change that was acknowledged began.
func (h *history) forget(before int64) {
	overtaken := func(o *op) bool { return o.end < before }
	for _, o := range h.deletes {
		if overtaken(o) {
			h.deleted = max(h.deleted, o.end)
		}
	}
	h.puts = slices.DeleteFunc(h.puts, overtaken)
	h.deletes = slices.DeleteFunc(h.deletes, overtaken)
}

// state says what may be found under a name.
type state struct {
	present bool // it may be there
	absent  bool // it may be gone
}

// manifest says whether a manifest may, or must, be there.
func (l *ledger) manifest(n name) state {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.of(n)
	s := state{present: len(h.puts) > 0, absent: len(h.deletes) > 0 || len(h.puts) == 0}
	return state{s.present, s.absent || !slices.ContainsFunc(h.puts, func(o *op) bool { return o.acked })}
}

// tag says whether a tag may point to d; zero: whether it may be gone.
func (l *ledger) tag(n name, d identity.Digest) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.of(n)
	if !d.IsZero() {
		return slices.ContainsFunc(h.puts, func(o *op) bool { return o.digest == d })
	}
	acked := slices.ContainsFunc(h.puts, func(o *op) bool { return o.acked })
	if len(h.deletes) > 0 || !acked {
		return true
	}
	// The delete of a manifest takes the tags along that pointed to it.
	return slices.ContainsFunc(h.puts, func(o *op) bool {
		return l.of(name{n.repo, o.digest.String()}).deletedSince(o.start)
	})
}

// deletedSince says whether a delete may have happened at or after a tick.
func (h *history) deletedSince(since int64) bool {
	return h.deleted >= since || slices.ContainsFunc(h.deletes, func(o *op) bool { return o.end >= since })
}

func (l *ledger) deletedSince(n name, since int64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.of(n).deletedSince(since)
}

func (n name) String() string { return fmt.Sprintf("%s %s", n.repo, n.ref) }
