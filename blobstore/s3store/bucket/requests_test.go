package bucket

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

const partSize = 5 << 20

func crc(b []byte) uint32 { return crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) }

// TestAssembly: a server may take long to put parts together, longer than any other request may be silent.
func TestAssembly(t *testing.T) {
	s := newSite(t)
	b := s.dial(s.url("&region="+s.server.Region), Options{Stall: 200 * time.Millisecond, Tries: 2})
	key, body := b.Key("x"), bytes.Repeat([]byte("0123456789abcdef"), partSize/16)
	id, err := b.Begin(s.ctx, key)
	s.must(err)
	part, err := b.PutPart(s.ctx, key, id, 1, body, crc(body))
	s.must(err)
	gate := tests3.NewGate()
	s.proxy.On(tests3.Is(tests3.CompleteMultipartUpload), tests3.Stall(gate))
	result := make(chan error, 1)
	go func() {
		sum, err := b.Complete(s.ctx, key, id, []Part{part})
		if err == nil && sum != Checksum([]Part{part}) {
			err = fmt.Errorf("the server says %s, want %s", sum, Checksum([]Part{part}))
		}
		result <- err
	}()
	<-gate.Reached()
	s.proxy.On(tests3.Is(tests3.HeadObject), tests3.Stall(tests3.NewGate()))
	_, err = b.Head(s.ctx, key) // which takes as long as any other request may
	s.want("head", err, blobstore.ErrUnavailable)
	gate.Open()
	s.must(<-result)
	if n := s.proxy.Count(tests3.CompleteMultipartUpload); n != 1 {
		t.Errorf("the server was asked %d times to put the parts together", n)
	}
}

// TestList: a listing goes on where it broke off, gives up when nothing comes, and never passes for a shorter one.
func TestList(t *testing.T) {
	s := newSite(t)
	b := s.dial(s.url(""), Options{})
	var want []string
	for n := range 7 {
		key := b.Key("l", fmt.Sprintf("%d+ &%%ü", n))
		_, err := b.Put(s.ctx, key, []byte("x"), Condition{Absent: true})
		s.must(err)
		want = append(want, key)
	}
	list := func(ctx context.Context, after string, each func(n int)) (keys []string, err error) {
		for e, err := range b.List(ctx, b.Key("l")+"/", after, 2) {
			if err != nil {
				return keys, err
			}
			keys = append(keys, e.Key)
			each(len(keys))
		}
		return keys, nil
	}
	nothing := func(int) {}
	for name, c := range map[string]struct {
		match tests3.Match
		fault tests3.Fault
	}{
		"whole":     {tests3.Is(), nil},
		"cut":       {tests3.Is(tests3.ListObjects), tests3.CutAnswer(200)},
		"cut later": {tests3.Nth(3, tests3.Is(tests3.ListObjects)), tests3.CutAnswer(300)},
		"reset":     {tests3.Nth(2, tests3.Is(tests3.ListObjects)), tests3.Reset()},
	} {
		rule := s.proxy.On(tests3.First(2, c.match), c.fault)
		got, err := list(s.ctx, "", nothing)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
		rule.Off()
	}
	if got, err := list(s.ctx, want[3], nothing); err != nil || !slices.Equal(got, want[4:]) {
		t.Errorf("after the fourth: %q, %v", got, err)
	}
	ctx, cancel := context.WithCancel(s.ctx)
	got, err := list(ctx, "", func(n int) {
		if n == 3 {
			cancel()
		}
	})
	s.want("list under a context that ends", err, context.Canceled)
	if len(got) >= len(want) {
		t.Errorf("%d keys were listed after the end", len(got))
	}
	s.proxy.On(tests3.Is(tests3.ListObjects), tests3.CutAnswer(200))
	before := s.proxy.Count(tests3.ListObjects)
	_, err = list(s.ctx, "", nothing)
	s.want("list that always breaks off", err, blobstore.ErrUnavailable)
	if n := s.proxy.Count(tests3.ListObjects) - before; n != Attempts {
		t.Errorf("%d requests, want %d", n, Attempts)
	}
}

// TestMultiparts lists more uploads than there are in a page.
func TestMultiparts(t *testing.T) {
	s := newSite(t)
	b := s.dial(s.url(""), Options{})
	want := map[string]bool{}
	for n := range 5 {
		id, err := b.Begin(s.ctx, b.Key("m", fmt.Sprint(n/2)))
		s.must(err)
		want[id] = true
	}
	s.proxy.On(tests3.First(1, tests3.Is(tests3.ListMultipartUploads)), tests3.CutAnswer(300))
	for m, err := range b.Multiparts(s.ctx, b.Key("m")+"/") {
		s.must(err)
		if !want[m.ID] || !strings.HasPrefix(m.Key, "p/m/") || time.Since(m.Initiated) > time.Hour {
			t.Errorf("%+v", m)
		}
		delete(want, m.ID)
		s.must(b.Abort(s.ctx, m.Key, m.ID))
		s.must(b.Abort(s.ctx, m.Key, m.ID))
	}
	if len(want) > 0 {
		t.Errorf("not listed: %v", want)
	}
}

