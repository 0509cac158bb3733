package upkeep

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/index"
)

const (
	// DefaultScrubRate is how many bytes a second a scrub reads: about 20 TB in a week.
	DefaultScrubRate = 32 << 20
	// DefaultScrubInterval is how often every blob is read.
	DefaultScrubInterval = 7 * 24 * time.Hour
	// scrubPiece is how much is read at a time.
	scrubPiece = 256 << 10
	// saveEvery is how often a pass keeps where it is.
	saveEvery = 10 * time.Second
	// maxSuspects is how many blobs wait to be read out of turn. More are left to the next pass.
	maxSuspects = 256
)

// Verdict is what a scrub found out about a blob.
type Verdict string

// The verdicts.
const (
	Good       Verdict = "good"
	Damaged    Verdict = "damaged"    // it was read twice and both times was not what its digest says, now or before
	Unsteady   Verdict = "unsteady"   // it was read twice and was right the second time: blame memory or disk
	Unreadable Verdict = "unreadable" // the store failed to read it; that is not taken for damage
	Missing    Verdict = "missing"    // manifests refer to it, and the store has it neither to show nor in quarantine
	Gone       Verdict = "gone"       // it was removed meanwhile, or is not there
)

// Finding is what a scrub found out about one blob.
type Finding struct {
	Digest  identity.Digest `json:"digest"`
	Size    int64           `json:"size"`
	Verdict Verdict         `json:"verdict"`
	Why     string          `json:"why,omitempty"`   // unless it is good
	Aside   bool            `json:"aside,omitempty"` // it was set aside
	// Midstates: it had none, or wrong ones, and those that were found while it was read are kept now.
	Midstates bool `json:"midstates,omitempty"`
	// Before: it was set aside before, and was not read again. Size is 0.
	Before bool `json:"before,omitempty"`
	// Manifests are some of those that refer to a blob that is missing, or was set aside before.
	Manifests []index.Referrer `json:"manifests,omitempty"`
}

// Scrubbing is what a scrub has found so far.
type Scrubbing struct {
	Began      time.Time       `json:"began"`
	Ended      time.Time       `json:"ended,omitzero"` // zero: it runs, or was interrupted and goes on from At
	At         identity.Digest `json:"at,omitzero"`    // the last blob that was read
	Read       Amount          `json:"read"`
	Damaged    int64           `json:"damaged"`
	Unsteady   int64           `json:"unsteady"`
	Unreadable int64           `json:"unreadable"`
	Missing    int64           `json:"missing"`
	Midstates  int64           `json:"midstates"` // blobs that were given some, as they had none or wrong ones
	FromRecords
}

func (s *Scrubbing) add(f Finding) {
	switch f.Verdict {
	case Gone:
		return
	case Missing:
		s.Missing++
		return
	case Damaged:
		if s.Damaged++; f.Before {
			return
		}
	case Unsteady:
		s.Unsteady++
	case Unreadable:
		s.Unreadable++
	}
	if f.Midstates {
		s.Midstates++
	}
	s.Read.add(f.Size)
}

// Scrubber reads the blobs of a store again, sets aside those that are no longer what their digests say, and finds those
// that are missing. It is made by NewScrubber.
type Scrubber struct {
	// ReadOnly leaves blobs that are damaged where they are: they are only reported.
	ReadOnly bool
	// Refs, if set, are read through at the end of each pass, and the index is compared with them by Names and Still.
	Refs  blobstore.Refs
	Names Names
	Still Still

	store blobstore.Store
	ix    *index.Index
	log   *slog.Logger
	now   func() time.Time
	// changed is called after a blob was set aside.
	changed func()

	asked    sync.Mutex // held by a scrub that somebody asked for
	suspects chan identity.Digest
	lost     lost
	mu       sync.Mutex               // guards what follows
	state    Scrubbing                // of the pass that is under way, or was the last
	totals   Scrubbing                // of all passes, orders and suspects, without times
	waiting  map[identity.Digest]bool // in suspects
}

