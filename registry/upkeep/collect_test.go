package upkeep_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

const week = 7 * 24 * time.Hour

// kept says which of some blobs the store holds.
func (r *rig) kept(ds ...identity.Digest) (kept []bool) {
	stored := r.stored()
	for _, d := range ds {
		_, ok := stored[d]
		kept = append(kept, ok)
	}
	return kept
}

// TestWhatIsCollected: a blob goes when no manifest of any repository refers to it, its lease has ended and it is old
// enough, and not before.
func TestWhatIsCollected(t *testing.T) {
	h := new(hands)
	r := newRig(t, func(r *rig) { r.clock = h.clock })
	m := r.image("a", []byte("held"))
	r.put(201, "a", "v1", m)
	r.put(400, "b", "v1", m) // b does not hold the blobs
	held, orphan := identity.Sum([]byte("held")), r.blob("a", []byte("never referred to"))
	want := func(when string, t upkeep.Terms, leased, young, unused int64, kept string) {
		r.t.Helper()
		t.Force = true
		did := r.collect(t)
		got := fmt.Sprint(r.kept(held, orphan))
		if did.Leased.Blobs != leased || did.Young.Blobs != young || did.Unused.Blobs != unused || got != kept {
			r.t.Errorf("%s: kept %s, %+v", when, got, did)
		}
		if did.Found.Blobs != did.Held.Blobs+did.Leased.Blobs+did.Young.Blobs+did.Unused.Blobs ||
			!did.DryRun && did.Removed != did.Unused {
			r.t.Errorf("%s: numbers don't add up: %+v", when, did)
		}
	}
	want("while it is leased", upkeep.Terms{}, 1, 0, 0, "[true true]")
	h.forward(week)
	want("in the grace period", upkeep.Terms{Grace: week + time.Hour}, 0, 1, 0, "[true true]")
	want("dry run", upkeep.Terms{DryRun: true}, 0, 0, 1, "[true true]")
	want("after it", upkeep.Terms{Grace: week}, 0, 0, 1, "[true false]")
	want("again", upkeep.Terms{}, 0, 0, 0, "[true false]")
	r.do(202, "DELETE", "/v2/a/manifests/v1", nil)
	want("without a tag", upkeep.Terms{}, 0, 0, 0, "[true false]")
	r.do(202, "DELETE", "/v2/a/manifests/"+identity.Sum(m).String(), nil)
	want("deleted", upkeep.Terms{}, 0, 0, 2, "[false false]")
	if !strings.Contains(r.log.String(), "blob collected\" digest="+orphan.String()) {
		t.Errorf("the log does not name what went:\n%s", r.log)
	}
}

// TestGone: each blob that goes is told, with its size, by a dry run as by the run itself.
func TestGone(t *testing.T) {
	h := new(hands)
	r := newRig(t, func(r *rig) { r.clock = h.clock })
	for i := range 20 {
		r.blob("a", bytes.Repeat([]byte("x"), i+1))
	}
	h.forward(week)
	for _, dry := range []bool{true, false} {
		var blobs, size int64
		did := r.collect(upkeep.Terms{DryRun: dry, Force: true, Gone: func(b upkeep.Blob) {
			blobs, size = blobs+1, size+b.Size
		}})
		if want := (upkeep.Amount{Blobs: 20, Bytes: 210}); did.Unused != want || blobs != 20 || size != 210 {
			t.Errorf("dry %v: told %d of %d bytes: %+v", dry, blobs, size, did)
		}
		if last := r.reg.Collector().Last(); (last == nil) != dry {
			t.Errorf("dry %v: last is %+v", dry, last)
		}
	}
	if n := len(r.stored()); n != 0 {
		t.Errorf("%d blobs are left", n)
	}
}

