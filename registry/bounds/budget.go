// Package bounds limits what clients can take of a server: memory, by budgets that requests share, and time, by whether
// they make progress. No client is cut off for being slow alone: it is if it makes no progress, or if others wait for
// memory that it has held for too long.
package bounds

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
)

// Budget is memory that requests share. It is safe for concurrent use.
type Budget struct {
	free   *semaphore.Weighted
	most   int64
	wanted atomic.Int64 // when somebody last had to wait or go without, in nanoseconds
}

// NewBudget returns a budget of so many bytes.
func NewBudget(most int64) *Budget { return &Budget{free: semaphore.NewWeighted(most), most: most} }

// Loan is a part of a budget that a request holds until it returns it. A nil Loan is none.
type Loan struct {
	of    *Budget
	n     int64
	since time.Time
}

// Take waits for n bytes, first come, first served; for more than there are in all it waits for all of them. The error is
// that of ctx.
func (b *Budget) Take(ctx context.Context, n int64) (*Loan, error) {
	if l := b.Try(n); l != nil {
		return l, nil
	}
	n = min(n, b.most)
	if err := b.free.Acquire(ctx, n); err != nil {
		return nil, err
	}
	return &Loan{b, n, time.Now()}, nil
}

// Try is Take for those who do not wait: nil if the bytes are not free.
func (b *Budget) Try(n int64) *Loan {
	n = min(n, b.most)
	now := time.Now()
	if !b.free.TryAcquire(n) {
		b.wanted.Store(now.UnixNano())
		return nil
	}
	return &Loan{b, n, now}
}

// Return gives the bytes back, once.
func (l *Loan) Return() {
	if l != nil {
		l.of.free.Release(l.n)
	}
}

// Overdue says whether the bytes have been held for longer than patience, and others wanted them within that time.
func (l *Loan) Overdue(patience time.Duration) bool {
	if l == nil || time.Since(l.since) <= patience {
		return false
	}
	return time.Since(time.Unix(0, l.of.wanted.Load())) <= patience
}

// ErrFull is the error of a request that too many others are waiting before.
var ErrFull = errors.New("too many requests are waiting")

// Entry admits requests to what takes memory: each waits for its part of a budget, first come, first served, until it
// gets it or goes away. Small parts have a budget of their own, so that they don't wait for large ones. It is safe for
// concurrent use.
type Entry struct {
	small, large *Budget
	least, most  int64 // of a part that is large, of those that wait
	waiting      atomic.Int64
}

// NewEntry returns an entry with a budget of so many bytes, and another of as many for parts of up to small. Of those
// who wait it takes at most waiting; whoever comes then is turned away.
func NewEntry(budget, small, waiting int64) *Entry {
	return &Entry{small: NewBudget(budget), large: NewBudget(budget), least: small, most: waiting}
}

// Wait is Take of the budget for n bytes. The error is ErrFull, at once, or that of ctx.
func (e *Entry) Wait(ctx context.Context, n int64) (*Loan, error) {
	of := e.small
	if n > e.least {
		of = e.large
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if l := of.Try(n); l != nil {
		return l, nil
	}
	defer e.waiting.Add(-1)
	if e.waiting.Add(1) > e.most {
		return nil, ErrFull
	}
	return of.Take(ctx, n)
}

// Waiting returns how many wait.
func (e *Entry) Waiting() int64 { return e.waiting.Load() }
