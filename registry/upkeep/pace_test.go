package upkeep

import (
	"context"
	"testing"
	"time"
)

// TestPace: reading takes as long as the rate says, but for what was saved up before, which is little.
func TestPace(t *testing.T) {
	now := time.Unix(1e9, 0)
	waited := time.Duration(0)
	p := newPace(32 << 20)
	p.now = func() time.Time { return now }
	p.wait = func(_ context.Context, d time.Duration) error {
		if d > 0 {
			waited += d
			now = now.Add(d)
		}
		return nil
	}
	read := func(n int) time.Duration {
		waited = 0
		for ; n > 0; n -= scrubPiece {
			if err := p.read(t.Context(), scrubPiece); err != nil {
				t.Fatal(err)
			}
		}
		return waited.Round(time.Millisecond)
	}
	if got := read(96 << 20); got != 2*time.Second {
		t.Errorf("96 MiB at 32 MiB/s waited %v, want 3s less 1s", got)
	}
	if got := read(32 << 20); got != time.Second {
		t.Errorf("32 MiB more waited %v, want 1s", got)
	}
	now = now.Add(time.Hour) // idle
	if got := read(64 << 20); got != time.Second {
		t.Errorf("64 MiB after a pause waited %v, want 2s less 1s", got)
	}
	p = newPace(0)
	p.wait = func(context.Context, time.Duration) error { t.Error("waited without a rate"); return nil }
	if err := p.read(t.Context(), 1<<30); err != nil {
		t.Error(err)
	}
}
