package s3store

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store/bucket"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

// owning is what a registry opens its store with. The claim is not renewed as long as a test lasts.
func owning() Options { return Options{Exclusive: true, ttl: time.Hour} }

// silentFor makes the claim of an owner look as old as said.
func silentFor(p *tests3.Proxy, age time.Duration) *tests3.Rule {
	return p.On(ownerGet, tests3.EditAnswer(func(h http.Header, body []byte) []byte {
		at, err := http.ParseTime(h.Get("Last-Modified"))
		if err == nil {
			h.Set("Date", at.Add(age).UTC().Format(http.TimeFormat))
		}
		return body
	}))
}

// takeOver opens the store as another process does that finds its owner silent.
func (s *site) takeOver() *Store {
	s.Helper()
	p := tests3.NewProxy(s, s.direct.Endpoint)
	old := silentFor(p, time.Hour+time.Second)
	c := s.direct
	c.Endpoint = p.Endpoint()
	st := openAt(s, c, owning())
	old.Off()
	return st
}

func TestOneOwner(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	host, err := os.Hostname()
	s.must(err)
	rule := silentFor(s.proxy, 29*time.Second)
	first, err := Open(s.ctx, s.via, Options{Exclusive: true})
	s.must(err)
	_, err = Open(s.ctx, s.via, Options{Exclusive: true})
	s.want("second open", err, blobstore.ErrInUse)
	line := fmt.Sprintf("process %d on %s owns it and was heard of 29 seconds ago", os.Getpid(), host)
	if err == nil || !strings.Contains(err.Error(), line) {
		t.Errorf("error %q, want %q in it", err, line)
	}
	s.open(Options{}) // which does not own it
	s.must(first.Close())
	s.must(first.Close())
	ends := s.proxy.On(refsPut, reset)
	s.open(Options{Exclusive: true})
	if ends.Hits() != 0 {
		t.Error("the log of a store that was given back was ended again")
	}
	rule.Off()
}

// TestManyWantIt: of several processes that start at a time one gets the store.
func TestManyWantIt(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	var owners [6]*Store
	var wg sync.WaitGroup
	for i := range owners {
		wg.Go(func() {
			st, err := Open(s.ctx, s.direct, owning())
			if err != nil && !errors.Is(err, blobstore.ErrInUse) {
				t.Error(err)
			}
			owners[i] = st
		})
	}
	wg.Wait()
	var got []*Store
	for _, st := range owners {
		if st != nil {
			got = append(got, st)
		}
	}
	if len(got) != 1 {
		t.Errorf("%d owners", len(got))
	}
	for _, st := range got {
		s.must(st.Close())
	}
}

// TestDeadOwner: an owner whose process is known to be gone is not waited for; one of another machine is.
func TestDeadOwner(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	cmd := exec.Command("true")
	s.must(cmd.Run())
	dead := claim{Process: rand.Text(), Host: "here", PID: cmd.Process.Pid, PIDSpace: pidSpace()}
	elsewhere := dead
	elsewhere.PIDSpace, elsewhere.Host = "another boot pid:[1]", "there"
	zombie := exec.Command("true")
	s.must(zombie.Start())
	s.must(unix.Waitid(unix.P_PID, zombie.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil))
	defer zombie.Wait()
	notReaped := dead
	notReaped.PID = zombie.Process.Pid
	alive := dead
	alive.PID = os.Getppid()
	for _, c := range []struct {
		claim claim
		err   error
	}{{elsewhere, blobstore.ErrInUse}, {alive, blobstore.ErrInUse}, {dead, nil}, {notReaped, nil}} {
		past := s.past()
		body, err := seal(c.claim)
		s.must(err)
		_, err = past.b.Put(s.ctx, past.b.Key(ownerName), body, bucket.Condition{})
		s.must(err)
		st, err := Open(s.ctx, s.via, Options{Exclusive: true})
		s.want("open of the store of "+c.claim.Host, err, c.err)
		if err == nil {
			s.must(st.Close())
		}
	}
}

