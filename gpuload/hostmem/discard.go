package hostmem

import (
	"context"
	"math"

	"github.com/kiln-registry/kiln-registry/gpuload"
)

// KindNone is the kind of the handles of Discard: there are no bytes behind them.
const KindNone = "none"

// Discard is a gpuload.Target that keeps nothing: loading to it verifies the bytes and measures reading and hashing
// alone. The zero value is ready for one load.
type Discard struct{ sizes []int64 }

// Devices returns one device with room for everything.
func (d *Discard) Devices(context.Context) ([]gpuload.Device, error) {
	return []gpuload.Device{{Name: "discard", Backend: "discard", Free: math.MaxInt64}}, nil
}

// Alloc takes nothing.
func (d *Discard) Alloc(_ context.Context, _ int, n int64) (gpuload.Block, error) {
	d.sizes = append(d.sizes, n)
	return gpuload.Block(len(d.sizes) - 1), nil
}

// done is the token of a copy that was never open.
type done struct{}

func (done) Wait(context.Context) error { return nil }

// Submit does nothing.
func (d *Discard) Submit(context.Context, []byte, gpuload.Block, int64) (gpuload.Token, error) {
	return done{}, nil
}

// Wait returns nil.
func (d *Discard) Wait(context.Context) error { return nil }

// Publish returns handles of KindNone.
func (d *Discard) Publish(context.Context) ([]gpuload.Handle, error) {
	handles := make([]gpuload.Handle, len(d.sizes))
	for i, n := range d.sizes {
		handles[i] = gpuload.Handle{Kind: KindNone, Size: n}
	}
	return handles, nil
}

// Free has nothing to give back.
func (d *Discard) Free() error { d.sizes = nil; return nil }
