package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync"
	"syscall"
	"time"
)

const (
	firstBackoff = 500 * time.Millisecond // doubled with every try without progress
	maxBackoff   = 10 * time.Second
	maxTries     = 7               // without progress; about 25 s of waiting with the defaults
	maxAll       = 200             // with progress: an end to a server that gives a little each time
	maxUnmet     = 3               // tries while the host was never reached: a wrong name should not take long to say so
	maxAsked     = 5 * time.Minute // a longer Retry-After is not waited for
)

// pace is the wait that all users of one Client share: when a server says Retry-After, nobody asks before then.
type pace struct {
	mu    sync.Mutex
	until time.Time
	noted time.Time // until when the wait that was told of last goes on
}

// tell says whether a wait of d is to be told of: not while another one of the same Client goes on.
func (p *pace) tell(d time.Duration) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if now.Before(p.noted) {
		return false
	}
	p.noted = now.Add(d)
	return true
}

func (p *pace) hold(until time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if until.After(p.until) {
		p.until = until
	}
}

func (p *pace) left() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return time.Until(p.until)
}

// Retry calls fn until it succeeds, and returns its last error. Errors that are not Temporary end it at once. Between
// tries it waits, longer each time and with jitter; a Retry-After of the server is waited for by all users of the
// Client. The number of tries without progress is bounded; any byte of a blob that moves, through any user of the
// Client, starts the count anew, though not for ever. what names the work in the
// notes; the error does not repeat it.
func (c *Client) Retry(ctx context.Context, what string, fn func() error) error {
	moved, tries := c.moved.Load(), 0
	for all := 1; ; all++ {
		if err := c.wait(ctx, c.pace.left()); err != nil {
			return err
		}
		err := fn()
		if err == nil || !Temporary(err) || ctx.Err() != nil {
			return err
		}
		if now := c.moved.Load(); now != moved {
			moved, tries = now, 0
		}
		tries++
		asked := retryAfter(err)
		if tries >= maxTries || all >= maxAll || asked > maxAsked || tries >= maxUnmet && !c.met.Load() {
			return fmt.Errorf("gave up after %s: %w", count(all, "try", "tries"), err)
		}
		if asked > 0 {
			c.pace.hold(time.Now().Add(asked))
		}
		d := jitter(min(c.backoff<<(tries-1), maxBackoff))
		if c.met.Load() && c.pace.tell(max(asked, d)) {
			c.notify("%s: %v; trying again in %s", what, err, max(asked, d).Round(100*time.Millisecond))
		}
		if err := c.wait(ctx, d); err != nil {
			return err
		}
	}
}

// Once calls fn, for what can be done without: a second time only if a connection dropped. It keeps to the waits of
// Retry, but lets nobody wait, whatever the server asks for.
func (c *Client) Once(ctx context.Context, fn func() error) error {
	if err := c.wait(ctx, c.pace.left()); err != nil {
		return err
	}
	err := fn()
	if !dropped(err) || ctx.Err() != nil {
		return err
	}
	if err := c.wait(ctx, jitter(c.backoff)); err != nil {
		return err
	}
	return fn()
}

// wait sleeps for d, or until ctx ends. Shared waits get a little jitter, so that workers do not return in step.
func (c *Client) wait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return context.Cause(ctx)
	}
	t := time.NewTimer(d + time.Duration(rand.Int64N(int64(d)/20+1)))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func jitter(d time.Duration) time.Duration { return d/2 + time.Duration(rand.Int64N(int64(d)/2+1)) }

func dropped(err error) bool {
	var s *StatusError
	return !errors.As(err, &s) && (errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE))
}

// Temporary says whether the same request may well succeed later: a connection that broke, a body that ended early or
// stalled, 408, 429 and most of the 5xx answers, and a refusal by the target of a redirect, whose link may have run out.
func Temporary(err error) bool {
	var s *StatusError
	var n net.Error
	var dns *net.DNSError
	switch {
	case errors.As(err, &s):
		return s.temporary()
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return false
	case errors.Is(err, ErrIdle), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return true
	case errors.As(err, &dns):
		return !dns.IsNotFound || dns.IsTemporary
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE),
		errors.Is(err, net.ErrClosed):
		return true
	}
	return errors.As(err, &n) && n.Timeout()
}

func (s *StatusError) temporary() bool {
	switch s.Status {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests, http.StatusInternalServerError,
		http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout, 520, 521, 522, 523:
		return true
	case http.StatusBadRequest, http.StatusUnauthorized, http.StatusForbidden:
		return s.Redirected
	}
	return false
}

// retryAfter returns how long the server asked to wait, or zero.
func retryAfter(err error) time.Duration {
	var s *StatusError
	if errors.As(err, &s) {
		return s.RetryAfter
	}
	return 0
}

// parseRetryAfter reads both forms of the header: seconds, and an HTTP date.
func parseRetryAfter(v string, now time.Time) time.Duration {
	if n, err := strconv.Atoi(v); err == nil && n > 0 {
		return time.Duration(min(n, 1<<30)) * time.Second
	}
	if t, err := http.ParseTime(v); err == nil && t.After(now) {
		return t.Sub(now)
	}
	return 0
}

func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
