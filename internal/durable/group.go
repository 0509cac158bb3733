package durable

import "sync"

// Group lets callers share a costly action that serves all of them at once, such as a sync. The zero Group is ready. It
// must not be copied.
type Group struct {
	mu   sync.Mutex // guards next
	next *run       // callers may still join it
	turn sync.Mutex // held by the run in progress
}

type run struct {
	done chan struct{}
	err  error
}

// Do returns the result of a run of fn that began after Do was called. Callers that wait at the same time share one
// run, of the fn of one of them; at most one run is in progress.
func (g *Group) Do(fn func() error) error {
	g.mu.Lock()
	if r := g.next; r != nil {
		g.mu.Unlock()
		<-r.done
		return r.err
	}
	r := &run{done: make(chan struct{})}
	g.next = r
	g.mu.Unlock()

	g.turn.Lock()
	g.mu.Lock()
	g.next = nil
	g.mu.Unlock()
	r.err = fn()
	g.turn.Unlock()
	close(r.done)
	return r.err
}
