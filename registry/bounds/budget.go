// Package bounds limits what clients can take of a server: memory and turns, by budgets that requests share, and time, by
// whether they make progress. No client is cut off for being slow alone: it is if it makes no progress, or if others wait
// for memory that it has held for too long.
package bounds

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

// Limits are those of a budget.
type Limits struct {
	Size int64 // what there is of it: bytes, or turns
	// Part bounds what one caller holds by several requests: at most Part times what is left to others then. So with 1
	// nobody gets more than half, and whoever comes next half of the rest. 0: no bound.
	Part int64
	// Waiting and OfOne are how many requests may wait, in all and of one caller.
	Waiting, OfOne int
}

// Budget is something that requests share: memory, or turns at work. Callers who wait get their part one after the other,
// each for the request of his that came first, so that nobody waits for all that another one has asked. It is safe for
// concurrent use.
type Budget struct {
	is Limits

	mu      sync.Mutex
	free    int64
	waiting int
	callers map[string]*caller // who hold something or wait
	order   []*caller          // who wait, who is next first
	wanted  time.Time          // when somebody last had to wait, or go without, for what others hold
}

// caller is what requests of one caller hold of a budget, and what they wait for.
type caller struct {
	name   string
	held   int64
	line   []*waiting // the first to come first
	wanted time.Time  // when one of them last had to wait, or go without, for what others of his hold
}

// waiting is a request that waits.
type waiting struct {
	n       int64
	decided chan struct{} // closed when one of these is set
	loan    *Loan
	err     error
}

// NewBudget returns a budget of which nobody holds anything.
func NewBudget(is Limits) *Budget {
	return &Budget{is: is, free: is.Size, callers: map[string]*caller{}}
}

// Loan is a part of a budget that a request holds until it returns it. A nil Loan is none.
type Loan struct {
	of    *Budget
	who   *caller
	n     int64
	since time.Time
}

// ErrFull is the error of a request that too many others are waiting before, or that made room for another caller's.
var ErrFull = errors.New("too many requests are waiting")

// Wait waits for n; for more than there is in all it waits for all of it. Where too many wait, the newest request of the
// caller with the most of them makes room for one of a caller with fewer. The error is ErrFull or that of ctx.
func (b *Budget) Wait(ctx context.Context, name string, n int64) (*Loan, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	w, err := b.join(name, n)
	if err != nil {
		return nil, err
	}
	select {
	case <-w.decided:
		return w.loan, w.err
	case <-ctx.Done():
		b.abandon(name, w)
		return nil, ctx.Err()
	}
}

// Try is Wait for those who do not wait: nil if that much can't be had now.
func (b *Budget) Try(name string, n int64) *Loan {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.caller(name)
	defer b.forget(c)
	return b.take(c, min(n, b.is.Size))
}

// Return gives back what was lent, once.
func (l *Loan) Return() {
	if l == nil {
		return
	}
	b := l.of
	b.mu.Lock()
	defer b.mu.Unlock()
	b.free += l.n
	l.who.held -= l.n
	b.grant()
	b.forget(l.who)
}

// Overdue says whether the loan has been held for longer than patience, and somebody wanted within that time what he did
// not get for it.
func (l *Loan) Overdue(patience time.Duration) bool {
	if l == nil || time.Since(l.since) <= patience {
		return false
	}
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	return time.Since(l.of.wanted) <= patience || time.Since(l.who.wanted) <= patience
}

// Waiting returns how many wait.
func (b *Budget) Waiting() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.waiting
}

// caller returns the caller of a name.
func (b *Budget) caller(name string) *caller {
	c := b.callers[name]
	if c == nil {
		c = &caller{name: name}
		b.callers[name] = c
	}
	return c
}

// forget drops a caller who neither holds nor waits for anything.
func (b *Budget) forget(c *caller) {
	if c.held == 0 && len(c.line) == 0 {
		delete(b.callers, c.name)
	}
}

// capped says whether a caller has to wait for what he holds himself.
func (b *Budget) capped(c *caller, n int64) bool {
	return b.is.Part > 0 && c.held > 0 && c.held+n > b.is.Part*(b.free-n)
}

