// Package registry is a registry for model weights: an http.Handler over a blob store and an index. It speaks the OCI
// distribution API under /v2, and under /v1 it finds base models, and what was made from them, by the bytes of their
// shards.
//
// Every operation is a method that takes the caller; a handler only parses, calls one and writes. The store is the
// truth: a change is a ref that the store holds durably before the index hears of it, and the index is brought up to
// the store at every start.
package registry

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/answers"
	"github.com/kiln-registry/kiln-registry/registry/classify"
	"github.com/kiln-registry/kiln-registry/registry/prune"
	"github.com/kiln-registry/kiln-registry/registry/redirect"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

const (
	// uploadTTL is how long an upload may stay open, and uploadQuiet how long one that has run out may still be written
	// to before it is dropped.
	uploadTTL   = 7 * 24 * time.Hour
	uploadQuiet = time.Hour
	// defaultLease is how long an uploaded or mounted blob waits in its repository for a manifest that refers to it: as
	// long as an upload may take, since the first blob of a push waits for the last one.
	defaultLease = uploadTTL
	// leaseRenewed is how old a lease is at most when a HEAD leaves it as it is.
	leaseRenewed = time.Hour
	// defaultIdle is how long a request may make no progress.
	defaultIdle = time.Minute
)

// Config is what a registry is made of. The fields up to Log are needed.
type Config struct {
	Store       blobstore.Store
	Refs        blobstore.Refs
	Uploads     blobstore.Uploads
	Index       *index.Index
	Access      *access.Gate
	Log         *slog.Logger
	Version     string
	TempDir     string           // folder of the temporary files with which an index is made anew; empty: the system's
	Lease       time.Duration    // how long a blob that was pushed waits for its manifest; zero: a week
	VerifyReads bool             // hash blobs that are sent whole, and break off before the end of one that is damaged
	Clock       func() time.Time // nil: time.Now
	IdleTimeout time.Duration    // how long a request or an answer may make no progress; zero: one minute
	ReadOnly    bool             // refuse every change; what is there is served
	// Immutable are the tags that keep naming what they were first put for; neither they nor that can be deleted.
	Immutable access.TagPatterns
	Observe   func(Served) // told of each request when it has been answered; nil: nobody is
	Metrics   http.Handler // what /metrics answers, to anybody; nil: it is no route
	// Checked, if set, waits until what the index is kept in is read through, and returns what is wrong with it. Nothing is
	// collected before.
	Checked func(context.Context) error
	// Redirect says who is sent on to the store for the bytes of blobs; nil: nobody. The store must be a blobstore.Linker.
	Redirect *redirect.Rules
}

// Registry is a registry. It is safe for concurrent use. It owns none of its parts: whoever made them closes them,
// after the last request has ended.
type Registry struct {
	store   blobstore.Store
	refs    blobstore.Refs
	uploads blobstore.Uploads
	ix      *index.Index
	tempDir string
	access  *access.Gate
	log     *slog.Logger
	version string
	now     func() time.Time
	idle    time.Duration
	router  http.Handler
	memory  *memory

	readOnly bool
	observe  func(Served)
	metrics  http.Handler
	traffic  traffic

	immutable access.TagPatterns
	repos     stripes // by repository: held for reading by puts of manifests
	tags      stripes // by repository and tag: held by puts of an immutable tag
	orders    orders  // by repository and manifest: held by its changes, and for reading by puts of what refers to it

	state    atomic.Int32
	indexed  atomic.Bool  // the index was brought level with the store and is not being made anew
	resets   atomic.Int64 // times that the index was emptied to be made anew
	writes   sync.RWMutex // held for writing while the index is rebuilt
	kept     watermark
	replayed atomic.Int64   // refs that the last replay brought into the index
	handles  sync.Map       // by id: the *handle of each upload that this process has used and that has not ended
	heads    classify.Heads // of blobs that were uploaded of late

	leftOut    atomic.Pointer[string] // names a ref of the store that the index could not take, unless empty
	lease      time.Duration
	leaseNoted atomic.Int64 // resets + 1, when the index was told how long leases are
	verify     bool
	locks      upkeep.Locks // held for a digest while something is made to refer to it
	collector  *upkeep.Collector
	scrubber   *upkeep.Scrubber
	pruner     *prune.Pruner
	desk       *answers.Desk
	aside      aside
	links      *redirect.Links
}

