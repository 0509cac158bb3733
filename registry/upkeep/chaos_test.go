package upkeep_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/testchaos"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// epochs is a clock that stands still while a push runs that began long ago, so that a lease of some epochs is always
// long enough, and never longer than it must be.
type epochs struct {
	mu     sync.Mutex
	begin  time.Time
	now    int
	active map[int]int // pushes by the epoch in which they began
	rounds int         // of the collector
	round  chan struct{}
}

const epoch = time.Hour

func (e *epochs) clock() time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.begin.Add(time.Duration(e.now) * epoch)
}

func (e *epochs) push() (end func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	at := e.now
	e.active[at]++
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.active[at]--
	}
}

// collected ends a round of the collector, and the epoch if no push runs any more that began before it.
func (e *epochs) collected() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.active[e.now-1] == 0 {
		delete(e.active, e.now-1)
		e.now++
	}
	e.rounds++
	close(e.round)
	e.round = make(chan struct{})
}

// pause waits for some rounds of the collector.
func (e *epochs) pause(ctx context.Context) {
	for range 3 {
		e.mu.Lock()
		round := e.round
		e.mu.Unlock()
		select {
		case <-round:
		case <-ctx.Done():
			return
		}
	}
}

// TestPushersAgainstCollector: while models are pushed, pushed again, mounted and deleted, a collector runs all the
// time that gives no grace. Nothing that was acknowledged may be lost, and nothing may stay behind. CHAOS_S is how many
// seconds it runs.
func TestPushersAgainstCollector(t *testing.T) { chaos(t, "collector", nil) }

// TestPushersAgainstCollectorOnS3 is the same with the bytes in a bucket.
func TestPushersAgainstCollectorOnS3(t *testing.T) {
	server := tests3.New(t)
	t.Setenv("AWS_ACCESS_KEY_ID", server.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", server.SecretKey)
	at := "s3://" + server.Bucket(t) + "/store?endpoint=http://" + server.Endpoint() + "&region=" + server.Region
	c, err := s3store.Parse(at)
	if err == nil {
		err = s3store.Init(t.Context(), c)
	}
	if err != nil {
		t.Fatal(err)
	}
	chaos(t, "s3", func() (blobstore.Engine, error) { return s3store.Open(context.Background(), c, s3store.Options{}) })
}

func chaos(t *testing.T, name string, open func() (blobstore.Engine, error)) {
	seconds := 3
	if s := os.Getenv("CHAOS_S"); s != "" {
		var err error
		if seconds, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	e := &epochs{begin: time.Now().Add(epoch), active: map[int]int{}, round: make(chan struct{})}
	r := newRig(t, func(r *rig) { r.clock, r.lease, r.open = e.clock, 4*epoch, open })
	load := &testchaos.Load{
		Seed: uint64(time.Now().UnixNano()), Pushers: 8, Deleters: 3, Pullers: 2, Firm: true, Push: e.push, Pause: e.pause,
	}
	t.Logf("seed %d", load.Seed)
	ctx, cancel := context.WithTimeout(t.Context(), time.Duration(seconds)*time.Second)
	defer cancel()
	removed, scrubs := int64(0), 0
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			removed += r.round(t)
			e.collected()
		}
	})
	wg.Go(func() {
		for ctx.Err() == nil {
			did, err := r.reg.Scrubber().Scrub(ctx, upkeep.Order{Rate: 1 << 20})
			if err != nil && ctx.Err() == nil || did.Damaged > 0 || did.Missing > 0 || did.Records+did.Lacking != "" {
				t.Errorf("scrub: %v, %+v", err, did)
			}
			scrubs++
		}
	})
	load.Run(ctx, r.http.URL)
	wg.Wait()

	used := load.Check(r.http.URL)
	r.settle(t, e)
	r.holds(used)
	load.Check(r.http.URL)
	fmt.Printf("%s: rounds %d, scrubs %d, epochs %d, collected %d, acknowledged %d, refused %d, unanswered %d, "+
		"pulled %d, lost %d\n",
		name, e.rounds, scrubs, e.now, removed, load.Acknowledged.Load(), load.Refused.Load(), load.Unanswered.Load(),
		load.Pulled.Load(), len(load.Lost()))
	load.DeleteAll(r.http.URL)
	r.settle(t, e)
	r.holds(nil)
	for i, what := range load.Lost() {
		if t.Error(what); i == 20 {
			t.Fatalf("and %d more", len(load.Lost())-i-1)
		}
	}
	if load.Unanswered.Load() > 0 || len(used) == 0 {
		t.Errorf("unanswered %d, in use at the end %d", load.Unanswered.Load(), len(used))
	}
}

// round is one round of a collector that gives no grace.
func (r *rig) round(t *testing.T) (removed int64) {
	did, err := r.reg.Collector().Collect(context.Background(), upkeep.Terms{Force: true})
	if err != nil || did.Failed > 0 {
		t.Errorf("collect: %v, %d blobs not removed", err, did.Failed)
	}
	if _, err := r.ix.Purge(context.Background(), r.clock()); err != nil {
		t.Error(err)
	}
	return did.Removed.Blobs
}

// settle collects until all leases have ended.
func (r *rig) settle(t *testing.T, e *epochs) {
	for range 6 {
		e.collected()
		r.round(t)
	}
}

// holds checks that the store holds these blobs and no others.
func (r *rig) holds(used map[identity.Digest]bool) {
	r.t.Helper()
	stored := r.stored()
	want, got := slices.Collect(maps.Keys(used)), slices.Collect(maps.Keys(stored))
	slices.SortFunc(want, identity.Digest.Compare)
	slices.SortFunc(got, identity.Digest.Compare)
	if !slices.Equal(want, got) {
		r.t.Errorf("the store holds %d blobs, and %d are referred to", len(got), len(want))
	}
}
