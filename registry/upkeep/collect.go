package upkeep

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
)

var (
	// ErrRunning: the same is being done already.
	ErrRunning = errors.New("one is running already")
	// ErrNotLevel: the index does not know all that the store holds, so that nothing can be said to be unused.
	ErrNotLevel = errors.New("the index is not level with the store")
	// ErrReadOnly: the registry is read-only, so that nothing is removed.
	ErrReadOnly = errors.New("the registry is read-only")
	// ErrTooMuch: so large a share of the store would go that it looks like a mistake. Nothing was removed, or no more.
	ErrTooMuch = errors.New("too much of the store would go")
	// ErrLacking: the index is damaged, as it lacks what the store has on record. Nothing is removed by it.
	ErrLacking = errors.New("the index lacks what the store has on record; kiln-registry reindex makes it anew")
)

const (
	// DefaultGrace is how old a blob is at least when it is collected.
	DefaultGrace = 24 * time.Hour
	// DefaultMaxShare is how much of a store goes at most.
	DefaultMaxShare = 0.5
	// removers is how many blobs are removed at a time: a removal mostly waits, for a disk or for a bucket.
	removers = 8
	// maxRound is how many blobs that may go are compared with the store's refs at a time.
	maxRound = 1 << 16
	// maxBusy is how many blobs that were in use are come back to at the end of a collection.
	maxBusy = 4096
	// maxFailed is how many blobs may not be removable before a collection gives up.
	maxFailed = 16
)

// Blob is a blob that was collected, or would be.
type Blob struct {
	Digest  identity.Digest `json:"digest"`
	Size    int64           `json:"size"`
	Created time.Time       `json:"created"`
}

// Amount is a number of blobs and of their bytes.
type Amount struct {
	Blobs int64 `json:"blobs"`
	Bytes int64 `json:"bytes"`
}

func (a *Amount) add(bytes int64) {
	a.Blobs++
	a.Bytes += bytes
}

func (a *Amount) sub(bytes int64) {
	a.Blobs--
	a.Bytes -= bytes
}

// Collection is what a collection found and did. Found is Held + Leased + Young + Unused.
type Collection struct {
	DryRun  bool      `json:"dry_run"`
	Began   time.Time `json:"began"`
	Ended   time.Time `json:"ended"`
	Found   Amount    `json:"found"`   // in the store
	Held    Amount    `json:"held"`    // a manifest refers to them
	Leased  Amount    `json:"leased"`  // they wait for a manifest
	Young   Amount    `json:"young"`   // nothing refers to them, but they are younger than the grace period
	Unused  Amount    `json:"unused"`  // nothing refers to them: these go
	Removed Amount    `json:"removed"` // by this run
	Busy    int64     `json:"busy"`    // were being pushed when they were to go; left for the next run
	Failed  int64     `json:"failed"`  // could not be removed; the log says why
	Aside   Amount    `json:"aside"`   // damaged, in quarantine, and nothing refers to them: these go too
	Swept   int       `json:"swept"`   // objects that killed processes had left
}

// Terms are those of one collection. The zero Terms collect everything that nothing refers to, up to DefaultMaxShare.
type Terms struct {
	Grace    time.Duration // blobs that were stored less than this ago stay
	MaxShare float64       // refuse if more than this share of the blobs, or of the bytes, would go; zero: DefaultMaxShare
	Force    bool          // whatever the share
	DryRun   bool          // change nothing
	// Lease, if set, is how long a blob that was pushed waits for its manifest, where that is shorter than was promised.
	Lease time.Duration
	// Gone, if set, is told of each blob that was removed, or would be, one at a time. It may take its time.
	Gone func(Blob)
}

