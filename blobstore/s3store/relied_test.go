package s3store

import (
	"bytes"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

// upload sends a blob without asking first whether it is there.
func (s *site) upload(st *Store, b []byte) blobstore.Info {
	s.Helper()
	u, err := st.Create(s.ctx, identity.Sum(b), int64(len(b)))
	s.must(err)
	i, err := u.Finish(s.ctx, 0, bytes.NewReader(b), identity.Sum(b))
	s.must(err)
	return i
}

// TestReliedOn: an owner that is deleting a blob loses the store, and the new owner is pushed the same bytes. The first
// one then removes nothing that the second has acknowledged, wherever it was held up.
func TestReliedOn(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		where tests3.Match
		err   error
	}{
		"before it looks":  {markerGet, blobstore.ErrUnavailable},
		"before it hides":  {markerPut, blobstore.ErrInUse},
		"before it cleans": {bytesGone, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			first, b := s.open(owning()), noise(1, 3000)
			i, err := s.push(first, b, pushing{})
			s.must(err)
			gate := tests3.NewGate()
			s.proxy.On(tests3.First(1, c.where), tests3.Stall(gate))
			result := make(chan error, 1)
			go func() { result <- first.Delete(s.ctx, i) }()
			<-gate.Reached()
			second := s.takeOver()
			s.upload(second, b)
			first.owner.mu.Lock()
			first.owner.renewed = time.Now().Add(-2 * time.Hour) // as it must be by now
			first.owner.mu.Unlock()
			gate.Open()
			s.want("delete", <-result, c.err)
			s.holds(second, b)
			if c.err == blobstore.ErrInUse {
				<-first.Lost()
			}
		})
	}
}

// TestHealedMeanwhile: while a damaged copy is being set aside, or after that failed, the right bytes are pushed.
func TestHealedMeanwhile(t *testing.T) {
	t.Parallel()
	for name, fails := range map[string]bool{"meanwhile": false, "after a failure": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			st, b := s.open(Options{Tries: 2}), noise(1, 3000)
			i, err := s.push(st, b, pushing{})
			s.must(err)
			gate := tests3.NewGate()
			rule := s.proxy.On(tests3.First(1, markerPut), tests3.Stall(gate))
			if fails {
				rule.Off()
				rule = s.proxy.On(markerPut, tests3.Reset())
			}
			result := make(chan error, 1)
			go func() { result <- st.SetAside(s.ctx, i, "why") }()
			if fails {
				s.want("set aside", <-result, blobstore.ErrUnavailable)
				rule.Off()
			} else {
				<-gate.Reached()
			}
			if healed := s.upload(st, b); healed.Generation == i.Generation {
				t.Error("the damaged copy is relied on")
			}
			gate.Open()
			if !fails {
				s.want("set aside", <-result, blobstore.ErrNotFound)
			}
			s.holds(st, b)
			s.clean()
			s.holds(st, b)
			for a, err := range st.Aside(s.ctx) {
				t.Errorf("set aside: %+v, %v", a, err)
			}
		})
	}
}

// TestSilentServer: a server that takes requests and answers none is not available, soon, and not waited for again and
// again.
func TestSilentServer(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	i, err := s.push(s.past(), noise(1, 3000), pushing{})
	s.must(err)
	o := Options{}
	o.limits.Patience = time.Second
	st := s.open(o)
	gate := tests3.NewGate()
	defer gate.Open()
	s.proxy.On(tests3.Any, tests3.Stall(gate))
	_, err = st.Stat(s.ctx, i.Digest)
	s.want("stat", err, blobstore.ErrUnavailable)
	_, err = st.Open(s.ctx, i, 0, -1)
	s.want("open", err, blobstore.ErrUnavailable)
	_, err = st.Create(s.ctx, i.Digest, 5)
	s.want("create", err, blobstore.ErrUnavailable)
	_, err = st.Put(s.ctx, ref(1))
	s.want("put refs", err, blobstore.ErrUnavailable)
	for _, err = range st.List(s.ctx, i.Digest) {
	}
	s.want("list", err, blobstore.ErrUnavailable)
}
