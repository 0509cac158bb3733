package bounds_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/kiln-registry/kiln-registry/registry/bounds"
)

// Who asks once is next but one, however much another caller asked before him; and that one has a part of the places
// only. Who goes away waits no more.
func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns := bounds.NewTurns(1, 4, 3)
		leave, err := turns.Wait(t.Context(), "greedy")
		if err != nil {
			t.Fatal(err)
		}
		order := make(chan string, 4)
		next := func(n int) (all []string) {
			for range n {
				all = append(all, <-order)
			}
			return all
		}
		left, cancel := context.WithCancel(t.Context())
		join := func(ctx context.Context, caller string) {
			go func() {
				leave, err := turns.Wait(ctx, caller)
				if err != nil {
					caller = err.Error()
				}
				order <- caller
				if err == nil {
					leave()
				}
			}()
			synctest.Wait()
		}
		full := func(caller string) {
			t.Helper()
			if _, err := turns.Wait(t.Context(), caller); !errors.Is(err, bounds.ErrFull) {
				t.Errorf("%s: %v", caller, err)
			}
		}
		join(left, "greedy")
		join(t.Context(), "greedy")
		join(t.Context(), "greedy")
		full("greedy")
		join(left, "gone")
		full("other") // all places are taken
		cancel()
		synctest.Wait()
		if gone := next(2); turns.Waiting() != 2 {
			t.Fatal(gone, turns.Waiting())
		}
		join(t.Context(), "other")
		join(t.Context(), "greedy")
		leave()
		want := []string{"greedy", "other", "greedy", "greedy"}
		if got := next(4); !slices.Equal(got, want) || turns.Waiting() != 0 {
			t.Errorf("%v, %d wait; want %v", got, turns.Waiting(), want)
		}
		if leave, err = turns.Wait(t.Context(), "other"); err != nil {
			t.Fatal(err)
		}
		leave()
	})
}
