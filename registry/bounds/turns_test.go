package bounds_test

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kiln-registry/kiln-registry/registry/bounds"
)

// line are requests that wait for a budget, in a bubble of package synctest.
type line struct {
	*testing.T
	of  *bounds.Budget
	got chan string // who got his part, or why not
}

// join has a request wait, and return what it gets if it is a turn.
func (l line) join(ctx context.Context, name string, n int64) {
	go func() {
		loan, err := l.of.Wait(ctx, name, n)
		if err != nil {
			name += ": " + err.Error()
		}
		l.got <- name
		if n == 1 {
			loan.Return()
		}
	}()
	synctest.Wait()
}

// next returns what happened to the next so many.
func (l line) next(n int) (all []string) {
	for range n {
		all = append(all, <-l.got)
	}
	return all
}

func (l line) want(want ...string) {
	l.Helper()
	synctest.Wait()
	if got := l.next(min(len(want), len(l.got))); !slices.Equal(got, want) || len(l.got) > 0 {
		l.Fatalf("%q and %d more, want %q", got, len(l.got), want)
	}
}

func (l line) hold(name string, n int64) *bounds.Loan {
	l.Helper()
	loan := l.of.Try(name, n)
	if loan == nil {
		l.Fatalf("%s gets no %d", name, n)
	}
	return loan
}

const full = ": too many requests are waiting"

// Who asks once is next but one, however much another caller asked before him; and that one has a part of the places
// only. Who goes away waits no more.
func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := line{t, bounds.NewBudget(bounds.Limits{Size: 1, Waiting: 4, OfOne: 3}), make(chan string, 9)}
		turn := l.hold("greedy", 1)
		left, cancel := context.WithCancel(t.Context())
		l.join(left, "greedy", 1)
		l.join(t.Context(), "greedy", 1)
		l.join(t.Context(), "greedy", 1)
		l.join(t.Context(), "greedy", 1)
		l.want("greedy" + full)
		l.join(left, "gone", 1)
		cancel()
		synctest.Wait()
		if gone := l.next(2); l.of.Waiting() != 2 {
			t.Fatal(gone, l.of.Waiting())
		}
		l.join(t.Context(), "other", 1)
		l.join(t.Context(), "greedy", 1)
		turn.Return()
		l.want("greedy", "other", "greedy", "greedy")
		if l.of.Waiting() != 0 {
			t.Error(l.of.Waiting())
		}
		l.hold("other", 1).Return()
	})
}

// Where all places are taken, the newest request of whoever has most of them makes room for one of a caller with fewer,
// but not for one more of a caller with as many.
func TestFullLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := line{t, bounds.NewBudget(bounds.Limits{Size: 1, Waiting: 4, OfOne: 3}), make(chan string, 9)}
		turn := l.hold("x", 1)
		for _, name := range []string{"a", "a", "a", "b"} {
			l.join(t.Context(), name, 1)
		}
		l.join(t.Context(), "c", 1)
		l.want("a" + full)
		l.join(t.Context(), "a", 1)
		l.want("a" + full)
		l.join(t.Context(), "b", 1)
		l.want("b" + full)
		l.join(t.Context(), "d", 1)
		l.want("a" + full)
		l.join(t.Context(), "e", 1) // all have one
		l.want("e" + full)
		turn.Return()
		l.want("a", "b", "c", "d")
	})
}

// One caller gets no more than half, and the next one no more than half of the rest: who comes then waits for none of
// them, though requests of theirs wait.
func TestShares(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := line{t, bounds.NewBudget(bounds.Limits{Size: 16, Part: 1, Waiting: 9, OfOne: 9}), make(chan string, 9)}
		for range 4 {
			l.hold("a", 2)
		}
		l.join(t.Context(), "a", 2)
		one, two := l.hold("b", 2), l.hold("b", 2)
		l.join(t.Context(), "b", 2)
		l.join(t.Context(), "c", 3)
		l.want("c")
		l.join(t.Context(), "d", 3) // there is 1 left
		l.join(t.Context(), "e", 1)
		l.want()
		one.Return() // of which b could have some again, but d is before him
		l.want("d")
		two.Return() // b holds nothing any more, and came before e
		l.want("b")
	})
}

// A part that is larger than a share is lent to who holds nothing, and not passed over for ever by small ones.
func TestLargePart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := line{t, bounds.NewBudget(bounds.Limits{Size: 16, Part: 1, Waiting: 9, OfOne: 9}), make(chan string, 9)}
		small := l.hold("small", 2)
		left, cancel := context.WithCancel(t.Context())
		l.join(left, "gone", 20)
		l.join(t.Context(), "large", 16)
		l.join(t.Context(), "small", 2)
		l.join(t.Context(), "other", 2)
		l.want()
		cancel()
		l.want("gone: context canceled")
		small.Return()
		l.want("large")
	})
}

// Who waits for what he holds himself makes nothing overdue of others.
func TestOverdueOfOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bounds.NewBudget(bounds.Limits{Size: 4, Part: 1})
		own, others := b.Try("a", 2), b.Try("b", 1)
		time.Sleep(time.Hour)
		if b.Try("a", 1) != nil || !own.Overdue(time.Minute) || others.Overdue(time.Minute) {
			t.Error("a waits for what b holds, or not for what he holds")
		}
		if b.Try("c", 2) != nil || !others.Overdue(time.Minute) {
			t.Error("c does not wait for what b holds")
		}
	})
}

// Callers without a name are told apart by address, of IPv6 by network.
func TestOrigin(t *testing.T) {
	same := [][]string{
		{"192.0.2.1:1", "192.0.2.1:2", "[::ffff:192.0.2.1]:3"},
		{"[2001:db8::1]:1", "[2001:db8::ffff:0:0:2]:1", "[2001:db8::3%eth0]:1"},
		{"192.0.2.2:1"}, {"[2001:db8:0:1::1]:1"}, {"@"}, {""},
	}
	seen := map[string]int{}
	for i, addresses := range same {
		for _, a := range addresses {
			name := bounds.Origin(a)
			if was, ok := seen[name]; ok && was != i {
				t.Errorf("%s is taken for one of %q", a, same[was])
			}
			seen[name] = i
		}
	}
	if len(seen) != len(same) {
		t.Errorf("%v", seen)
	}
	if ctx := bounds.WithCaller(t.Context(), "ana"); bounds.Caller(ctx) != "ana" || bounds.Caller(t.Context()) != "" {
		t.Error("the caller is not who it was said to be")
	}
}
