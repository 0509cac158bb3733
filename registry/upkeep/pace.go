package upkeep

import (
	"context"
	"time"
)

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