// Collector removes the blobs of a store that nothing refers to, while others push. All fields are needed, but Checked.
// One collection runs at a time. Nothing has to be kept over a crash: what was not removed is found again.
//
// The index says which blobs nothing refers to. It is a view, and may be damaged without that it shows: before the
// first blob goes, the refs of the store are read through, and what they refer to stays. Only a blob that waits for
// its manifest is known to the index alone: if that has lost its lease, the grace period keeps it, by the time of the
// store. Memory grows with what refers to the 65,536 blobs that are looked at together, and not with the store.
type Collector struct {
	Store blobstore.Store
	Refs  blobstore.Refs
	Index *index.Index
	// Names says what the manifest of a ref names.
	Names Names
	// Checked, if set, waits until the file of the index is read through, and returns what is wrong with it.
	Checked func(context.Context) error
	// Locks are held by all who make blobs referred to.
	Locks *Locks
	// Enter is called before the index is asked, and leave when what follows from the answer is done. Meanwhile the index
	// must know all that the store holds; where it does not, Enter returns ErrNotLevel, which ends the collection.
	Enter func(context.Context) (leave func(), err error)
	// Uses says whether a blob is in use at a time, by the terms.
	Uses func(ctx context.Context, d identity.Digest, now time.Time, t Terms) (bool, error)
	// Changed is called after a blob was removed from the quarantine.
	Changed func()
	Log     *slog.Logger
	Now     func() time.Time
	// ReadOnly leaves only dry runs, and nothing for Run to do.
	ReadOnly bool

	round   int // blobs that are compared with the refs together; 0: maxRound
	running sync.Mutex
	last    atomic.Pointer[Collection]
	mu      sync.Mutex // guards totals
	totals  CollectTotals
}

// Last returns what the last collection did that ran to its end, dry runs aside; nil: none yet.
func (c *Collector) Last() *Collection { return c.last.Load() }

// CollectTotals are what collections have come to since the process began, dry runs aside.
type CollectTotals struct {
	Ended   int64  // ran to their end
	Failed  int64  // did not, though nobody stopped them: also those that refused as too much would have gone
	Removed Amount // by both
}

// Totals returns what collections have come to.
func (c *Collector) Totals() CollectTotals {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.totals
}

// tally adds a collection that ended, or was stopped by ctx, or failed.
func (c *Collector) tally(ctx context.Context, did Collection, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case did.DryRun:
		return
	case err == nil:
		c.totals.Ended++
	case ctx.Err() == nil:
		c.totals.Failed++
	}
	c.totals.Removed.Blobs += did.Removed.Blobs + did.Aside.Blobs
	c.totals.Removed.Bytes += did.Removed.Bytes + did.Aside.Bytes
}

// collectNote keeps when the last collection began, in the index.
const collectNote = "collect"

type collectState struct {
	Began time.Time `json:"began"`
}

// Collect counts first, and then removes what nothing refers to. It ends with an error at the first thing that it can't
// find out, and never removes a blob in doubt. ErrRunning, ErrTooMuch, ErrLacking, ErrNotLevel, ErrReadOnly. What it
// returns is true also with an error.
func (c *Collector) Collect(ctx context.Context, t Terms) (Collection, error) {
	if c.ReadOnly && !t.DryRun {
		return Collection{}, fmt.Errorf("collect: %w", ErrReadOnly)
	}
	if !c.running.TryLock() {
		return Collection{}, fmt.Errorf("collect: %w", ErrRunning)
	}
	defer c.running.Unlock()
	if t.MaxShare == 0 {
		t.MaxShare = DefaultMaxShare
	}
	run := &collecting{c: c, terms: t, did: Collection{DryRun: t.DryRun, Began: c.Now()}}
	err := run.run(ctx)
	run.did.Ended = c.Now()
	c.tally(ctx, run.did, err)
	if err != nil {
		return run.did, fmt.Errorf("collect: %w", err)
	}
	if !t.DryRun {
		c.last.Store(&run.did)
		err = save(ctx, c.Index, collectNote, collectState{run.did.Began})
	}
	return run.did, err
}