// The states of a registry.
const (
	starting int32 = iota // the index is not level with the store yet: nothing is served but health
	ready
	stopping // not ready for more, but what comes is served
)

// New returns a registry that answers 503 until Replay has brought its index level with the store.
func New(c Config) (*Registry, error) {
	if c.Store == nil || c.Refs == nil || c.Uploads == nil || c.Index == nil || c.Access == nil || c.Log == nil {
		return nil, errors.New("registry: config is not complete")
	}
	r := &Registry{
		store: c.Store, refs: c.Refs, uploads: c.Uploads, ix: c.Index, access: c.Access, log: c.Log, tempDir: c.TempDir,
		version: c.Version, now: c.Clock, idle: c.IdleTimeout,
		readOnly: c.ReadOnly, observe: c.Observe, metrics: c.Metrics, immutable: c.Immutable,
	}
	if r.now == nil {
		r.now = time.Now
	}
	if r.idle <= 0 {
		r.idle = defaultIdle
	}
	r.memory = newMemory(r.idle)
	r.verify = c.VerifyReads
	if r.lease = c.Lease; r.lease <= 0 {
		r.lease = defaultLease
	}
	r.collector = &upkeep.Collector{
		Store: c.Store, Refs: c.Refs, Index: c.Index, Names: namesOf, Checked: c.Checked, Locks: &r.locks,
		Enter: r.enter, Uses: r.uses, Changed: r.aside.changed, Log: c.Log, Now: r.now, ReadOnly: c.ReadOnly,
	}
	r.aside.at = -1
	r.scrubber = upkeep.NewScrubber(c.Store, c.Index, c.Log, r.now, r.aside.changed)
	r.scrubber.ReadOnly, r.scrubber.Refs, r.scrubber.Names, r.scrubber.Still = c.ReadOnly, c.Refs, namesOf, r.still
	r.pruner = newPruner(r)
	var err error
	if r.links, err = redirect.New(c.Redirect, c.Store, c.Log, r.now); err != nil {
		return nil, err
	}
	r.desk = &answers.Desk{Index: c.Index, Blobs: held{c.Store}, Admit: r.memory.admit}
	r.router = newRouter(r)
	if was := c.Index.Renewed(); was != 0 {
		c.Log.Info("the index was of an earlier format: it is made anew from the store", "format", was)
	}
	return r, nil
}

// ServeHTTP implements http.Handler.
func (r *Registry) ServeHTTP(w http.ResponseWriter, req *http.Request) { r.router.ServeHTTP(w, req) }

// Stop makes the registry say that it is not ready, so that no more requests are sent to it. It goes on to serve those
// that come.
func (r *Registry) Stop() { r.state.Store(stopping) }

// Health describes the registry.
func (r *Registry) Health() api.Health {
	state := r.state.Load()
	records := r.scrubber.Pass().Records == ""
	lacking, lackErr := upkeep.Lacking(context.Background(), r.ix)
	agrees := lacking == nil && lackErr == nil
	h := api.Health{
		Status: "ok", Version: r.version, Role: "registry", Backend: "none",
		Checks: []api.Check{
			{Name: "index_level_with_store", Pass: r.indexed.Load()},
			{Name: "accepting_requests", Pass: state == ready},
			{Name: "records_readable", Pass: records},
			{Name: "index_agrees_with_records", Pass: agrees},
		},
	}
	n, err := r.aside.count(r.store)
	h.Quarantined = n
	lost, lostErr := r.lost(context.Background())
	for _, l := range lost {
		switch l.Verdict {
		case upkeep.Missing:
			h.Missing++
		case upkeep.Unreadable:
			h.Unreadable++
		case upkeep.Damaged:
			h.Damaged++
		}
	}
	h.Checks = append(h.Checks, api.Check{Name: "no_blob_in_quarantine", Pass: n+h.Damaged == 0 && err == nil},
		api.Check{Name: "no_blob_missing", Pass: h.Missing == 0 && lostErr == nil},
		api.Check{Name: "no_blob_unreadable", Pass: h.Unreadable == 0 && lostErr == nil})
	switch {
	case state != ready:
		h.Status = "maintenance"
	case !records || !agrees || n > 0 || len(lost) > 0 || err != nil || lostErr != nil:
		h.Status = "degraded"
	}
	return h
}

