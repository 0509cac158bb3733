package bounds

import (
	"context"
	"slices"
	"sync"
)

// Turns let a few requests go on at a time. Callers who wait get theirs one after the other, each for the request of his
// that came first, so that nobody waits for all that another one has asked. It is safe for concurrent use.
type Turns struct {
	mu          sync.Mutex
	free        int
	most, share int // of those that wait: in all, of one caller
	waiting     int
	lines       map[string][]chan struct{} // those who wait, by caller; closed: it is his turn
	callers     []string                   // of lines, who is next first
}

// NewTurns returns so many turns. Of requests that wait it takes at most waiting, and share of one caller.
func NewTurns(turns, waiting, share int) *Turns {
	return &Turns{free: turns, most: waiting, share: share, lines: map[string][]chan struct{}{}}
}

// Wait waits for a turn. leave, to be called once, ends it. The error is ErrFull, at once, or that of ctx.
func (t *Turns) Wait(ctx context.Context, caller string) (leave func(), err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	turn, err := t.join(caller)
	if err != nil {
		return nil, err
	}
	select {
	case <-turn:
		return t.leave, nil
	case <-ctx.Done():
		t.abandon(caller, turn)
		return nil, ctx.Err()
	}
}

// join returns what is closed when the caller's turn has come.
func (t *Turns) join(caller string) (chan struct{}, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	turn, line := make(chan struct{}), t.lines[caller]
	switch {
	case t.free > 0: // nobody waits
		t.free--
		close(turn)
		return turn, nil
	case t.waiting == t.most || len(line) == t.share:
		return nil, ErrFull
	case len(line) == 0:
		t.callers = append(t.callers, caller)
	}
	t.lines[caller] = append(line, turn)
	t.waiting++
	return turn, nil
}

// leave gives a turn to who is next.
func (t *Turns) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.callers) == 0 {
		t.free++
		return
	}
	caller := t.callers[0]
	turn := t.lines[caller][0]
	t.remove(caller, 0)
	if _, more := t.lines[caller]; more {
		t.callers = append(t.callers[1:], caller)
	}
	close(turn)
}

// abandon takes a request that has gone out of its line, or gives on the turn that it got meanwhile.
func (t *Turns) abandon(caller string, turn chan struct{}) {
	t.mu.Lock()
	at := slices.Index(t.lines[caller], turn)
	if at >= 0 {
		t.remove(caller, at)
	}
	t.mu.Unlock()
	if at < 0 {
		t.leave()
	}
}

// remove takes a request out of a line, and the caller out of the order with his last one.
func (t *Turns) remove(caller string, at int) {
	t.waiting--
	t.lines[caller] = slices.Delete(t.lines[caller], at, at+1)
	if len(t.lines[caller]) == 0 {
		delete(t.lines, caller)
		t.callers = slices.DeleteFunc(t.callers, func(c string) bool { return c == caller })
	}
}

// Waiting returns how many wait.
func (t *Turns) Waiting() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return int64(t.waiting)
}
