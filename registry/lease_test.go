package registry_test

import (
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// leased is what a dry run of a collection finds to be waiting for a manifest.
func (s *server) leased(t upkeep.Terms) int64 {
	s.t.Helper()
	t.DryRun, t.MaxShare = true, 1
	did, err := s.reg.Collector().Collect(s.t.Context(), t)
	if err != nil {
		s.t.Fatal(err)
	}
	return did.Leased.Blobs
}

// A collection may give blobs that were pushed a shorter time than was promised, but not while their push may run.
func TestShorterLease(t *testing.T) {
	s := newServer(t)
	now := time.Now()
	s.clock = func() time.Time { return now }
	s.restart(nil)
	hour := time.Hour
	s.blob("a", []byte("1"))
	now = now.Add(30 * hour)
	s.blob("b", []byte("2"))
	s.begin("b")
	now = now.Add(10 * hour)
	for _, c := range []struct {
		terms upkeep.Terms
		want  int64
	}{
		{upkeep.Terms{}, 2}, {upkeep.Terms{Lease: 41 * hour}, 2}, {upkeep.Terms{Lease: 39 * hour}, 1},
		{upkeep.Terms{Lease: 5 * hour}, 1}, // an upload to b is open
		{upkeep.Terms{Lease: 5 * hour, Force: true}, 0}, {upkeep.Terms{Lease: 11 * hour, Force: true}, 1},
		{upkeep.Terms{Lease: 1000 * hour}, 2},
	} {
		if got := s.leased(c.terms); got != c.want {
			t.Errorf("%+v: %d wait, want %d", c.terms, got, c.want)
		}
	}
	did, err := s.reg.Collector().Collect(t.Context(), upkeep.Terms{Lease: 39 * hour, MaxShare: 1})
	if err != nil || did.Removed.Blobs != 1 || did.Leased.Blobs != 1 {
		t.Errorf("%+v, %v", did, err)
	}
	s.want(404, "GET", "/v2/a/blobs/"+identity.Sum([]byte("1")).String(), nil)
	s.want(200, "GET", "/v2/b/blobs/"+identity.Sum([]byte("2")).String(), nil)
}

// A blob is never taken for older than it is, whatever the lease was before.
func TestShorterLeaseAfterAChange(t *testing.T) {
	s := newServer(t)
	now := time.Now()
	s.clock = func() time.Time { return now }
	lease := func(d time.Duration) func(*registry.Config) { return func(c *registry.Config) { c.Lease = d } }
	hour := time.Hour
	s.restart(lease(24 * hour))
	s.blob("a", []byte("1"))
	s.restart(lease(240 * hour))
	now = now.Add(hour)
	if got := s.leased(upkeep.Terms{Lease: 2 * hour}); got != 1 {
		t.Error("a blob of an hour, of shorter leases:", got)
	}
	s.blob("a", []byte("2"))
	now = now.Add(hour)
	if got := s.leased(upkeep.Terms{Lease: 90 * time.Minute}); got != 1 { // the second one
		t.Error("leases of both lengths:", got)
	}
	now = now.Add(24 * hour)
	s.restart(lease(240 * hour))
	s.blob("a", []byte("3"))
	now = now.Add(hour)
	if got := s.leased(upkeep.Terms{Lease: 12 * hour}); got != 1 { // the third one
		t.Error("only longer leases are left:", got)
	}
	s.restart(lease(24 * hour))
	s.blob("a", []byte("4"))
	if got := s.leased(upkeep.Terms{Lease: 12 * hour}); got != 3 {
		t.Error("shorter ones again:", got)
	}
}