// namesOf says what a manifest names that was put before.
func namesOf(ref blobstore.Ref) (refers, lists []identity.Digest, err error) {
	m, err := classify.ParseTaken(ref.MediaType, ref.Manifest)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: manifest %s of %s was taken and does not parse: %w", blobstore.ErrRefsDamaged,
			ref.Digest, ref.Repo, err)
	}
	return m.Refers(), m.Lists(), nil
}

// lost returns the blobs that were found lost and are still missed.
func (r *Registry) lost(ctx context.Context) ([]upkeep.Lost, error) {
	if r.writes.TryRLock() { // else the index is being brought level: nobody knows yet
		var err error
		if r.level() == nil {
			err = r.scrubber.ForgetUnused(ctx)
		}
		r.writes.RUnlock()
		if err != nil {
			return nil, err
		}
	}
	return r.scrubber.Lost(ctx)
}

// Purge drops what has run out: uploads that nobody went on with, and the leases of blobs for which no manifest came.
// It returns how many uploads those were. A read-only registry drops nothing.
func (r *Registry) Purge(ctx context.Context) (uploads int, err error) {
	if r.readOnly {
		return 0, nil
	}
	for u, err := range r.uploads.Uploads(ctx) {
		if err != nil {
			return uploads, fmt.Errorf("list uploads: %w", err)
		}
		known, err := r.ix.Upload(ctx, u.ID)
		if err != nil && !errors.Is(err, index.ErrNotFound) {
			return uploads, err
		}
		now := r.now()
		if err == nil && known.Expires.After(now) || now.Sub(u.Touched) < uploadQuiet {
			continue
		}
		if err := r.drop(ctx, u.ID); err != nil {
			r.log.Warn("upload not dropped", "id", u.ID, "error", err)
			continue
		}
		uploads++
	}
	return uploads, r.purgeIndex(ctx)
}

// purgeIndex drops the rows of uploads that the store has lost and of leases that have ended.
func (r *Registry) purgeIndex(ctx context.Context) error {
	for u, err := range r.ix.ExpiredUploads(ctx, r.now()) {
		if err != nil {
			return err
		}
		if _, err := r.store.Resume(ctx, u.ID); !errors.Is(err, blobstore.ErrUploadUnknown) {
			continue
		}
		if err := r.forget(ctx, u.ID); err != nil {
			return err
		}
	}
	r.writes.RLock()
	defer r.writes.RUnlock()
	_, err := r.ix.Purge(ctx, r.now())
	return err
}