// TestTakenOver: an owner that was silent for long loses the store, learns so by what it meets in the log, and changes
// nothing from then on.
func TestTakenOver(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	var told []string
	o := owning()
	o.Notify = func(line string) { told = append(told, line) }
	first := s.open(o)
	b := noise(1, 3000)
	_, err := first.Put(s.ctx, ref(1))
	s.must(err)
	i, err := s.push(first, noise(2, 100), pushing{})
	s.must(err)
	u, err := first.Create(s.ctx, identity.Sum(b), -1)
	s.must(err)
	_, err = u.Append(s.ctx, 0, bytes.NewReader(b[:1000]))
	s.must(err)
	large := noise(3, partOf+1)
	whole, err := first.Create(s.ctx, identity.Sum(large), -1)
	s.must(err)
	_, err = whole.Append(s.ctx, 0, bytes.NewReader(large))
	s.must(err)

	second := s.takeOver()
	_, err = first.Put(s.ctx, ref(2))
	s.want("put of one that paused", err, blobstore.ErrInUse)
	before := s.proxy.Counts()
	for what, err := range map[string]error{
		"put":    func() error { _, err := first.Put(s.ctx, ref(3)); return err }(),
		"create": func() error { _, err := first.Create(s.ctx, identity.Digest{}, -1); return err }(),
		"append": func() error { _, err := u.Append(s.ctx, 1000, bytes.NewReader(b[1000:])); return err }(),
		"finish": func() error {
			_, err := u.Finish(s.ctx, 1000, bytes.NewReader(b[1000:]), identity.Sum(b))
			return err
		}(),
		"commit": func() error { _, err := u.Commit(s.ctx, identity.Sum(b[:1000])); return err }(),
		"commit of what needs nothing more": func() error {
			_, err := whole.Commit(s.ctx, identity.Sum(large))
			return err
		}(),
		"sweep": func() error { // of a tail of no upload
			past := s.past()
			_, err := past.b.Put(s.ctx, past.b.Key(tailsName, rand.Text(), rand.Text()), nil, bucket.Condition{})
			s.must(err)
			_, err = first.Sweep(s.ctx, time.Now().Add(time.Hour))
			return err
		}(),
		"abort":  u.Abort(s.ctx),
		"delete": first.Delete(s.ctx, i),
	} {
		s.want(what, err, blobstore.ErrInUse)
	}
	after := s.proxy.Counts()
	for op, n := range after {
		if n != before[op] && op != tests3.GetObject && op != tests3.ListObjects && op != tests3.ListMultipartUploads {
			t.Errorf("%d times %s", n-before[op], op)
		}
	}
	if len(told) != 1 || !strings.Contains(told[0], "was taken by another process") {
		t.Errorf("told %q", told)
	}
	s.holds(first, noise(2, 100)) // reading goes on

	u, err = second.Resume(s.ctx, u.ID())
	s.must(err)
	_, err = u.Finish(s.ctx, 1000, bytes.NewReader(b[1000:]), identity.Sum(b))
	s.must(err)
	_, err = second.Put(s.ctx, ref(4))
	s.must(err)
	if got := refs(t, second); len(got) != 2 || got[0].Seq != 1 || got[1].Seq != 4 {
		t.Errorf("refs %v", got)
	}
	s.clean()
}

// TestPausedInFlight: refs that the last owner had on their way when it lost the store are either in what the new owner
// finds, or never kept.
func TestPausedInFlight(t *testing.T) {
	t.Parallel()
	for name, kept := range map[string]bool{"before": true, "after": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			first := s.open(owning())
			_, err := first.Put(s.ctx, ref(1))
			s.must(err)
			gate := tests3.NewGate()
			fault := tests3.Stall(gate)
			if kept {
				fault = heldAnswer(gate)
			}
			s.proxy.On(tests3.First(1, refsPut), fault)
			result := make(chan error, 1)
			go func() {
				_, err := first.Put(s.ctx, ref(2))
				result <- err
			}()
			<-gate.Reached()
			second := s.takeOver()
			found := refs(t, second)
			if len(found) != 1 && !kept || len(found) != 2 && kept {
				t.Errorf("the new owner finds %d refs", len(found))
			}
			gate.Open()
			err = <-result
			if kept {
				s.must(err)
			} else {
				s.want("put", err, blobstore.ErrInUse)
			}
			if now := refs(t, second); len(now) != len(found) {
				t.Errorf("%d refs, the new owner had found %d", len(now), len(found))
			}
		})
	}
}

// heldAnswer lets the server do what is asked at once, and holds its answer until the gate opens.
func heldAnswer(g *tests3.Gate) tests3.Fault {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			tests3.EditAnswer(func(_ http.Header, body []byte) []byte {
				tests3.Stall(g)(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})).ServeHTTP(w, r)
				return body
			})(next).ServeHTTP(w, r)
		})
	}
}

// TestRenewal: an owner goes on although answers to its renewals are lost, pauses while none arrives, and ends when
// another process has the store.
func TestRenewal(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	lost := make(chan string, 1)
	o := Options{Exclusive: true, ttl: 300 * time.Millisecond, Notify: func(line string) { lost <- line }}
	st := s.open(o)
	n := 0
	answers := s.proxy.On(func(r *http.Request) bool { n++; return n%3 == 1 && ownerPut(r) }, tests3.Persisted(reset))
	s.until(func() bool { return answers.Hits() > 3 && create(s.ctx, st) == nil })
	answers.Off()

	away := s.proxy.On(either(ownerPut, ownerGet), reset)
	s.until(func() bool { return errors.Is(create(s.ctx, st), blobstore.ErrUnavailable) })
	away.Off()
	s.until(func() bool { return create(s.ctx, st) == nil })

	past := s.past()
	other, err := seal(claim{Process: rand.Text(), Host: "there", PID: 7})
	s.must(err)
	_, err = past.b.Put(s.ctx, past.b.Key(ownerName), other, bucket.Condition{})
	s.must(err)
	if line := <-lost; !strings.Contains(line, "was taken by another process") {
		t.Errorf("told %q", line)
	}
	err = create(s.ctx, st)
	s.want("create", err, blobstore.ErrInUse)
	if err == nil || !strings.Contains(err.Error(), "process 7 on there took it") {
		t.Errorf("error %v", err)
	}
}

func create(ctx context.Context, st *Store) error {
	_, err := st.Create(ctx, identity.Digest{}, -1)
	return err
}

// until waits for something that comes by itself.
func (s *site) until(it func() bool) {
	s.Helper()
	for tick := time.NewTicker(10 * time.Millisecond); !it(); {
		select {
		case <-tick.C:
		case <-s.ctx.Done():
			s.Fatal(s.ctx.Err())
		}
	}
}