// TestConditions: who puts under a condition learns that it does not hold, but not that another request was in the way.
func TestConditions(t *testing.T) {
	s := newSite(t)
	b := s.dial(s.url(""), Options{})
	put := func(body string, only Condition) (string, error) {
		return b.Put(s.ctx, b.Key("x"), []byte(body), only)
	}
	_, err := put("a", Condition{ETag: "0123456789abcdef0123456789abcdef"})
	if !errors.Is(err, ErrAbsent) && !errors.Is(err, ErrConflict) {
		t.Errorf("put over what is not there: %v", err)
	}
	tag, err := put("a", Condition{Absent: true})
	s.must(err)
	_, err = put("b", Condition{Absent: true})
	s.want("second put", err, ErrConflict)
	next, err := put("b", Condition{ETag: tag})
	s.must(err)
	_, err = put("c", Condition{ETag: tag})
	s.want("put over what has changed", err, ErrConflict)
	o, err := b.Get(s.ctx, b.Key("x"), 1, nil)
	if err != nil || string(o.Body) != "b" || o.ETag != next || o.Age < 0 || o.Age > time.Hour {
		t.Errorf("%+v, %v", o, err)
	}
	busy := s.proxy.On(tests3.First(3, tests3.Any), tests3.Answer(409, "ConditionalRequestConflict"))
	_, err = put("d", Condition{ETag: next})
	s.must(err)
	busy.Off()
	s.proxy.On(tests3.Any, tests3.Answer(409, "OperationAborted"))
	_, err = put("e", Condition{})
	s.want("put in a crowd", err, blobstore.ErrUnavailable)
	if errors.Is(err, ErrConflict) {
		t.Errorf("%v", err)
	}
}

// TestSound: what does not read as it should is asked for again, and not for ever.
func TestSound(t *testing.T) {
	s := newSite(t)
	b := s.dial(s.url(""), Options{})
	body := []byte("the bytes")
	_, err := b.Put(s.ctx, b.Key("x"), body, Condition{})
	s.must(err)
	damaged := errors.New("damaged")
	sound := func(got []byte) error {
		if !bytes.Equal(got, body) {
			return damaged
		}
		return nil
	}
	flips := s.proxy.On(tests3.First(2, tests3.Is(tests3.GetObject)), tests3.FlipAnswer(3))
	o, err := b.Get(s.ctx, b.Key("x"), 100, sound)
	if err != nil || !bytes.Equal(o.Body, body) || flips.Hits() != 2 {
		t.Errorf("%q, %v after %d flips", o.Body, err, flips.Hits())
	}
	s.proxy.On(tests3.Is(tests3.GetObject), tests3.FlipAnswer(3))
	before := s.proxy.Count()
	o, err = b.Get(s.ctx, b.Key("x"), 100, sound)
	s.want("get of what is always changed", err, damaged)
	if n := s.proxy.Count() - before; n != soundAttempts || o.ETag == "" {
		t.Errorf("%d requests, %+v", n, o)
	}
	_, err = b.Get(s.ctx, b.Key("x"), int64(len(body))-1, nil)
	s.says("get of more than expected", err, "has 9 bytes: at most 8 were expected")
}

// TestVerified: an object whose bytes changed on the way is refused by the server, sent again, and not there in the end
// if that goes on.
func TestVerified(t *testing.T) {
	s := newSite(t)
	b := s.dial(s.url(""), Options{})
	body := []byte("the bytes")
	rule := s.proxy.On(tests3.First(3, tests3.Is(tests3.PutObject)), tests3.FlipRequest(3))
	confirmed, err := b.PutVerified(s.ctx, b.Key("x"), body, identity.Sum(body))
	if err != nil || !confirmed || rule.Hits() != 3 {
		t.Errorf("confirmed %v, %v after %d flips", confirmed, err, rule.Hits())
	}
	s.proxy.On(tests3.Is(tests3.PutObject), tests3.FlipRequest(3))
	_, err = b.PutVerified(s.ctx, b.Key("y"), body, identity.Sum(body))
	s.want("put of what is always changed", err, ErrChanged)
	s.want("put of what is always changed", err, blobstore.ErrUnavailable)
	_, err = b.Head(s.ctx, b.Key("y"))
	s.want("head", err, ErrAbsent)

	r, n, err := b.Range(s.ctx, b.Key("x"), 4, 100)
	s.must(err)
	got, err := io.ReadAll(r)
	if err != nil || n != 5 || string(got) != "bytes" {
		t.Errorf("%d bytes: %q, %v", n, got, err)
	}
	s.must(r.Close())
	s.must(b.Remove(s.ctx, b.Key("x")))
	s.must(b.Remove(s.ctx, b.Key("x")))
	_, _, err = b.Range(s.ctx, b.Key("x"), 0, 1)
	s.want("range of nothing", err, ErrAbsent)
}

// TestNoSpace: a full server is told from one that is away.
func TestNoSpace(t *testing.T) {
	s := newSite(t)
	for status, code := range map[int]string{507: "InsufficientStorage", 403: "QuotaExceeded"} {
		b := s.dial(s.url(""), Options{})
		rule := s.proxy.On(tests3.Is(tests3.PutObject), tests3.Answer(status, code))
		_, err := b.Put(s.ctx, b.Key("x"), nil, Condition{})
		s.want("put", err, blobstore.ErrNoSpace)
		rule.Off()
	}
}