// NewScrubber returns the scrubber of a store. It keeps where it is in ix. changed, which may be nil, is called after
// each blob that it has set aside.
func NewScrubber(
	st blobstore.Store, ix *index.Index, log *slog.Logger, now func() time.Time, changed func(),
) *Scrubber {
	if changed == nil {
		changed = func() {}
	}
	return &Scrubber{
		store: st, ix: ix, log: log, now: now, changed: changed, suspects: make(chan identity.Digest, maxSuspects),
		waiting: map[identity.Digest]bool{},
	}
}

// Pass returns how far the pass is that is under way, or what the last one found.
func (s *Scrubber) Pass() Scrubbing {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}

// Totals returns what was found since the process began, by whichever way; it has no times.
func (s *Scrubber) Totals() Scrubbing {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.totals
}

// tally adds a finding to the totals.
func (s *Scrubber) tally(f Finding) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.totals.add(f)
}

// Suspect has Run look at a blob soon. It never waits.
func (s *Scrubber) Suspect(d identity.Digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting[d] {
		return
	}
	select {
	case s.suspects <- d:
		s.waiting[d] = true
	default:
	}
}

// Order is a scrub that somebody asks for.
type Order struct {
	Rate    int64             // bytes a second; zero: as fast as it goes
	Digests []identity.Digest // these blobs; none: all
	// Found, if set, is told of each blob that is not good, and of each of Digests.
	Found func(Finding)
}

// Scrub reads blobs now, beside a pass that may be under way. It goes on after what it finds. One of all blobs counts
// as a pass, unless one is under way. ErrRunning if another Scrub runs.
func (s *Scrubber) Scrub(ctx context.Context, o Order) (did Scrubbing, err error) {
	if !s.asked.TryLock() {
		return did, fmt.Errorf("scrub: %w", ErrRunning)
	}
	defer s.asked.Unlock()
	did.Began = s.now()
	p := newPace(o.Rate)
	see := func(f Finding) {
		did.add(f)
		s.tally(f)
		if o.Found != nil && (f.Verdict != Good || len(o.Digests) > 0) {
			o.Found(f)
		}
	}
	if len(o.Digests) > 0 {
		err = s.these(ctx, o.Digests, p, see)
	} else {
		err = s.all(ctx, p, see)
		if err == nil {
			did.FromRecords, err = s.records(ctx, p)
		}
	}
	did.Ended = s.now()
	if err == nil && len(o.Digests) == 0 {
		err = s.passed(ctx, did)
	}
	if err != nil {
		err = fmt.Errorf("scrub: %w", err)
	}
	return did, err
}

// passed keeps a scrub of all blobs as the last pass, unless one is under way.
func (s *Scrubber) passed(ctx context.Context, did Scrubbing) error {
	s.mu.Lock()
	underWay := !s.state.Began.IsZero() && s.state.Ended.IsZero()
	if !underWay {
		s.state = did
	}
	s.mu.Unlock()
	if underWay || s.ReadOnly {
		return nil
	}
	return save(context.WithoutCancel(ctx), s.ix, scrubNote, did)
}

func (s *Scrubber) these(ctx context.Context, ds []identity.Digest, p *pace, see func(Finding)) error {
	for _, d := range ds {
		f, err := s.digest(ctx, d, p)
		if err != nil {
			return err
		}
		see(f)
	}
	return nil
}

func (s *Scrubber) all(ctx context.Context, p *pace, see func(Finding)) error {
	for b, err := range s.due(ctx, identity.Digest{}) {
		if err != nil {
			return err
		}
		f, err := s.look(ctx, b, p)
		if err != nil {
			return err
		}
		see(f)
	}
	return nil
}

// digest looks at the blob of a digest.
func (s *Scrubber) digest(ctx context.Context, d identity.Digest, p *pace) (Finding, error) {
	i, err := s.store.Stat(ctx, d)
	switch {
	case errors.Is(err, blobstore.ErrCut):
		return s.look(ctx, due{i, true}, p)
	case errors.Is(err, blobstore.ErrNotFound):
		return s.absent(ctx, d)
	case err != nil:
		return s.settle(ctx, Finding{Digest: d, Verdict: Unreadable, Why: err.Error()}), unreachable(err)
	}
	return s.look(ctx, due{i, true}, p)
}

