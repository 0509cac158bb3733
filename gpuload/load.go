package gpuload

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"golang.org/x/sync/errgroup"
)

// loader is one run of Load.
type loader struct {
	plan   Plan
	src    Source
	target Target
	o      Options

	blocks blocks
	pool   lanes.Pool        // hashes
	seen   []identity.Digest // of each shard, once its last byte was hashed
	read   clock
	hash   clock
	copy   clock
	disk   clock
	back   int64 // bytes read back
}

// Load reads every byte of the plan once, hashes it and copies it to t, and publishes the memory only when every shard
// and the aggregate are what the plan wants and the target says that every byte arrived. Otherwise, also when ctx ends
// first, it frees everything and returns an error, an *Error where one shard is to blame. Load owns t from the call on.
func Load(ctx context.Context, p Plan, src Source, t Target, o Options) (*Resident, error) {
	r, err := load(ctx, p, src, t, o)
	if err == nil {
		return r, nil
	}
	if o.Observe != nil {
		o.Observe(Failed)
	}
	if e := t.Free(); e != nil {
		err = errors.Join(err, fmt.Errorf("free the memory of a failed load: %w", e))
	}
	return nil, err
}

func load(ctx context.Context, p Plan, src Source, t Target, o Options) (_ *Resident, err error) {
	start := time.Now()
	l := &loader{plan: p, src: src, target: t, seen: make([]identity.Digest, len(p.Shards))}
	if l.o, err = o.shaped(p); err != nil {
		return nil, err
	}
	l.enter(Planned)
	devices, err := t.Devices(ctx)
	if err != nil {
		return nil, fmt.Errorf("load: list the devices: %w", deviceError(err))
	}
	on, err := p.place(devices, l.o)
	if err != nil {
		return nil, err
	}
	l.enter(Allocating)
	if err := l.alloc(ctx, on); err != nil {
		return nil, err
	}
	l.enter(Loading)
	m, err := l.checked(ctx)
	if err != nil {
		return nil, err
	}
	handles, err := t.Publish(ctx)
	if err != nil {
		return nil, fmt.Errorf("publish the weights: %w", deviceError(err))
	}
	l.blocks.name(handles)
	l.enter(Published)
	return &Resident{
		manifest: m, plan: p, stats: l.stats(m, start), target: t, devices: devices, blocks: l.blocks, options: l.o,
		handles: handles, state: Published,
	}, nil
}

func (l *loader) stats(m identity.Manifest, start time.Time) Stats {
	stage := ""
	if named, ok := l.src.(interface{ Stage() string }); ok {
		stage = named.Stage()
	}
	return Stats{
		Bytes: int64(m.TotalSize), Elapsed: time.Since(start), Stage: stage,
		Read: l.read.total(), Hash: l.hash.total(), Copy: l.copy.total(), Disk: l.kept(),
		ReadBack: l.back, Lanes: l.o.Lanes, Buffer: l.o.buffer(),
	}
}

// kept is the time that the disk took, 0 where nothing is kept.
func (l *loader) kept() time.Duration {
	if l.o.Keep == nil {
		return 0
	}
	return l.disk.total()
}

func (l *loader) enter(s State) {
	if l.o.Observe != nil {
		l.o.Observe(s)
	}
}

func (l *loader) alloc(ctx context.Context, on [][]int) error {
	for i, s := range l.plan.Shards {
		var blocks []Block
		for _, device := range on[i] {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("allocate shard %s: %w", s.Name, err)
			}
			b, err := l.target.Alloc(ctx, device, s.Size-s.Data)
			if err != nil {
				return &Error{s.Name, 0, fmt.Sprint(s.Size-s.Data, " bytes"), "none", deviceError(err)}
			}
			blocks = append(blocks, b)
		}
		l.blocks = append(l.blocks, blocks)
	}
	return nil
}

// checked fills the blocks and returns what they hold once all of it is what it should be.
func (l *loader) checked(ctx context.Context) (m identity.Manifest, err error) {
	var s *slab
	if s, l.o, err = newSlab(l.o, l.target); err != nil {
		return m, err
	}
	if err = l.fill(ctx, s); err == nil {
		l.enter(Verifying)
		m, err = l.verify(ctx)
	}
	if err == nil && l.o.VerifyDevice {
		l.back, err = l.blocks.readBack(ctx, l.target, l.plan, l.seen, s)
	}
	if err != nil {
		// Copies may still read the buffers: only Free ends them all.
		err = errors.Join(err, l.target.Free())
	}
	return m, s.end(err)
}

