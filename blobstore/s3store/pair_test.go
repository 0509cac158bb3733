package s3store

import (
	"bytes"
	"fmt"
	"reflect"
	"sync"
	"testing"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

// pair opens one store at two endpoints that know nothing of each other.
func pair(t *testing.T) (s *site, at [2]*Store) {
	server := tests3.NewPair(t)
	t.Setenv("AWS_ACCESS_KEY_ID", server.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", server.SecretKey)
	c := storeAt(t, server.Endpoint(), server.Bucket(t))
	s = &site{TB: t, ctx: t.Context(), direct: c, rounds: 12}
	for i, endpoint := range server.Endpoints() {
		c.Endpoint = endpoint
		at[i] = openAt(t, c, Options{})
	}
	return s, at
}

// TestPair: two processes write to one store over two endpoints.
func TestPair(t *testing.T) {
	s, at := pair(t)
	testPairOfRefs(s, at)
	testPairOfPushers(s, at)
	testPairOfOneUpload(s, at)
	s.clean()
}

// testPairOfRefs: all refs of both are kept, and both see the same order, which is that of each.
func testPairOfRefs(s *site, at [2]*Store) {
	const each, together = 60, 4
	var mu sync.Mutex
	positions := map[blobstore.Position]string{}
	var wg sync.WaitGroup
	for i, st := range at {
		for k := range together {
			wg.Go(func() {
				for seq := range each {
					r := ref(seq)
					r.Repo = fmt.Sprint(i, k)
					p, err := st.Put(s.ctx, r)
					if err != nil {
						s.Error(err)
					}
					mu.Lock()
					positions[p] = fmt.Sprint(r.Repo, seq)
					mu.Unlock()
				}
			})
		}
	}
	wg.Wait()
	if len(positions) != 2*each*together {
		s.Errorf("%d positions, want %d", len(positions), 2*each*together)
	}
	first, second := refs(s, at[0]), refs(s, at[1])
	if len(first) != 2*each*together || !reflect.DeepEqual(first, second) {
		s.Fatalf("%d refs at one endpoint, %d at the other, want %d", len(first), len(second), 2*each*together)
	}
	next := map[string]uint64{}
	for _, r := range first {
		if r.Seq != next[r.Repo] {
			s.Errorf("%s has %d where %d was put", r.Repo, r.Seq, next[r.Repo])
		}
		next[r.Repo]++
	}
	for r, err := range at[1].Since(s.ctx, 0) {
		s.must(err)
		if want := fmt.Sprint(r.Repo, r.Seq); positions[r.After] != want {
			s.Errorf("%s is at %d, where Put said %q", want, r.After, positions[r.After])
		}
	}
}

// testPairOfPushers: of one blob that comes over both endpoints one copy is kept, and each sees what the other has.
func testPairOfPushers(s *site, at [2]*Store) {
	for round := range 24 {
		b := noise(uint64(round), 3000)
		if round < 2 {
			b = noise(uint64(round), partOf+3000)
		}
		var infos [2]blobstore.Info
		var wg sync.WaitGroup
		for i, st := range at {
			wg.Go(func() {
				var err error
				if infos[i], err = s.push(st, b, pushing{named: round%3 > 0}); err != nil {
					s.Error(err)
				}
			})
		}
		wg.Wait()
		if infos[0].Generation != infos[1].Generation {
			s.Fatalf("two copies: %+v and %+v", infos[0], infos[1])
		}
		s.holds(at[0], b)
		s.holds(at[1], b)
		if round%4 == 0 {
			s.must(at[round%2].Delete(s.ctx, infos[0]))
			_, err := at[1-round%2].Stat(s.ctx, infos[0].Digest)
			s.want("stat of what the other deleted", err, blobstore.ErrNotFound)
		}
	}
	if n := s.whole(); n != 18 {
		s.Errorf("%d blobs, want 18", n)
	}
}

// testPairOfOneUpload: of two that go on with one upload at a time at most one does, and nothing wrong comes of it.
func testPairOfOneUpload(s *site, at [2]*Store) {
	for round := range uint64(12) {
		b := noise(100+round, 4000)
		d := identity.Sum(b)
		u, err := at[0].Create(s.ctx, d, -1)
		s.must(err)
		_, err = u.Append(s.ctx, 0, bytes.NewReader(b[:1000]))
		s.must(err)
		var wg sync.WaitGroup
		done := 0
		var mu sync.Mutex
		for _, st := range at {
			wg.Go(func() {
				u, err := st.Resume(s.ctx, u.ID())
				if err == nil {
					_, err = u.Finish(s.ctx, 1000, bytes.NewReader(b[1000:]), d)
				}
				if err == nil {
					mu.Lock()
					done++
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		if done == 0 {
			_, err := s.push(at[round%2], b, pushing{})
			s.must(err)
		}
		s.holds(at[0], b)
	}
	s.whole()
}