// unreachable returns an error for which others would fail too.
func unreachable(err error) error {
	if errors.Is(err, blobstore.ErrUnavailable) {
		return err
	}
	return nil
}

// blob reads a blob, and sets it aside if it is damaged. The error is that of ctx, or says that the store can't be
// reached.
func (s *Scrubber) blob(ctx context.Context, i blobstore.Info, p *pace) (Finding, error) {
	f := Finding{Digest: i.Digest, Size: i.Size}
	states := s.segments(ctx, i)
	inParts := s.inParts(ctx, states, i, p)
	if inParts == nil {
		f.Verdict = Good
		return f, nil
	}
	r := newReading(i)
	found := s.read(ctx, r, p)
	if found.Verdict == Good && errors.Is(inParts, lanes.ErrMismatch) && r.same(states) {
		found = outcome{Verdict: Unsteady, Why: "right when it was read again; at first " + inParts.Error()}
	}
	if found.Verdict == Damaged {
		first := found
		r = newReading(i)
		r.locate(states)
		if found = s.read(ctx, r, p); found.Verdict == Good {
			found.Verdict, found.Why = Unsteady, "right when it was read again; at first "+first.Why
		}
	}
	if err := cmp.Or(ctx.Err(), unreachable(found.err)); err != nil {
		return f, err
	}
	f.Verdict, f.Why = found.Verdict, found.Why
	switch f.Verdict {
	case Good:
		f.Midstates = s.keepSegments(ctx, r)
		return f, nil
	case Gone:
		return f, nil
	case Damaged:
		return s.setAside(ctx, i, f), nil
	}
	s.log.Error("blob "+string(f.Verdict), "digest", f.Digest.String(), "why", f.Why)
	return f, nil
}

// outcome is what one reading of a blob says.
type outcome struct {
	Verdict
	Why string
	err error // of Unreadable
}

// read reads a blob once. Its bytes alone decide.
func (s *Scrubber) read(ctx context.Context, r *reading, p *pace) outcome {
	err := s.readAll(ctx, r, p)
	switch {
	case err == nil && r.sum() == r.i.Digest:
		return outcome{Verdict: Good}
	case err == nil:
		return outcome{Verdict: Damaged, Why: r.damage()}
	case errors.Is(err, blobstore.ErrDamaged):
		return outcome{Verdict: Damaged, Why: err.Error()}
	case errors.Is(err, blobstore.ErrNotFound):
		return s.vanished(ctx, r.i, err)
	}
	return outcome{Unreadable, err.Error(), err}
}

// vanished tells a blob that was removed from one that the store shows and has no bytes for.
func (s *Scrubber) vanished(ctx context.Context, i blobstore.Info, err error) outcome {
	now, statErr := s.store.Stat(ctx, i.Digest)
	switch {
	case errors.Is(statErr, blobstore.ErrNotFound), statErr == nil && now.Generation != i.Generation:
		return outcome{Verdict: Gone, Why: err.Error()}
	case statErr != nil:
		return outcome{Unreadable, statErr.Error(), statErr}
	}
	return outcome{Verdict: Damaged, Why: "the store has no bytes for it: " + err.Error()}
}

// readAll reads a blob to its end.
func (s *Scrubber) readAll(ctx context.Context, r *reading, p *pace) error {
	body, err := s.store.Open(ctx, r.i, 0, -1)
	if err != nil {
		return err
	}
	defer body.Close()
	piece := make([]byte, scrubPiece)
	for {
		n, err := body.Read(piece)
		r.write(piece[:n])
		if err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if err := p.read(ctx, n); err != nil {
			return err
		}
	}
}

// setAside puts a damaged blob where nobody is served it. What can't be set aside is found again by the next pass.
func (s *Scrubber) setAside(ctx context.Context, i blobstore.Info, f Finding) Finding {
	log := s.log.With("digest", i.Digest.String())
	q, ok := s.store.(blobstore.Quarantine)
	ok = ok && !s.ReadOnly
	var err error
	if ok {
		err = q.SetAside(ctx, i, f.Why)
	}
	if errors.Is(err, blobstore.ErrIntact) {
		log.Warn("blob not damaged: what the store had noted of its size was wrong, and is mended", "was", f.Why)
		f.Verdict, f.Why = Good, ""
		return f
	}
	log.Error("blob damaged", "size", i.Size, "why", f.Why)
	switch {
	case !ok, errors.Is(err, blobstore.ErrNotFound): // by somebody else, or removed
	case err != nil:
		log.Error("damaged blob not set aside", "error", err)
	default:
		f.Aside = true
		s.changed()
	}
	return f
}