// TestTooMuch: a collection that would take more than a share of the blobs, or of the bytes, takes nothing.
func TestTooMuch(t *testing.T) {
	h := new(hands)
	r := newRig(t, func(r *rig) { r.clock = h.clock })
	r.put(201, "a", "v1", r.image("a", []byte("small")))
	r.blob("a", make([]byte, 100_000))
	h.forward(week)
	c := r.reg.Collector()
	for _, terms := range []upkeep.Terms{{}, {DryRun: true}, {MaxShare: 0.99}} {
		did, err := c.Collect(t.Context(), terms)
		if !errors.Is(err, upkeep.ErrTooMuch) || did.Removed.Blobs > 0 || did.Unused.Bytes != 100_000 {
			t.Errorf("%+v: %v, %+v", terms, err, did)
		}
	}
	if len(r.stored()) != 3 {
		t.Error("something was taken")
	}
	if did := r.collect(upkeep.Terms{MaxShare: 1}); did.Removed.Blobs != 1 {
		t.Errorf("%+v", did)
	}
}

// faults is a store that fails where it is told to.
type faults struct {
	blobstore.Store
	list, delete error
	listed       func()
}

func (f *faults) List(ctx context.Context, after identity.Digest) iter.Seq2[blobstore.Info, error] {
	return func(yield func(blobstore.Info, error) bool) {
		n := 0
		for i, err := range f.Store.List(ctx, after) {
			if n++; n == 3 && f.list != nil {
				yield(blobstore.Info{}, f.list)
				return
			}
			if !yield(i, err) {
				return
			}
		}
		if f.listed != nil {
			f.listed()
		}
	}
}

func (f *faults) Delete(ctx context.Context, i blobstore.Info) error {
	if f.delete != nil {
		return f.delete
	}
	return f.Store.Delete(ctx, i)
}

// TestInDoubt: what can't be found out ends a collection before anything goes.
func TestInDoubt(t *testing.T) {
	h, f := new(hands), new(faults)
	r := newRig(t, func(r *rig) {
		r.clock = h.clock
		r.wrap = func(st blobstore.Store) blobstore.Store { f.Store = st; return f }
	})
	for i := range 10 {
		r.blob("a", fmt.Append(nil, i))
	}
	h.forward(week)
	c := r.reg.Collector()
	f.list = errors.New("the disk is loose")
	if did, err := c.Collect(t.Context(), upkeep.Terms{Force: true}); !errors.Is(err, f.list) || did.Removed.Blobs > 0 {
		t.Errorf("%v, %+v", err, did)
	}
	f.list = nil

	f.delete = blobstore.ErrUnavailable
	if did, err := c.Collect(t.Context(), upkeep.Terms{Force: true}); !errors.Is(err, f.delete) || did.Removed.Blobs > 0 {
		t.Errorf("%v, %+v", err, did)
	}
	f.delete = errors.New("this file can't be removed")
	did, err := c.Collect(t.Context(), upkeep.Terms{Force: true})
	if err != nil || did.Failed != 10 || did.Removed.Blobs > 0 {
		t.Errorf("%v, %+v", err, did)
	}
	f.delete = nil

	ctx, cancel := context.WithCancel(t.Context())
	f.listed = cancel
	if _, err := c.Collect(ctx, upkeep.Terms{Force: true}); !errors.Is(err, context.Canceled) || len(r.stored()) != 10 {
		t.Errorf("%v, %d blobs are left", err, len(r.stored()))
	}
	f.listed = nil
	if did := r.collect(upkeep.Terms{Force: true}); did.Removed.Blobs != 10 {
		t.Errorf("%+v", did)
	}
}

// TestOneAtATime: a second collection is refused while one runs.
func TestOneAtATime(t *testing.T) {
	f := new(faults)
	r := newRig(t, func(r *rig) {
		r.wrap = func(st blobstore.Store) blobstore.Store { f.Store = st; return f }
	})
	second := error(nil)
	f.listed = func() {
		f.listed = nil
		_, second = r.reg.Collector().Collect(t.Context(), upkeep.Terms{})
	}
	r.collect(upkeep.Terms{})
	if !errors.Is(second, upkeep.ErrRunning) {
		t.Error(second)
	}
}