// may says whether a caller can be lent n more, and notes if he can't.
func (b *Budget) may(c *caller, n int64) bool {
	switch {
	case b.capped(c, n):
		c.wanted = time.Now()
	case n > b.free:
		b.wanted = time.Now()
	default:
		return true
	}
	return false
}

// take lends n to a caller who need not wait: nobody is before him who waits for others. Nil: he has to.
func (b *Budget) take(c *caller, n int64) *Loan {
	before := slices.ContainsFunc(b.order, func(o *caller) bool { return o == c || !b.capped(o, o.line[0].n) })
	if before || !b.may(c, n) {
		return nil
	}
	return b.lend(c, n)
}

func (b *Budget) lend(c *caller, n int64) *Loan {
	b.free -= n
	c.held += n
	return &Loan{b, c, n, time.Now()}
}

// join lends n to a caller, or puts his request into line.
func (b *Budget) join(name string, n int64) (*waiting, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.caller(name)
	defer b.forget(c)
	w := &waiting{n: min(n, b.is.Size)}
	if w.loan = b.take(c, w.n); w.loan != nil {
		w.decided = decided
		return w, nil
	}
	if len(c.line) == b.is.OfOne || b.waiting == b.is.Waiting && !b.displace(len(c.line)) {
		return nil, ErrFull
	}
	w.decided = make(chan struct{})
	if c.line = append(c.line, w); len(c.line) == 1 {
		b.order = append(b.order, c)
	}
	b.waiting++
	b.grant()
	return w, nil
}

// decided is that of requests which need not wait.
var decided = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// displace turns away the newest request of the caller with the longest line, if that is longer by two at least than the
// line of the given length that is to grow.
func (b *Budget) displace(length int) bool {
	longest := slices.MaxFunc(b.order, func(x, y *caller) int { return len(x.line) - len(y.line) })
	last := len(longest.line) - 1
	if last <= length {
		return false
	}
	w := longest.line[last]
	b.remove(longest, last)
	w.err = ErrFull
	close(w.decided)
	return true
}

// grant lends what is free to those who wait. Who waits for what he holds himself is passed over; for whom there is not
// enough, all behind him wait, so that large parts are got, too.
func (b *Budget) grant() {
	for i := 0; i < len(b.order); {
		c := b.order[i]
		w := c.line[0]
		switch {
		case b.may(c, w.n):
			b.remove(c, 0)
			if len(c.line) > 0 {
				b.order = append(slices.Delete(b.order, i, i+1), c)
			}
			w.loan = b.lend(c, w.n)
			close(w.decided)
		case b.capped(c, w.n):
			i++
		default:
			return
		}
	}
}

// abandon takes a request that has gone out of its line, or returns what it got meanwhile.
func (b *Budget) abandon(name string, w *waiting) {
	b.mu.Lock()
	at := -1
	if c := b.callers[name]; c != nil {
		if at = slices.Index(c.line, w); at >= 0 {
			b.remove(c, at)
			b.grant() // it may have kept others waiting
			b.forget(c)
		}
	}
	b.mu.Unlock()
	if at < 0 {
		w.loan.Return()
	}
}

// remove takes a request out of a line, and the caller out of the order with his last one.
func (b *Budget) remove(c *caller, at int) {
	b.waiting--
	if c.line = slices.Delete(c.line, at, at+1); len(c.line) == 0 {
		b.order = slices.DeleteFunc(b.order, func(o *caller) bool { return o == c })
	}
}

// Entry admits requests to what takes memory. Small parts have a budget of their own, so that they don't wait for large
// ones. It is safe for concurrent use.
type Entry struct {
	small, large *Budget
	least        int64 // of a part that is large
}

// NewEntry returns an entry with a budget, and another one like it for parts of up to small.
func NewEntry(is Limits, small int64) *Entry { return &Entry{NewBudget(is), NewBudget(is), small} }

// Wait is that of the budget for n bytes.
func (e *Entry) Wait(ctx context.Context, name string, n int64) (*Loan, error) {
	if n > e.least {
		return e.large.Wait(ctx, name, n)
	}
	return e.small.Wait(ctx, name, n)
}

// Waiting returns how many wait.
func (e *Entry) Waiting() int { return e.small.Waiting() + e.large.Waiting() }