// OpenUploads counts the uploads that were begun and have not ended.
func (r *Registry) OpenUploads(ctx context.Context) (n int, err error) {
	for _, err := range r.ix.ExpiredUploads(ctx, r.now().Add(2*uploadTTL)) { // none stays longer
		if err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

// Positions returns up to which position of the store changes are known, and up to which the index has all of them.
// They are the same while nothing is put.
func (r *Registry) Positions(ctx context.Context) (store, index uint64, err error) {
	index, err = r.ix.Checkpoint(ctx)
	return max(uint64(r.kept.last()), index), index, err
}

// Collector returns what collects the blobs that nothing refers to. It may be used once Replay has ended.
func (r *Registry) Collector() *upkeep.Collector { return r.collector }

// Scrubber returns what reads the blobs again.
func (r *Registry) Scrubber() *upkeep.Scrubber { return r.scrubber }

// Pruner returns what drops old manifests and abandoned uploads when somebody asks for it.
func (r *Registry) Pruner() *prune.Pruner { return r.pruner }

// errBehind: a change was perhaps kept by the store, and not by the index.
var errBehind = fmt.Errorf("%w: the store may hold changes that it lacks", upkeep.ErrNotLevel)

var errNotLevel = api.Errorf(api.CodeUnavailable, "the index is being brought level with the store; try again soon")

// decide has do read the index and make the change that follows from it, in one piece: the index is level with the
// store meanwhile and is not made anew. hold keeps others from what do reads and changes. Nobody who calls decide may
// have writes, or the locks of repositories and tags; those of digests and orders come before. ErrUnavailable while the
// index is not level.
func (r *Registry) decide(ctx context.Context, hold func() (release func()), do func() error) error {
	for tries := 0; ; tries++ {
		err := r.decideNow(hold, do)
		if !errors.Is(err, errBehind) {
			return err
		}
		if tries > 0 {
			return errNotLevel
		}
		if err := r.Replay(context.WithoutCancel(ctx)); err != nil {
			return err
		}
	}
}

func (r *Registry) decideNow(hold func() (release func()), do func() error) error {
	if !r.indexed.Load() {
		return errNotLevel // without waiting for the end of a rebuild
	}
	r.writes.RLock()
	defer r.writes.RUnlock()
	defer hold()()
	switch {
	case !r.indexed.Load():
		return errNotLevel
	case r.kept.behind():
		return errBehind
	}
	return do()
}

// enter keeps the index as it is, and level with the store, until leave: what it does not know then, nothing refers to.
func (r *Registry) enter(ctx context.Context) (leave func(), err error) {
	for tries := 0; ; tries++ {
		r.writes.RLock()
		if err = r.level(); err == nil {
			return r.writes.RUnlock, nil
		}
		r.writes.RUnlock()
		if !errors.Is(err, errBehind) || tries > 0 {
			return nil, err
		}
		if err := r.Replay(ctx); err != nil {
			return nil, err
		}
	}
}

// still runs do while no change is made, and the index has heard of all that were.
func (r *Registry) still(ctx context.Context, do func() error) error {
	r.writes.Lock()
	defer r.writes.Unlock()
	if !r.indexed.Load() {
		return fmt.Errorf("%w: it is being made so", upkeep.ErrNotLevel)
	}
	if r.kept.behind() {
		if err := r.replay(ctx); err != nil {
			return err
		}
	}
	return do()
}

// catchUp has the index hear of changes that it did not take before, so that what is asked for next is compared with all
// that the store holds. ErrUnavailable while the index is being made.
func (r *Registry) catchUp(ctx context.Context) error {
	if !r.indexed.Load() {
		return errNotLevel
	}
	if !r.kept.behind() {
		return nil
	}
	return r.Replay(context.WithoutCancel(ctx))
}

// level says whether the index knows all that the store holds, for those who hold writes.
func (r *Registry) level() error {
	left := r.leftOut.Load()
	switch {
	case !r.indexed.Load():
		return fmt.Errorf("%w: it is being made so", upkeep.ErrNotLevel)
	case left != nil && *left != "":
		return fmt.Errorf("%w: it lacks %s; the log of the start says why", upkeep.ErrNotLevel, *left)
	case r.kept.behind():
		return errBehind
	}
	return nil
}

// aside counts the blobs in quarantine. The count changes only by what this process does: it owns the store.
type aside struct {
	changes atomic.Int64 // times that it may have changed
	mu      sync.Mutex
	at      int64 // changes, when n was counted last; -1: never
	n       int
	some    []identity.Digest // the first maxAside of them
	again   time.Time         // when to try again after a failure
}

// maxAside is how many blobs in quarantine are kept in mind.
const maxAside = 4096

// The store is asked for at most asidePatience, as health is, and not again for asidePause after it failed.
const (
	asidePatience = 2 * time.Second
	asidePause    = 10 * time.Second
)

// changed says that a blob may have been set aside or healed.
func (a *aside) changed() { a.changes.Add(1) }

// arrived says that the store was given a blob, which may have been in quarantine. It does not wait for the store.
func (a *aside) arrived(d identity.Digest) {
	if !a.mu.TryLock() { // they are being counted
		a.changed()
		return
	}
	defer a.mu.Unlock()
	if a.n > len(a.some) || slices.Contains(a.some, d) {
		a.changed()
	}
}

// count returns how many there are, or, with the error, how many there were when that could be found out last.
func (a *aside) count(st blobstore.Store) (int, error) {
	q, ok := st.(blobstore.Quarantine)
	a.mu.Lock()
	defer a.mu.Unlock()
	changes := a.changes.Load()
	switch {
	case !ok || changes == a.at:
		return a.n, nil
	case time.Now().Before(a.again):
		return a.n, errAside
	}
	ctx, cancel := context.WithTimeout(context.Background(), asidePatience)
	defer cancel()
	n, some := 0, []identity.Digest{}
	for i, err := range q.Aside(ctx) {
		if err != nil {
			a.again = time.Now().Add(asidePause)
			return a.n, err
		}
		if n++; len(some) < maxAside {
			some = append(some, i.Digest)
		}
	}
	a.at, a.n, a.some = changes, n, some
	return n, nil
}

// list returns the first of them, as they were when that could be found out last. Nobody may change it.
func (a *aside) list(st blobstore.Store) []identity.Digest {
	_, _ = a.count(st) // health says when it fails
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.some
}

var errAside = errors.New("the quarantine could not be read a moment ago")

// watermark knows up to which position of the store every ref is in the index. Refs are kept by many goroutines at a
// time and reach the index in another order, so the position of the last one that did is not it.
type watermark struct {
	mu       sync.Mutex
	returned blobstore.Position          // highest that the store gave out
	pending  map[pass]blobstore.Position // for each ref on its way, one that it comes after
	pinned   bool                        // a ref may be kept that the index lacks: never go past floor
	floor    blobstore.Position
}

type pass = *struct{ _ byte }

// begin announces a ref that is about to be kept.
func (w *watermark) begin() pass {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.pending == nil {
		w.pending = map[pass]blobstore.Position{}
	}
	p := new(struct{ _ byte })
	w.pending[p] = w.returned
	return p
}

// reach says that the ref was kept at a position, and returns up to where the index is level once it has this ref.
func (w *watermark) reach(p pass, at blobstore.Position) blobstore.Position {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.returned = max(w.returned, at)
	level := w.returned
	for other, after := range w.pending {
		if other != p {
			level = min(level, after)
		}
	}
	if w.pinned {
		level = min(level, w.floor)
	}
	return level
}

// last returns the highest position that is known.
func (w *watermark) last() blobstore.Position {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.returned
}

// end says that the ref is in the index, or that nobody knows whether it is.
func (w *watermark) end(p pass, applied bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	after := w.pending[p]
	delete(w.pending, p)
	if !applied {
		if w.pinned {
			after = min(after, w.floor)
		}
		w.pinned, w.floor = true, after
	}
}

// behind says whether the store may hold a ref that the index lacks, and that is not on its way there.
func (w *watermark) behind() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pinned
}

// start forgets everything: all refs up to a position are in the index.
func (w *watermark) start(at blobstore.Position) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.returned, w.pending, w.pinned, w.floor = at, nil, false, 0
}

// Served describes a request that was answered.
type Served struct {
	Route   string // the path of its row of the route table, with names in braces; empty: there is none
	Method  string // as the client sent it
	Status  int
	In, Out int64 // bytes of the bodies
	Took    time.Duration
	Err     error // why it was refused, or the answer broke off; nil: neither
}

// Traffic is what went over the connections since the registry was made, requests that run included.
type Traffic struct {
	Received, Sent int64 // bytes of bodies
	Running        int64 // requests that are being answered
}

// Traffic returns the traffic so far.
func (r *Registry) Traffic() Traffic {
	return Traffic{r.traffic.received.Load(), r.traffic.sent.Load(), r.traffic.running.Load()}
}

// traffic counts as the bytes pass.
type traffic struct{ received, sent, running atomic.Int64 }

// requestID returns the id that a client gave its request, if it can stand in a log, else a new one.
func requestID(given string) string {
	strange := func(c rune) bool {
		return (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && c != '-' && c != '_' && c != '.'
	}
	if given == "" || len(given) > 64 || strings.ContainsFunc(given, strange) {
		return rand.Text()
	}
	return given
}
