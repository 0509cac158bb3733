package s3store

import (
	"bytes"
	"crypto/rand"
	"sync"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store/bucket"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

// TestSweep: everything that a process can leave when it is killed goes, and nothing else.
func TestSweep(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	st := s.open(Options{})
	shown := [][]byte{noise(1, 900), noise(2, partOf+900)}
	for i, b := range shown {
		_, err := s.push(st, b, pushing{named: i == 0})
		s.must(err)
	}
	open, err := st.Create(s.ctx, identity.Digest{}, -1)
	s.must(err)
	_, err = open.Append(s.ctx, 0, bytes.NewReader(noise(3, partOf+500)))
	s.must(err)

	orphans := leaveOrphans(s, st)
	n, err := st.Sweep(s.ctx, time.Now().Add(-time.Hour))
	if err != nil || n != 0 {
		t.Errorf("a sweep of what is older than an hour removed %d, %v", n, err)
	}
	n, err = st.Sweep(s.ctx, time.Now().Add(time.Hour))
	if err != nil || n != orphans {
		t.Errorf("sweep removed %d, %v, want %d", n, err, orphans)
	}
	n, err = st.Sweep(s.ctx, time.Now().Add(time.Hour))
	if err != nil || n != 0 {
		t.Errorf("the second sweep removed %d, %v", n, err)
	}
	for _, b := range shown {
		s.holds(st, b)
	}
	b := append(noise(3, partOf+500), "more"...)
	_, err = open.Finish(s.ctx, open.Size(), bytes.NewReader([]byte("more")), identity.Sum(b))
	s.must(err)
	s.holds(st, b)
	s.clean()
}

// leaveOrphans puts what nothing refers to, and returns how many Sweep counts.
func leaveOrphans(s *site, st *Store) (orphans int) {
	gone := identity.Sum([]byte("gone"))
	stale, other := rand.Text(), identity.Sum(noise(1, 900))
	for key, body := range map[string][]byte{
		st.blobKey(gone, rand.Text()):                     []byte("12345"), // a copy that was never shown
		st.blobKey(other, rand.Text()):                    []byte("12345"), // one beside the one that is shown
		st.blobKey(identity.Digest{2}, unnamedMark+stale): nil,             // one whose bytes are elsewhere
		st.b.Key(unnamedName, stale):                      []byte("12345"), // which count with it
		st.b.Key(tailsName, rand.Text(), rand.Text()):     []byte("12345"), // a tail of no upload
		st.blobKey(identity.Digest{3}, rand.Text()):       []byte("12345"), // one that was hidden
		st.blobKey(identity.Digest{3}, liveName):          []byte(rand.Text()),
	} {
		_, err := st.b.Put(s.ctx, key, body, bucket.Condition{})
		s.must(err)
	}
	for _, key := range []string{st.blobKey(gone, rand.Text()), st.b.Key(unnamedName, rand.Text())} {
		_, err := st.b.Begin(s.ctx, key) // of which the answer was lost
		s.must(err)
	}
	// An upload that ended by half: its state could not be removed.
	u, err := st.Create(s.ctx, identity.Digest{}, -1)
	s.must(err)
	_, err = u.Append(s.ctx, 0, bytes.NewReader(noise(5, partOf+700)))
	s.must(err)
	rule := s.proxy.On(either(tailGone, stateGone), reset)
	s.want("abort", u.Abort(s.ctx), blobstore.ErrUnavailable)
	rule.Off()
	return 5 + 2 + 1
}

// TestSweepMeanwhile: a sweep of everything, whatever its age, does not disturb uploads of the same process.
func TestSweepMeanwhile(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.rounds = 1 // nobody has to start again
	st := s.past()
	done := make(chan struct{})
	var sweeper, pushers sync.WaitGroup
	sweeper.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			if _, err := st.Sweep(s.ctx, time.Now().Add(time.Hour)); err != nil {
				t.Error(err)
				return
			}
		}
	})
	for worker := range 4 {
		pushers.Go(func() {
			for n := range 6 {
				size := 2000
				if n%3 == 0 {
					size = partOf + 2000
				}
				how := pushing{named: n%2 == 0}
				if worker > 1 {
					how.step = size/2 + 1
				}
				b := noise(uint64(100*worker+n), size)
				i, err := s.push(st, b, how)
				if err != nil {
					t.Errorf("push of %d bytes, %+v: %v", size, how, err)
					return
				}
				s.holds(st, b)
				if n%2 == 1 {
					if err := st.Delete(s.ctx, i); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	pushers.Wait()
	close(done)
	sweeper.Wait()
	if n := s.whole(); n != 12 {
		t.Errorf("%d blobs, want 12", n)
	}
	s.clean()
}

// TestSweepAtOpen: who comes to own a store ends the multipart uploads that the last owner began and did not note.
func TestSweepAtOpen(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	st := s.past()
	u, err := st.Create(s.ctx, identity.Digest{}, -1)
	s.must(err)
	b := noise(1, partOf+10)
	_, err = u.Append(s.ctx, 0, bytes.NewReader(b))
	s.must(err)
	_, err = st.b.Begin(s.ctx, st.b.Key(unnamedName, rand.Text()))
	s.must(err)
	owner := s.open(Options{Exclusive: true})
	if n := s.proxy.Count(tests3.AbortMultipartUpload); n != 1 {
		t.Errorf("%d uploads were aborted, want 1", n)
	}
	u, err = owner.Resume(s.ctx, u.ID())
	s.must(err)
	_, err = u.Commit(s.ctx, identity.Sum(b))
	s.must(err)
	s.holds(owner, b)
	s.clean()
}
