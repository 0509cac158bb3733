package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

// ErrIdle: no byte moved for the idle timeout.
var ErrIdle = errors.New("no byte moved")

// watch ends a request when nothing moves. Every byte read from the request's body or from the answer winds it up.
type watch struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	timer  *time.Timer
	idle   time.Duration
}

func newWatch(ctx context.Context, idle time.Duration, host string) (context.Context, *watch) {
	ctx, cancel := context.WithCancelCause(ctx)
	w := &watch{ctx: ctx, cancel: cancel, idle: idle}
	w.timer = time.AfterFunc(idle, func() { cancel(fmt.Errorf("%s: %w for %s", host, ErrIdle, idle)) })
	return ctx, w
}

func (w *watch) stop() {
	w.timer.Stop()
	w.cancel(nil)
}

// cause replaces the error of a cancelled request by what cancelled it.
func (w *watch) cause(err error) error {
	if err != nil && err != io.EOF && w.ctx.Err() != nil {
		return context.Cause(w.ctx)
	}
	return err
}

func (w *watch) read(r io.Reader, p []byte) (int, error) {
	n, err := r.Read(p)
	if n > 0 {
		w.timer.Reset(w.idle)
	}
	return n, w.cause(err)
}

// reader winds the watch up with every read of a request's body.
func (w *watch) reader(r io.Reader) io.Reader { return watchedReader{r, w} }

type watchedReader struct {
	r io.Reader
	w *watch
}

func (r watchedReader) Read(p []byte) (int, error) { return r.w.read(r.r, p) }

// watched is the body of an answer.
type watched struct {
	io.ReadCloser
	watch *watch
}

func (b *watched) Read(p []byte) (int, error) { return b.watch.read(b.ReadCloser, p) }

func (b *watched) Close() error {
	defer b.watch.stop()
	return b.ReadCloser.Close()
}