// TestWhileReindexing: while the index is made anew, nothing is in it, and nothing is collected.
func TestWhileReindexing(t *testing.T) {
	h := new(hands)
	r := newRig(t, func(r *rig) { r.clock = h.clock })
	for i := range 10 {
		r.put(201, "a", fmt.Sprint(i), r.image("a", fmt.Append(nil, i)))
	}
	h.forward(week)
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	wg.Go(func() {
		defer cancel()
		for range 50 {
			if err := r.reg.Reindex(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
	for ctx.Err() == nil {
		did, err := r.reg.Collector().Collect(t.Context(), upkeep.Terms{Force: true})
		if did.Removed.Blobs > 0 {
			t.Errorf("%v, %+v", err, did)
		}
	}
	wg.Wait()
	if n := len(r.stored()); n != 11 {
		t.Errorf("%d of 11 blobs are left", n)
	}
}

// flaky is an index engine whose updates fail where it is told so.
type flaky struct {
	index.KV
	fail func(fn func(index.Txn) error) error
}

func (f *flaky) Update(ctx context.Context, fn func(index.Txn) error) error {
	if f.fail != nil {
		return f.fail(fn)
	}
	return f.KV.Update(ctx, fn)
}

// TestKeptAndNotIndexed: a manifest that the store kept, and the index did not, holds its blobs: it would come back
// with the next start.
func TestKeptAndNotIndexed(t *testing.T) {
	h, f := new(hands), new(flaky)
	r := newRig(t, func(r *rig) {
		r.clock = h.clock
		r.engine = func(kv index.KV) index.KV { f.KV = kv; return f }
	})
	r.put(201, "a", "v0", r.image("a", []byte("zero"))) // which numbers the repository's changes
	m := r.image("a", []byte("one"))
	f.fail = func(func(index.Txn) error) error { return errors.New("the index is loose") }
	r.put(500, "a", "v1", m)
	h.forward(week)
	if did, err := r.reg.Collector().Collect(t.Context(), upkeep.Terms{Force: true}); err == nil || did.Found.Blobs > 0 {
		t.Errorf("collected by an index that lacks a change: %+v", did)
	}
	f.fail = nil
	r.collect(upkeep.Terms{Force: true})
	if got := fmt.Sprint(r.kept(identity.Sum([]byte("one")))); got != "[true]" {
		t.Error("the blob of a manifest is gone that the store holds")
	}
	if got := r.do(200, "GET", "/v2/a/manifests/v1", nil); !bytes.Equal(got, m) {
		t.Errorf("got %s", got)
	}
}

// sweeper is a store that is swept.
type sweeper struct {
	blobstore.Store
	before time.Time
}

func (s *sweeper) Sweep(_ context.Context, before time.Time) (int, error) {
	s.before = before
	return 7, nil
}

// TestSweep: a store that can be swept is, up to the grace period, and not by a dry run.
func TestSweep(t *testing.T) {
	now := time.Now().Add(time.Hour)
	s := new(sweeper)
	r := newRig(t, func(r *rig) {
		r.clock = func() time.Time { return now }
		r.wrap = func(st blobstore.Store) blobstore.Store { s.Store = st; return s }
	})
	if did := r.collect(upkeep.Terms{DryRun: true}); did.Swept != 0 || !s.before.IsZero() {
		t.Errorf("%+v", did)
	}
	if did := r.collect(upkeep.Terms{Grace: time.Minute}); did.Swept != 7 || !s.before.Equal(now.Add(-time.Minute)) {
		t.Errorf("%+v, before %v", did, s.before)
	}
}

// TestRunCollects: a collection is due an interval after the last one, and for an index that knows of none an interval
// after it was first looked at.
func TestRunCollects(t *testing.T) {
	h := new(hands)
	r := newRig(t, func(r *rig) { r.clock = h.clock })
	d := r.blob("a", []byte("orphan"))
	r.blob("a", []byte("config"))
	h.forward(week)
	run := func(until func() bool) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			r.reg.Collector().Run(ctx, time.Hour, upkeep.Terms{Force: true})
		}()
		for !until() {
			if _, err := r.ix.Note(ctx, "collect"); err != nil {
				t.Error(err)
				break
			}
		}
		cancel()
		<-done
	}
	noted := func() bool { b, _ := r.ix.Note(t.Context(), "collect"); return b != nil }
	run(noted)
	if got := fmt.Sprint(r.kept(d)); got != "[true]" || r.reg.Collector().Last() != nil {
		t.Fatal("collected by an index that is new")
	}
	h.forward(time.Hour)
	run(func() bool { return r.reg.Collector().Last() != nil })
	if got := fmt.Sprint(r.kept(d)); got != "[false]" {
		t.Fatal("not collected when it was due")
	}
	if err := r.ix.Apply(t.Context(), index.Note{Name: "collect", Value: []byte("not JSON")}); err != nil {
		t.Fatal(err)
	}
	run(func() bool { b, _ := r.ix.Note(t.Context(), "collect"); return string(b) != "not JSON" })
}

// said gets what is logged.
type said chan string

func (s said) Write(b []byte) (int, error) {
	s <- string(b)
	return len(b), nil
}

// TestRunMeetsAnother: that a collection is due while somebody has one run is no failure.
func TestRunMeetsAnother(t *testing.T) {
	h := new(hands)
	r := newRig(t, func(r *rig) { r.clock = h.clock })
	r.put(201, "a", "v1", r.image("a", []byte("content")))
	r.collect(upkeep.Terms{})
	h.forward(week) // the next one is due
	c, lines := r.reg.Collector(), make(said, 99)
	c.Log = slog.New(slog.NewTextHandler(lines, nil))
	enter, once, line := c.Enter, sync.Once{}, ""
	c.Enter = func(ctx context.Context) (func(), error) {
		once.Do(func() {
			ctx, cancel := context.WithCancel(ctx)
			done := make(chan struct{})
			go func() {
				defer close(done)
				c.Run(ctx, time.Hour, upkeep.Terms{})
			}()
			line = <-lines
			cancel()
			<-done
		})
		return enter(ctx)
	}
	r.collect(upkeep.Terms{})
	if !strings.Contains(line, "level=INFO") || !strings.Contains(line, "running already") || c.Totals().Failed != 0 {
		t.Errorf("%s%+v", line, c.Totals())
	}
}

// TestLeftOut: as long as the store holds a change that the index could not take, it is not known what may go.
func TestLeftOut(t *testing.T) {
	r := newRig(t, nil)
	m := r.image("a", []byte("one"))
	r.put(201, "a", "v1", m)
	tag := blobstore.Ref{
		Repo: "a\x01", Name: "v1", Seq: 1, Digest: identity.Sum(m), MediaType: manifestType, Time: time.Now(),
	}
	if _, err := r.store.Put(t.Context(), tag); err != nil {
		t.Fatal(err)
	}
	for range 2 { // also when the log is not read again from there
		r.stop()
		r.start()
		r.put(201, "a", "v3", m)
		did, err := r.reg.Collector().Collect(t.Context(), upkeep.Terms{})
		if err == nil || !strings.Contains(err.Error(), `not level with the store: it lacks "v1" of "a\x01"`) {
			t.Errorf("%v, %+v", err, did)
		}
	}
	if err := r.reg.Reindex(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := r.reg.Collector().Collect(t.Context(), upkeep.Terms{}); err == nil {
		t.Error("an index that was made anew knows nothing of it")
	}
}

// TestHeldAtTheLastMoment: a reference that comes after a blob was found unused, and before it is removed, keeps it.
func TestHeldAtTheLastMoment(t *testing.T) {
	h := new(hands)
	r := newRig(t, func(r *rig) { r.clock = h.clock })
	d := r.blob("a", []byte("content"))
	h.forward(week)
	asked := 0
	c := &upkeep.Collector{
		Store: r.store, Refs: r.store, Index: r.ix, Locks: new(upkeep.Locks), Changed: func() {}, Now: h.clock,
		Log: slog.New(slog.DiscardHandler),
		Uses: func(ctx context.Context, d identity.Digest, now time.Time, _ upkeep.Terms) (bool, error) {
			return r.ix.Uses(ctx, d, now)
		},
	}
	c.Enter = func(ctx context.Context) (func(), error) {
		if asked++; asked < 2 { // when it is found
			return func() {}, nil
		}
		link := index.LinkBlob{Repo: "b", Digest: d, Size: 7, Until: h.clock().Add(time.Hour)}
		return func() {}, r.ix.Apply(ctx, link)
	}
	did, err := c.Collect(t.Context(), upkeep.Terms{Force: true})
	if err != nil || asked != 2 || did.Unused.Blobs != 1 || did.Removed.Blobs != 0 || len(r.stored()) != 1 {
		t.Errorf("asked %d times, %v, %+v", asked, err, did)
	}
}