// fill runs the lanes. Each takes the largest shard that none has taken.
func (l *loader) fill(ctx context.Context, s *slab) error {
	sizes := make([]int64, len(l.plan.Shards))
	for i, s := range l.plan.Shards {
		sizes[i] = s.Size
	}
	order := descending(sizes)
	var next atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for _, ring := range s.rings {
		g.Go(func() error {
			for n := next.Add(1) - 1; n < int64(len(order)); n = next.Add(1) - 1 {
				if err := l.shard(ctx, order[n], ring); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return g.Wait()
}

// verify is the gate before publication.
func (l *loader) verify(ctx context.Context) (m identity.Manifest, err error) {
	if err := l.target.Wait(ctx); err != nil {
		return m, fmt.Errorf("wait for the last copies: %w", deviceError(err))
	}
	shards := make([]identity.Shard, len(l.plan.Shards))
	for i, s := range l.plan.Shards {
		shards[i] = identity.Shard{Filename: s.Name, Size: uint64(s.Size), Digest: l.seen[i]}
	}
	if m, err = identity.New(shards); err != nil {
		return m, fmt.Errorf("verify the weights: %w", err)
	}
	want := l.plan.Want.Aggregate
	if w := l.plan.Want.Manifest; w != nil && want.IsZero() {
		want = w.Aggregate
	}
	if !want.IsZero() && want != m.Aggregate {
		return m, fmt.Errorf("verify the weights: %w: expected aggregate %s, got %s", ErrMismatch, want, m.Aggregate)
	}
	if err := ctx.Err(); err != nil {
		return m, fmt.Errorf("verify the weights: %w", err)
	}
	return m, nil
}

// Stats says how a load went. Read, Hash, Copy and Disk are the time that each stage was at work, summed over the lanes.
type Stats struct {
	Bytes            int64 // read and hashed, headers included
	Elapsed          time.Duration
	Read, Hash, Copy time.Duration
	Disk             time.Duration // 0: nothing was kept
	ReadBack         int64         // bytes that were read back from the device and hashed again
	Lanes            int
	Buffer           int64  // bytes of buffers
	Stage            string // what reading is called, as the Stage() string of a Source says; empty: read
}

// String is one line for people: how much, how fast, which stage was the limit, and how busy each was.
func (s Stats) String() string {
	stages := []struct {
		name string
		busy time.Duration
	}{{cmp.Or(s.Stage, "read"), s.Read}, {"hash", s.Hash}, {"copy", s.Copy}, {"disk", s.Disk}}
	if s.Disk == 0 {
		stages = stages[:3]
	}
	limit, busy := stages[1], make([]string, len(stages))
	for i, stage := range stages {
		if stage.busy > limit.busy {
			limit = stage
		}
		busy[i] = fmt.Sprintf("%s %.0f%%", stage.name, s.busy(stage.busy))
	}
	return fmt.Sprintf("%.1f MB in %.3f s, %.2f GB/s; limit: %s (busy: %s); %s, %.1f MB of buffers",
		float64(s.Bytes)/1e6, s.Elapsed.Seconds(), float64(s.Bytes)/1e9/max(s.Elapsed.Seconds(), 1e-9), limit.name,
		strings.Join(busy, ", "), lanesText(s.Lanes), float64(s.Buffer)/1e6)
}

func lanesText(n int) string {
	if n == 1 {
		return "1 lane"
	}
	return fmt.Sprintf("%d lanes", n)
}

func (s Stats) busy(d time.Duration) float64 {
	return 100 * d.Seconds() / max(s.Elapsed.Seconds()*float64(s.Lanes), 1e-9)
}

// clock adds up the time of one stage over all lanes.
type clock struct{ ns atomic.Int64 }

func (c *clock) since(t time.Time)    { c.ns.Add(int64(time.Since(t))) }
func (c *clock) total() time.Duration { return time.Duration(c.ns.Load()) }

// The reasons that a caller tells apart with errors.Is.
var (
	ErrMismatch   = errors.New("the bytes are not those asked for")  // a digest, a size, a name or the aggregate
	ErrChanged    = errors.New("the file changed while it was read") // also: it ended early or grew
	ErrMemory     = errors.New("not enough memory")                  // before the first byte was copied
	ErrDevice     = errors.New("the device failed")                  // allocation, copy or publication
	ErrHung       = errors.New("the device does not answer")         // what it may still use can't be given back
	ErrUnreadable = errors.New("the device can't read its memory")   // it says so itself: what is there is lost
	ErrDisk       = errors.New("the bytes were not kept")            // by Options.Keep
	ErrState      = errors.New("the weights are not published")      // no longer, or not yet
)

// Error says where a load failed. Err wraps one of the reasons above where one applies.
type Error struct {
	Shard    string // file name
	Offset   int64  // where in the file it was noticed: the end of the file for a digest
	Expected string
	Got      string
	Err      error
}

// Error names the shard, the offset unless the bytes as a whole are wrong, and, where there are such, what was expected
// and what was found.
func (e *Error) Error() string {
	s := fmt.Sprintf("load shard %s, offset %d: %v", e.Shard, e.Offset, e.Err)
	if errors.Is(e.Err, ErrMismatch) {
		s = fmt.Sprintf("load shard %s: %v", e.Shard, e.Err)
	}
	if e.Expected != "" || e.Got != "" {
		s += fmt.Sprintf(": expected %s, got %s", e.Expected, e.Got)
	}
	return s
}

// Unwrap returns Err.
func (e *Error) Unwrap() error { return e.Err }

func deviceError(err error) error { return fmt.Errorf("%w: %w", ErrDevice, err) }