// Run collects at an interval until ctx ends. An index that knows of no collection, as it is new or was made anew, is
// first given one interval.
func (c *Collector) Run(ctx context.Context, every time.Duration, t Terms) {
	for !c.ReadOnly && ctx.Err() == nil {
		next, err := c.next(ctx, every)
		if err == nil {
			if err := wait(ctx, next.Sub(c.Now())); err != nil {
				return
			}
			err = c.collectAndLog(ctx, t)
		}
		if errors.Is(err, ErrRunning) { // which is as good
			c.Log.Info("no collection is begun: one is running already")
			_ = wait(ctx, min(every, retryAfter)) // the loop looks at ctx
		} else if err != nil && ctx.Err() == nil {
			pause := min(every, retryAfter)
			if errors.Is(err, ErrTooMuch) || errors.Is(err, ErrLacking) { // somebody has to look at it
				pause = every
			}
			if !errors.Is(err, ErrLacking) { // which is logged already
				c.Log.Error("blobs not collected", "error", err)
			}
			_ = wait(ctx, pause) // the loop looks at ctx
		}
	}
}

func (c *Collector) collectAndLog(ctx context.Context, t Terms) error {
	did, err := c.Collect(ctx, t)
	if err == nil {
		c.Log.Info("blobs collected", "removed", did.Removed.Blobs, "bytes", did.Removed.Bytes, "swept", did.Swept,
			"held", did.Held.Blobs, "leased", did.Leased.Blobs, "young", did.Young.Blobs, "busy", did.Busy,
			"took", did.Ended.Sub(did.Began))
	}
	return err
}

// retryAfter is how long to wait after something failed that is done at an interval.
const retryAfter = 10 * time.Minute

// next returns when the next collection is due.
func (c *Collector) next(ctx context.Context, every time.Duration) (time.Time, error) {
	var s collectState
	found, err := load(ctx, c.Index, collectNote, &s)
	if err == nil && !found {
		s.Began = c.Now()
		err = save(ctx, c.Index, collectNote, s)
	}
	return s.Began.Add(every), err
}

// collecting is one collection.
type collecting struct {
	c     *Collector
	terms Terms

	receipts map[identity.Digest]bool // blobs of uploads that can still be ended again; these stay
	goes     []blobstore.Info         // what count found that may go
	rounds   int                      // in which it did; goes is that of the last one
	aside    []blobstore.Info         // what may go of the quarantine

	telling sync.Mutex // held while Gone is called; nobody has another lock then

	mu    sync.Mutex // guards what follows
	did   Collection
	later []blobstore.Info // were in use
}

func (r *collecting) run(ctx context.Context) error {
	if r.c.Checked != nil {
		if err := r.c.Checked(ctx); err != nil {
			return err
		}
	}
	if err := r.findReceipts(ctx); err != nil {
		return err
	}
	if err := r.count(ctx); err != nil {
		return err
	}
	if err := r.findAside(ctx); err != nil {
		return err
	}
	if err := r.check(r.did.Unused); err != nil {
		return err
	}
	if !r.terms.DryRun {
		if err := r.remove(ctx); err != nil {
			return err
		}
	}
	if err := r.quarantine(ctx); err != nil || r.terms.DryRun {
		return err
	}
	if s, ok := r.c.Store.(blobstore.Sweeper); ok {
		n, err := s.Sweep(ctx, r.c.Now().Add(-r.terms.Grace))
		r.did.Swept = n
		return err
	}
	return nil
}

// check refuses to let so much go, of what was counted.
func (r *collecting) check(goes Amount) error {
	blobs, bytes := share(goes.Blobs, r.did.Found.Blobs), share(goes.Bytes, r.did.Found.Bytes)
	if r.terms.Force || max(blobs, bytes) <= r.terms.MaxShare {
		return nil
	}
	return fmt.Errorf("%w: %d of %d blobs, %d of %d bytes, and at most a share of %g may",
		ErrTooMuch, goes.Blobs, r.did.Found.Blobs, goes.Bytes, r.did.Found.Bytes, r.terms.MaxShare)
}

