package bounds_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kiln-registry/kiln-registry/registry/bounds"
)

func TestBudget(t *testing.T) {
	b := bounds.NewBudget(bounds.Limits{Size: 10, Waiting: 9, OfOne: 9})
	all, err := b.Wait(t.Context(), "a", 1000) // more than there is: all of it
	if err != nil || b.Try("b", 1) != nil {
		t.Fatal("taken twice:", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.Wait(ctx, "b", 1); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	got := make(chan *bounds.Loan)
	go func() {
		l, _ := b.Wait(t.Context(), "b", 10)
		got <- l
	}()
	all.Return()
	(<-got).Return()
	four, six := b.Try("a", 4), b.Try("a", 6)
	if four == nil || six == nil || b.Try("b", 1) != nil {
		t.Error("not all of it can be lent")
	}
	var none *bounds.Loan
	none.Return()
	if none.Overdue(0) {
		t.Error("nothing is overdue")
	}
}

// A loan is overdue once it was held for longer than others have patience that want it now, or did a moment ago.
func TestOverdue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bounds.NewBudget(bounds.Limits{Size: 10})
		l := b.Try("a", 10)
		time.Sleep(time.Hour)
		if l.Overdue(time.Minute) {
			t.Error("nobody wants it")
		}
		b.Try("b", 1)
		if !l.Overdue(time.Minute) || l.Overdue(2*time.Hour) {
			t.Error("somebody wants it, and it was held for an hour")
		}
		received := new(atomic.Int64)
		body := &bounds.Body{From: strings.NewReader("x"), Idle: time.Minute, Received: received, Held: l,
			Control: http.NewResponseController(httptest.NewRecorder())}
		if n, err := body.Read(make([]byte, 1)); n != 0 || !errors.Is(err, bounds.ErrOverdue) || body.Err == nil {
			t.Error(n, err)
		}
		time.Sleep(2 * time.Minute)
		if l.Overdue(time.Minute) {
			t.Error("whoever wanted it has gone")
		}
		b2, err := io.ReadAll(body)
		if string(b2) != "x" || err != nil || body.N != 1 || received.Load() != 1 {
			t.Error(b2, err)
		}
	})
}

func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		stop := bounds.Watch(time.Second, func() { n++ })
		time.Sleep(3*time.Second + time.Millisecond)
		stop()
		time.Sleep(time.Minute)
		if n != 3 {
			t.Errorf("looked %d times in 3 seconds", n)
		}
	})
}

// What a client takes of an answer is known while it is sent, and grows with what it reads.
func TestTaken(t *testing.T) {
	got := make(chan uint64, 1)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, known := bounds.Taken(r.Context())
		if !known {
			t.Error("not known")
		}
		got <- n
		w.Write(make([]byte, 100_000))
	}))
	s.Config.ConnContext = bounds.WithConn
	s.StartTLS()
	defer s.Close()
	var last uint64
	for i := range 3 {
		resp, err := s.Client().Get(s.URL)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		n := <-got
		if i > 0 && n < last+50_000 { // the last of it may not be acknowledged yet
			t.Errorf("%d bytes, %d before the last answer", n, last)
		}
		last = n
	}
	if _, known := bounds.Taken(t.Context()); known {
		t.Error("known without a connection")
	}
}

// Small parts do not wait for large ones, who goes away waits no more, and of those who wait there are not too many.
func TestEntry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := bounds.NewEntry(bounds.Limits{Size: 10, Waiting: 2, OfOne: 2}, 2)
		large, err := e.Wait(t.Context(), "a", 1000)
		if err != nil {
			t.Fatal(err)
		}
		small, err := e.Wait(t.Context(), "a", 2)
		if err != nil {
			t.Fatal(err)
		}
		small.Return()
		ctx, cancel := context.WithCancel(t.Context())
		results := make(chan error, 2)
		loans := make(chan *bounds.Loan, 2)
		for _, ctx := range []context.Context{ctx, t.Context()} {
			go func() {
				l, err := e.Wait(ctx, "a", 3)
				loans <- l
				results <- err
			}()
			synctest.Wait()
		}
		if _, err := e.Wait(t.Context(), "a", 3); !errors.Is(err, bounds.ErrFull) || e.Waiting() != 2 {
			t.Error(err, e.Waiting())
		}
		cancel()
		if l, err := <-loans, <-results; l != nil || !errors.Is(err, context.Canceled) {
			t.Error(l, err)
		}
		synctest.Wait()
		if _, err := e.Wait(ctx, "a", 1); !errors.Is(err, context.Canceled) || e.Waiting() != 1 {
			t.Error(err, e.Waiting())
		}
		large.Return()
		(<-loans).Return()
		if err := <-results; err != nil {
			t.Error(err)
		}
		synctest.Wait()
		all, err := e.Wait(t.Context(), "a", 10)
		if err != nil || e.Waiting() != 0 {
			t.Error(err, e.Waiting())
		}
		all.Return()
	})
}
