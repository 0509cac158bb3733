package upkeep_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// rewrite changes the bytes of a stored blob behind the store's back.
func (r *rig) rewrite(d identity.Digest, change func([]byte) []byte) {
	r.t.Helper()
	path := filepath.Join(r.dir, "blobs", "sha256", d.Hex()[:2], d.Hex())
	b, err := os.ReadFile(path)
	if err == nil {
		err = os.Chmod(path, 0o644)
	}
	if err == nil {
		err = os.WriteFile(path, change(b), 0o644)
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

func flip(at int) func([]byte) []byte {
	return func(b []byte) []byte {
		b[at] ^= 1
		return b
	}
}

// scrub runs a scrub that must work, and returns what it found by digest.
func (r *rig) scrub(ds ...identity.Digest) (upkeep.Scrubbing, map[identity.Digest]upkeep.Finding) {
	r.t.Helper()
	found := map[identity.Digest]upkeep.Finding{}
	did, err := r.reg.Scrubber().Scrub(context.Background(), upkeep.Order{
		Digests: ds, Found: func(f upkeep.Finding) { found[f.Digest] = f },
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return did, found
}

func (r *rig) health() (h api.Health) {
	r.t.Helper()
	if err := json.Unmarshal(r.do(200, "GET", "/health", nil), &h); err != nil {
		r.t.Fatal(err)
	}
	return h
}

// TestDamage: every kind of damage to a blob is found and named, the blob is not served any more, its manifest is not
// taken, and another push of the bytes heals it.
func TestDamage(t *testing.T) {
	const segment = 16 << 20
	large := bytes.Repeat([]byte("0123456789abcdef"), 40<<20/16)
	for name, c := range map[string]struct {
		data   []byte
		change func([]byte) []byte
		why    string
	}{
		"a flipped bit": {[]byte("small"), flip(2), "its 5 bytes hash to sha256:"},
		"truncated":     {[]byte("small"), func(b []byte) []byte { return b[:3] }, "its file has 3 bytes, stored were 5"},
		"empty":         {[]byte("small"), func([]byte) []byte { return nil }, "its file has 0 bytes, stored were 5"},
		"longer":        {[]byte("small"), func(b []byte) []byte { return append(b, 0) }, "its file has 6 bytes, stored were 5"},
		"was empty":     {nil, func(b []byte) []byte { return append(b, 0) }, "its file has 1 bytes, stored were 0"},
		"in the middle": {large, flip(segment + 5), "damaged in bytes 16777216-33554431 of 41943040"},
		"in two places": {large, func(b []byte) []byte { return flip(1)(flip(40<<20 - 1)(b)) },
			"damaged in bytes 0-16777215, 33554432-41943039 of 41943040"},
		"in neighbours": {large, func(b []byte) []byte { return flip(segment)(flip(segment - 1)(b)) },
			"damaged in bytes 0-33554431 of 41943040"},
		"cut off": {large, func(b []byte) []byte { return b[:segment] },
			"its file has 16777216 bytes, stored were 41943040"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil)
			m := r.image("a", c.data)
			r.put(201, "a", "v1", m)
			d := identity.Sum(c.data)
			path := "/v2/a/blobs/" + d.String()
			if did, found := r.scrub(); did.Read.Blobs != 2 || did.Damaged != 0 || len(found) != 0 {
				t.Fatalf("before: %+v, %v", did, found)
			}
			r.rewrite(d, c.change)
			did, found := r.scrub()
			if f := found[d]; did.Damaged != 1 || f.Verdict != upkeep.Damaged || !f.Aside || !strings.Contains(f.Why, c.why) {
				t.Errorf("%+v, %v", did, found)
			}
			for _, method := range []string{"GET", "HEAD"} {
				b := r.do(404, method, path, nil)
				if method == "GET" && !(bytes.Contains(b, []byte("BLOB_UNKNOWN")) && bytes.Contains(b, []byte("damaged"))) {
					t.Errorf("%s", b)
				}
			}
			r.put(400, "a", "v2", bytes.Replace(m, []byte("schema"), []byte(" schema"), 1))
			if h := r.health(); h.Status != "degraded" || h.Quarantined != 1 {
				t.Errorf("%+v", h)
			}
			if _, found := r.scrub(d); found[d].Verdict != upkeep.Damaged || !found[d].Before {
				t.Errorf("%v", found)
			}
			r.blob("a", c.data)
			if got := r.do(200, "GET", path, nil); !bytes.Equal(got, c.data) {
				t.Errorf("healed, and other bytes")
			}
			if h := r.health(); h.Status != "ok" || h.Quarantined != 0 {
				t.Errorf("%+v", h)
			}
			if did, found := r.scrub(); did.Read.Blobs != 2 || len(found) != 0 {
				t.Errorf("%+v, %v", did, found)
			}
		})
	}
}

// TestDamagedAndDeleted: what is in quarantine goes when nothing refers to it any more, a grace period after it was
// found.
func TestDamagedAndDeleted(t *testing.T) {
	h := new(hands)
	r := newRig(t, func(r *rig) { r.clock = h.clock })
	m, d := r.image("a", []byte("layer")), identity.Sum([]byte("layer"))
	r.put(201, "a", "v1", m)
	h.forward(week)
	r.rewrite(d, flip(0))
	r.scrub()
	aside := func() (n int) {
		for range r.store.(blobstore.Quarantine).Aside(t.Context()) {
			n++
		}
		return n
	}
	want := func(when string, terms upkeep.Terms, gone, left int) {
		t.Helper()
		terms.Force = true
		told := 0
		terms.Gone = func(b upkeep.Blob) {
			if b.Digest == d {
				told++
			}
		}
		did := r.collect(terms)
		if did.Aside.Blobs != int64(gone) || aside() != left || told != gone || r.health().Quarantined != left {
			t.Errorf("%s: %+v, %d told, %d left", when, did, told, aside())
		}
	}
	want("referred to", upkeep.Terms{}, 0, 1)
	r.do(202, "DELETE", "/v2/a/manifests/"+identity.Sum(m).String(), nil)
	want("young", upkeep.Terms{Grace: 2 * week}, 0, 1)
	want("dry run", upkeep.Terms{DryRun: true}, 1, 1)
	want("old", upkeep.Terms{}, 1, 0)
	_, err := r.store.Stat(t.Context(), d)
	if !errors.Is(err, blobstore.ErrNotFound) || errors.Is(err, blobstore.ErrQuarantined) {
		t.Error(err)
	}
}

// reads is a store that is read badly.
type reads struct {
	blobstore.Store
	open func(blobstore.Info) (io.ReadCloser, error)
}

func (s *reads) Open(ctx context.Context, i blobstore.Info, off, n int64) (io.ReadCloser, error) {
	if r, err := s.open(i); r != nil || err != nil {
		return r, err
	}
	return s.Store.Open(ctx, i, off, n)
}

// TestNotDamage: a failure to read is not damage, nor is what is read wrong once.
func TestNotDamage(t *testing.T) {
	s := &reads{open: func(blobstore.Info) (io.ReadCloser, error) { return nil, nil }}
	r := newRig(t, func(r *rig) {
		r.wrap = func(st blobstore.Store) blobstore.Store { s.Store = st; return s }
	})
	d := r.blob("a", []byte("content"))
	r.blob("a", []byte("other"))

	s.open = func(i blobstore.Info) (io.ReadCloser, error) {
		if i.Digest == d {
			return nil, errors.New("the disk is loose")
		}
		return nil, nil
	}
	did, found := r.scrub()
	f := found[d]
	if f.Verdict != upkeep.Unreadable || did.Unreadable != 1 || did.Read.Blobs != 2 || !strings.Contains(f.Why, "loose") {
		t.Errorf("%+v, %v", did, found)
	}

	times := 0
	s.open = func(i blobstore.Info) (io.ReadCloser, error) {
		if times++; times > 1 {
			return nil, nil
		}
		return io.NopCloser(strings.NewReader("contenT")), nil
	}
	if did, found := r.scrub(d); found[d].Verdict != upkeep.Unsteady || did.Unsteady != 1 {
		t.Errorf("%+v, %v", did, found)
	}

	s.open = func(blobstore.Info) (io.ReadCloser, error) { return nil, blobstore.ErrUnavailable }
	if _, err := r.reg.Scrubber().Scrub(t.Context(), upkeep.Order{}); !errors.Is(err, blobstore.ErrUnavailable) {
		t.Error(err)
	}

	s.open = func(i blobstore.Info) (io.ReadCloser, error) {
		if err := s.Store.Delete(t.Context(), i); err != nil {
			t.Error(err)
		}
		return nil, nil
	}
	if _, found := r.scrub(d); found[d].Verdict != upkeep.Gone {
		t.Errorf("deleted meanwhile: %v", found)
	}
	if len(r.health().Checks) == 0 || r.health().Status != "ok" {
		t.Errorf("%+v", r.health())
	}

	// The store shows it and has no bytes: nobody is told a lie about it for long.
	d = r.blob("a", []byte("more"))
	s.open = func(i blobstore.Info) (io.ReadCloser, error) { return nil, blobstore.ErrNotFound }
	if _, found := r.scrub(d); found[d].Verdict != upkeep.Damaged {
		t.Errorf("without bytes: %v", found)
	}
}

// pass runs the scrubber until a pass has ended that began after the call.
func (r *rig) pass(every time.Duration, until func(upkeep.Scrubbing) bool) upkeep.Scrubbing {
	r.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.reg.Scrubber().Run(ctx, every, 0)
	}()
	for deadline := time.Now().Add(time.Minute); !until(r.reg.Scrubber().Pass()); {
		if time.Now().After(deadline) {
			r.t.Fatalf("still %+v", r.reg.Scrubber().Pass())
		}
	}
	cancel()
	<-done
	return r.reg.Scrubber().Pass()
}

// TestPass: a pass reads every blob once, goes on over a restart where it was, and the next one comes an interval after
// its begin.
func TestPass(t *testing.T) {
	h, s := new(hands), new(reads)
	var order []identity.Digest
	stop := func() {}
	s.open = func(i blobstore.Info) (io.ReadCloser, error) {
		if order = append(order, i.Digest); len(order) == 5 {
			stop()
		}
		return nil, nil
	}
	r := newRig(t, func(r *rig) {
		r.clock = h.clock
		r.wrap = func(st blobstore.Store) blobstore.Store { s.Store = st; return s }
	})
	for i := range 10 {
		r.blob("a", fmt.Append(nil, i))
	}
	ctx, cancel := context.WithCancel(t.Context())
	stop = cancel
	r.reg.Scrubber().Run(ctx, week, 0)
	if p := r.reg.Scrubber().Pass(); p.Read.Blobs < 4 || p.Read.Blobs > 5 || !p.Ended.IsZero() {
		t.Fatalf("interrupted: %+v", p)
	}
	read := len(order) - 5 + int(r.reg.Scrubber().Pass().Read.Blobs)
	order = order[:read]
	r.stop()
	r.start()
	ended := func(p upkeep.Scrubbing) bool { return !p.Ended.IsZero() }
	p := r.pass(week, ended)
	if p.Read.Blobs != 10 || len(order) != 10 {
		t.Errorf("%d reads, %+v", len(order), p)
	}
	for i := 1; i < len(order); i++ {
		if order[i-1].Compare(order[i]) >= 0 {
			t.Errorf("read %d is not in order", i)
		}
	}
	h.forward(week - time.Minute)
	r.stop()
	r.start()
	r.pass(week, ended) // the old one, as it was kept
	if len(order) != 10 {
		t.Errorf("read again before it was due")
	}
	h.forward(time.Minute)
	again := r.pass(week, func(q upkeep.Scrubbing) bool { return ended(q) && q.Began.After(p.Began) })
	if again.Read.Blobs != 10 || len(order) != 20 {
		t.Errorf("%d reads, %+v", len(order), again)
	}
}

// TestSuspect: a blob that was seen to be damaged when it was read is looked at without waiting for the pass.
func TestSuspect(t *testing.T) {
	r := newRig(t, func(r *rig) { r.verify = true })
	d := r.blob("a", []byte("content"))
	r.rewrite(d, flip(3))
	r.do(500, "GET", "/v2/a/blobs/"+d.String(), nil)
	r.pass(0, func(upkeep.Scrubbing) bool { return r.health().Quarantined == 1 })
	r.do(404, "GET", "/v2/a/blobs/"+d.String(), nil)
}

// TestOneScrubAtATime: a second one that somebody asks for is refused.
func TestOneScrubAtATime(t *testing.T) {
	s := new(reads)
	r := newRig(t, func(r *rig) {
		r.wrap = func(st blobstore.Store) blobstore.Store { s.Store = st; return s }
	})
	second := error(nil)
	s.open = func(blobstore.Info) (io.ReadCloser, error) {
		_, second = r.reg.Scrubber().Scrub(t.Context(), upkeep.Order{})
		return nil, nil
	}
	r.scrub(r.blob("a", []byte("x")))
	if !errors.Is(second, upkeep.ErrRunning) {
		t.Error(second)
	}
}