func share(part, whole int64) float64 {
	if part == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

// use is what keeps a blob.
type use int

const (
	held use = iota
	leased
	young
	unused
)

// findReceipts finds the blobs that uploads became of which a process that was killed could not tell anybody. New ones
// need not be looked for: while a process lives it holds what it is about to link.
func (r *collecting) findReceipts(ctx context.Context) error {
	st, ok := r.c.Store.(blobstore.Uploads)
	if !ok {
		return nil
	}
	r.receipts = map[identity.Digest]bool{}
	for u, err := range st.Uploads(ctx) {
		if err != nil {
			return err
		}
		if !u.Blob.IsZero() {
			r.receipts[u.Blob] = true
		}
	}
	return nil
}

// count fills in what there is, and compares all that may go with the refs of the store.
func (r *collecting) count(ctx context.Context) error {
	amounts := []*Amount{held: &r.did.Held, leased: &r.did.Leased, young: &r.did.Young, unused: &r.did.Unused}
	see := func(i blobstore.Info, u use) {
		r.did.Found.add(i.Size)
		amounts[u].add(i.Size)
	}
	return r.sift(ctx, see, func(unused, claimed []blobstore.Info) error {
		for _, i := range claimed {
			r.did.Unused.sub(i.Size)
			r.did.Held.add(i.Size)
		}
		for _, i := range unused {
			if r.terms.DryRun {
				r.tell(i)
			}
		}
		r.goes, r.rounds = unused, r.rounds+1
		return nil
	})
}

// use finds out what keeps a blob.
func (r *collecting) use(ctx context.Context, i blobstore.Info) (use, error) {
	leave, err := r.c.Enter(ctx)
	if err != nil {
		return held, err
	}
	defer leave()
	referred, err := r.c.Index.Referred(ctx, i.Digest)
	if err != nil || referred {
		return held, err
	}
	now := r.c.Now()
	uses, err := r.c.Uses(ctx, i.Digest, now, r.terms)
	switch {
	case err != nil || uses:
		return leased, err
	case r.receipts[i.Digest]:
		return leased, nil
	case !i.Created.Add(r.terms.Grace).Before(now):
		return young, nil
	}
	return unused, nil
}

func (r *collecting) tell(i blobstore.Info) {
	if r.terms.Gone != nil {
		r.telling.Lock()
		defer r.telling.Unlock()
		r.terms.Gone(Blob{i.Digest, i.Size, i.Created})
	}
}

// findAside finds what is set aside and nothing refers to: nobody misses it. More than a round is left for the next
// time.
func (r *collecting) findAside(ctx context.Context) error {
	q, ok := r.c.Store.(blobstore.Quarantine)
	if !ok {
		return nil
	}
	for a, err := range q.Aside(ctx) {
		if err != nil {
			return err
		}
		a.Created = a.Since // the grace period is counted from when it was missed
		u, err := r.use(ctx, a.Info)
		if err != nil {
			return err
		}
		if u == unused {
			if r.aside = append(r.aside, a.Info); len(r.aside) == cmp.Or(r.c.round, maxRound) {
				break
			}
		}
	}
	var err error
	r.aside, _, err = r.claimed(ctx, r.aside)
	return err
}

// quarantine removes what findAside has found.
func (r *collecting) quarantine(ctx context.Context) error {
	for _, i := range r.aside {
		if !r.terms.DryRun {
			if gone, err := r.oneAside(ctx, i); err != nil {
				return err
			} else if !gone {
				continue
			}
		}
		r.did.Aside.add(i.Size)
		r.tell(i)
	}
	return nil
}

func (r *collecting) oneAside(ctx context.Context, i blobstore.Info) (gone bool, err error) {
	_, err = r.unlessUsed(ctx, i.Digest, func() error {
		err := r.c.Store.Delete(ctx, i)
		if errors.Is(err, blobstore.ErrNotFound) { // it was healed
			return nil
		}
		gone = err == nil
		return err
	})
	if gone {
		r.c.Log.Info("damaged blob collected", "digest", i.Digest.String(), "size", i.Size)
		r.c.Changed()
	}
	return gone, err
}

// remove removes what nothing refers to, some at a time, and comes back once to what was in use.
func (r *collecting) remove(ctx context.Context) error {
	err := error(nil)
	if r.rounds == 1 {
		err = r.these(ctx, r.goes)
	} else {
		err = r.sift(ctx, func(blobstore.Info, use) {}, func(unused, _ []blobstore.Info) error {
			return r.these(ctx, unused)
		})
	}
	if err != nil {
		return err
	}
	later := r.later
	r.later, r.did.Busy = nil, r.did.Busy-int64(len(later))
	return r.these(ctx, later)
}

// these removes blobs, some at a time, until one fails.
func (r *collecting) these(ctx context.Context, blobs []blobstore.Info) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	work := make(chan blobstore.Info)
	var wg sync.WaitGroup
	for range min(removers, len(blobs)) {
		wg.Go(func() {
			for i := range work {
				gone, err := r.one(ctx, i)
				if gone {
					r.tell(i)
				}
				if err != nil {
					cancel(err)
				}
			}
		})
	}
	for _, i := range blobs {
		select {
		case work <- i:
			continue
		case <-ctx.Done():
		}
		break
	}
	close(work)
	wg.Wait()
	return context.Cause(ctx)
}

