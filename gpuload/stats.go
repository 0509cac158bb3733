package gpuload

import (
	"fmt"
	"sync/atomic"
	"time"
)

// Stats says how a load went. Read, Hash and Copy are the time that each stage was at work, summed over the lanes.
type Stats struct {
	Bytes            int64 // read and hashed, headers included
	Elapsed          time.Duration
	Read, Hash, Copy time.Duration
	Lanes            int
	Buffer           int64 // bytes of buffers
}

// String is one line for people: how much, how fast, which stage was the limit, and how busy each was.
func (s Stats) String() string {
	read, hash, copied := s.busy(s.Read), s.busy(s.Hash), s.busy(s.Copy)
	limit := "read"
	switch {
	case hash >= read && hash >= copied:
		limit = "hash"
	case copied > read:
		limit = "copy"
	}
	return fmt.Sprintf("%.1f MB in %.3f s, %.2f GB/s; limit: %s (busy: read %.0f%%, hash %.0f%%, copy %.0f%%); "+
		"%d lanes, %.1f MB of buffers", float64(s.Bytes)/1e6, s.Elapsed.Seconds(),
		float64(s.Bytes)/1e9/max(s.Elapsed.Seconds(), 1e-9), limit, read, hash, copied, s.Lanes, float64(s.Buffer)/1e6)
}

func (s Stats) busy(d time.Duration) float64 {
	return 100 * d.Seconds() / max(s.Elapsed.Seconds()*float64(s.Lanes), 1e-9)
}

// clock adds up the time of one stage over all lanes.
type clock struct{ ns atomic.Int64 }

func (c *clock) since(t time.Time)    { c.ns.Add(int64(time.Since(t))) }
func (c *clock) total() time.Duration { return time.Duration(c.ns.Load()) }
