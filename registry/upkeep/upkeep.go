// Package upkeep does to a registry what has to be done while it runs: it collects the blobs that nothing refers to any
// more, and reads all others again to find those that have become damaged.
package upkeep

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/kiln-registry/kiln-registry/index"
)

// wait waits, unless ctx ends first.
func wait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// load reads a note into v, which stays as it is if there is none. A note that does not read is taken for none: it only
// says where to go on.
func load(ctx context.Context, ix *index.Index, name string, v any) (found bool, err error) {
	b, err := ix.Note(ctx, name)
	if err != nil || b == nil {
		return false, err
	}
	return json.Unmarshal(b, v) == nil, nil
}

func save(ctx context.Context, ix *index.Index, name string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := ix.Apply(ctx, index.Note{Name: name, Value: b}); err != nil {
		return fmt.Errorf("keep note %s: %w", name, err)
	}
	return nil
}

// pace spreads reading over time. It is used by one goroutine at a time.
type pace struct {
	rate int64     // bytes a second; zero: as fast as it goes
	next time.Time // when all that was read so far may have been read
	now  func() time.Time
	wait func(context.Context, time.Duration) error
}

// burst is how far reading may lag behind the rate and still catch up.
const burst = time.Second

func newPace(rate int64) *pace { return &pace{rate: rate, now: time.Now, wait: wait} }

// read waits until n more bytes may have been read.
func (p *pace) read(ctx context.Context, n int) error {
	if p.rate <= 0 {
		return ctx.Err()
	}
	now := p.now()
	if least := now.Add(-burst); p.next.Before(least) {
		p.next = least
	}
	p.next = p.next.Add(time.Duration(float64(n) / float64(p.rate) * float64(time.Second)))
	return p.wait(ctx, p.next.Sub(now))
}