// one removes a blob.
func (r *collecting) one(ctx context.Context, i blobstore.Info) (gone bool, err error) {
	busy, err := r.unlessUsed(ctx, i.Digest, func() error {
		if err := r.reserve(i); err != nil {
			return err
		}
		err := r.c.Store.Delete(ctx, i)
		if gone = err == nil; !gone {
			return r.kept(ctx, i, err)
		}
		r.c.Log.Info("blob collected", "digest", i.Digest.String(), "size", i.Size, "created", i.Created)
		return nil
	})
	if busy {
		r.busy(i)
	}
	return gone, err
}

// unlessUsed removes a blob, unless somebody is making it referred to or has made it so since it was found.
func (r *collecting) unlessUsed(ctx context.Context, d identity.Digest, remove func() error) (busy bool, err error) {
	release, ok := r.c.Locks.take(d)
	if !ok {
		return true, nil
	}
	defer release()
	leave, err := r.c.Enter(ctx)
	if err != nil {
		return false, err
	}
	defer leave()
	if uses, err := r.c.Uses(ctx, d, r.c.Now(), r.terms); err != nil || uses {
		return false, err
	}
	return false, remove()
}

// busy leaves a blob for later.
func (r *collecting) busy(i blobstore.Info) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.did.Busy++; len(r.later) < maxBusy {
		r.later = append(r.later, i)
	}
}

// reserve counts a blob as removed, unless that would be too much.
func (r *collecting) reserve(i blobstore.Info) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	after := r.did.Removed
	after.add(i.Size)
	if err := r.check(after); err != nil {
		return err
	}
	r.did.Removed = after
	return nil
}

// kept takes back a reservation. A blob that can't be removed does not keep others from it, up to a point.
func (r *collecting) kept(ctx context.Context, i blobstore.Info, err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.did.Removed.sub(i.Size)
	switch {
	case errors.Is(err, blobstore.ErrNotFound): // gone, or another copy
		return nil
	case ctx.Err() != nil, errors.Is(err, blobstore.ErrUnavailable), r.did.Failed >= maxFailed:
		return err
	}
	r.did.Failed++
	r.c.Log.Error("blob not collected", "digest", i.Digest.String(), "error", err)
	return nil
}