// scrubNote keeps in the index how far the pass is.
const scrubNote = "scrub"

// Run reads every blob once in an interval, in the order of digests, at a rate of bytes a second, and suspects at once
// and as fast as it goes, until ctx ends. An interval of zero: suspects only. A pass that was interrupted by the end of
// the process goes on where it was.
func (s *Scrubber) Run(ctx context.Context, every time.Duration, rate int64) {
	var both sync.WaitGroup
	both.Go(func() { s.watch(ctx) })
	defer both.Wait()
	if every <= 0 {
		return
	}
	if err := s.resume(ctx); err != nil && ctx.Err() == nil {
		s.log.Error("scrub begins anew", "error", err)
	}
	for p := newPace(rate); ctx.Err() == nil; {
		err := s.step(ctx, every, p)
		if err != nil && ctx.Err() == nil {
			s.log.Error("scrub goes on later", "error", err)
			_ = wait(ctx, retryAfter) // the loop looks at ctx
		}
	}
}

// watch reads suspects. What can't be read now is left to the pass.
func (s *Scrubber) watch(ctx context.Context) {
	for p := newPace(0); ; {
		select {
		case d := <-s.suspects:
			s.mu.Lock()
			delete(s.waiting, d)
			s.mu.Unlock()
			f, err := s.digest(ctx, d, p)
			if err == nil {
				s.tally(f)
			} else if ctx.Err() == nil {
				s.log.Error("suspect blob not read", "digest", d.String(), "error", err)
			}
		case <-ctx.Done():
			return
		}
	}
}

func (s *Scrubber) resume(ctx context.Context) error {
	var was Scrubbing
	_, err := load(ctx, s.ix, scrubNote, &was)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state = was
	return err
}

// step reads some blobs of the pass that is under way, or waits until the next one is due and begins it.
func (s *Scrubber) step(ctx context.Context, every time.Duration, p *pace) error {
	state := s.Pass()
	if state.Began.IsZero() || !state.Ended.IsZero() {
		if err := wait(ctx, state.Began.Add(every).Sub(s.now())); err != nil {
			return err
		}
		s.mu.Lock()
		s.state = Scrubbing{Began: s.now()}
		s.mu.Unlock()
	}
	return s.leg(ctx, p)
}

// leg goes on with the pass for some seconds and keeps where it is. A listing is not held open for longer, as a store
// may forget it.
func (s *Scrubber) leg(ctx context.Context, p *pace) error {
	began := s.now()
	whole := true
	var failed error
	for b, err := range s.due(ctx, s.Pass().At) {
		if err == nil {
			err = s.next(ctx, b, p)
		}
		if failed = err; err != nil {
			break
		}
		if s.now().Sub(began) >= saveEvery {
			whole = false
			break
		}
	}
	var found FromRecords
	if failed == nil && whole {
		found, failed = s.records(ctx, p)
	}
	s.mu.Lock()
	if failed == nil && whole {
		s.state.FromRecords, s.state.Ended = found, s.now()
	}
	state := s.state
	s.mu.Unlock()
	if !state.Ended.IsZero() {
		s.log.Info("scrub ended", "blobs", state.Read.Blobs, "bytes", state.Read.Bytes, "damaged", state.Damaged,
			"unreadable", state.Unreadable, "missing", state.Missing, "took", state.Ended.Sub(state.Began))
	}
	return errors.Join(failed, save(context.WithoutCancel(ctx), s.ix, scrubNote, state))
}

// next looks at the next blob of the pass.
func (s *Scrubber) next(ctx context.Context, b due, p *pace) error {
	f, err := s.look(ctx, b, p)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.totals.add(f)
	s.state.add(f)
	s.state.At = b.Digest
	return nil
}
