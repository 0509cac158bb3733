package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"

	"github.com/kiln-registry/kiln-registry/identity"
)

// script is a run of operations by one client and the operator, always the same one: so that its nth durable change is
// always about the same. Each step can follow on any state that the steps before it may have left.
type script struct {
	*client
	v     *server
	k     *checker
	a, b  blob // pushed early
	first manifest
}

// steps returns what is done, in order. Every way to change something is in it.
func (s *script) steps() []func() error {
	const repo, other = "team/model", "lab/x"
	var cut *session
	return []func() error{
		func() error { return s.post(repo, s.a) },
		func() error { return s.put(repo, s.b) },
		func() (err error) { s.first, err = s.base(repo, 2, "v1"); return err },
		func() error { return s.chunked(repo, 3) },
		func() (err error) { cut, err = s.begin(repo, s.fresh(5000)); return err },
		func() error { return s.part(cut, 2000) },
		func() error { _, err := s.base(repo, 1, "v1"); return err }, // the tag moves
		func() error { _, err := s.base(repo, 1, "x1", "x2"); return err },
		func() error { return s.whole(s.first, s.adapter) },
		func() error { return s.whole(s.first, func(m manifest) error { return s.list(m) }) },
		func() error { return s.moved(other, repo, s.a) },
		func() error { return s.part(cut, 1000) },
		func() error { return s.cancelled(repo) },
		func() error { return s.wrongDigest(repo) },
		func() error { return s.untag(key{repo, "x1"}) },
		func() error { return s.whole(s.first, s.deleteManifest) },
		func() error { return s.whole(s.first, s.again) },
		func() error { return s.whole(s.first, s.again) }, // it must be there when the collector comes: it is a base of others
		func() error { return s.deleteSomeBlob() },
		func() error { return s.finish(cut) },
		func() error { return s.spoil(repo, s.b) },
		func() error { return s.wire.scrub() },
		func() error { return s.wire.scrub() }, // when the first one was cut short
		func() error { return s.healed(repo, s.b) },
		func() error { return s.wire.collect() }, // all are referred to, or wait for a manifest
		func() error { return s.reindex() },
		func() error { return s.wire.collect() }, // those that waited go
		func() error { _, err := s.base(repo, 1, "last"); return err },
		func() error { return s.v.stop() },
	}
}

// whole does something with a manifest, which is put if it is not there.
func (s *script) whole(m manifest, do func(manifest) error) error {
	if m.digest.IsZero() {
		return nil // its push did not come to an end, and what was to become of it is not known
	}
	if _, ok := s.ledger.names[key{m.repo, m.digest.String()}]; !ok {
		if err := s.putManifest(m, true); err != nil {
			return err
		}
	}
	return do(m)
}

// again puts a manifest that is there, or was.
func (s *script) again(m manifest) error { return s.putManifest(m, false, "v1") }

func (s *script) chunked(repo string, parts int64) error {
	u, err := s.begin(repo, s.fresh(9000))
	for range parts {
		if err == nil {
			err = s.patch(u, 3000)
		}
	}
	return s.then(u, err)
}

func (s *script) then(u *session, err error) error {
	if err != nil {
		return err
	}
	return s.end(u)
}

// part sends a piece of an upload that is still open.
func (s *script) part(u *session, n int64) error {
	if u == nil || !s.isOpen(u) {
		return nil
	}
	return s.patch(u, n)
}

func (s *script) finish(u *session) error {
	if u == nil || !s.isOpen(u) {
		return nil
	}
	return s.end(u)
}

func (s *script) isOpen(u *session) bool {
	for _, o := range s.sessions {
		if o == u {
			return true
		}
	}
	return false
}

func (s *script) moved(to, from string, b blob) error {
	if err := s.need(from, b); err != nil {
		return err
	}
	return s.mount(to, from, b)
}

func (s *script) cancelled(repo string) error {
	u, err := s.begin(repo, s.fresh(700))
	if err == nil {
		err = s.patch(u, 500)
	}
	if err != nil {
		return err
	}
	return s.cancel(u)
}

// wrongDigest ends an upload as another blob: it is refused, and nothing of it stays.
func (s *script) wrongDigest(repo string) error {
	u, err := s.begin(repo, s.fresh(600))
	if err != nil {
		return err
	}
	u.ending = true
	_, err = s.ask(http.StatusBadRequest, "PUT", u.at+"?digest="+identity.Sum([]byte("x")).String(), u.blob.bytes())
	u.sent = u.blob.length
	if err == nil {
		s.drop(u)
	}
	return err
}

func (s *script) untag(k key) error {
	if _, ok := s.ledger.names[k]; !ok {
		return nil
	}
	return s.deleteTag(k)
}

// reindex has the server make its index anew, which forgets uploads and blobs without a manifest, and goes on. While
// that is in doubt nothing is known about those.
func (s *script) reindex() error {
	s.forget()
	err := s.wire.operate("/reindex")
	if err == nil {
		s.acked++
	}
	return err
}

// spoil damages a blob.
func (s *script) spoil(repo string, b blob) error {
	if err := s.need(repo, b); err != nil {
		return err
	}
	s.k.spoilt[b.digest] = true
	delete(s.blobs, place{repo, b.digest})
	return s.k.site.flip(b.digest, 100)
}

// healed pushes again what was set aside.
func (s *script) healed(repo string, b blob) error {
	err := s.post(repo, b)
	if err == nil {
		delete(s.k.spoilt, b.digest)
	}
	return err
}

// boundaries is a run of the script that is cut short at every durable change, in a store of its own each time.
type boundaries struct {
	chaos
	mu    sync.Mutex
	kills int
	acked int
	again int
	lost  int
	last  int // the number of changes that the script makes
}

// when are the two sides of a change.
var when = []string{"before", "after"}

func (c chaos) boundaries(ctx context.Context) error {
	b := boundaries{chaos: c}
	err := b.all(ctx)
	fmt.Fprintf(c.out, "boundaries: one in %d of %d durable changes, kills %d, acknowledged %d, to be sent again %d, lost %d\n",
		c.every, b.last, b.kills, b.acked, b.again, b.lost)
	return err
}

// all tries one change after another, several at a time, until the script ends before the change that is to be the last.
func (b *boundaries) all(ctx context.Context) error {
	const atOnce = 4
	for n := 1 + int(b.seed%uint64(b.every)); ; n += b.every * atOnce {
		var wg sync.WaitGroup
		errs := make([]error, 2*atOnce)
		ended := make([]bool, 2*atOnce)
		for i := range errs {
			at := n + i/2*b.every
			wg.Go(func() {
				ended[i], errs[i] = b.one(ctx, fmt.Sprintf("%s:%d", when[i%2], at))
			})
		}
		wg.Wait()
		b.last = max(b.last, n+(atOnce-1)*b.every)
		if err := errors.Join(append(errs, ctx.Err())...); err != nil {
			return err
		}
		for i, e := range ended {
			if e {
				b.last = n + i/2*b.every - 1
				return nil
			}
		}
	}
}

// one runs the script with a server that dies at a change, goes on with another one, and says whether it never died.
func (b *boundaries) one(ctx context.Context, at string) (ended bool, err error) {
	err = b.at("", func(site *site) error {
		s := &script{client: newClient(1, 1)}
		s.a, s.b = s.fresh(3000), s.fresh(400)
		k := newChecker(site, []*client{s.client})
		s.k = k
		ended, err = s.run(ctx, site, k, "CHAOS_KILL="+at)
		b.mu.Lock()
		defer b.mu.Unlock()
		b.acked += s.acked
		b.again += k.again
		b.lost += len(k.lost)
		if !ended {
			b.kills++
		}
		if err = errors.Join(err, k.err()); err != nil {
			return fmt.Errorf("killed %s: %w", at, err)
		}
		return nil
	})
	return ended, err
}

// run does all steps, and starts the server again when it has died.
func (s *script) run(ctx context.Context, site *site, k *checker, env string) (ended bool, err error) {
	ended = true
	restart := func(env ...string) error {
		if s.v, err = site.start(env...); err != nil {
			return err
		}
		if err := s.v.ready(ctx); err != nil {
			return err
		}
		s.wire = s.v.wire()
		return nil
	}
	died := func(err error) error {
		<-s.v.ended
		if !ended || !s.v.killed() {
			return fmt.Errorf("the server ended by itself: %w: %s", err, s.v.log)
		}
		ended = false
		if err := restart(); err != nil {
			return err
		}
		k.check(s.v, true)
		return k.err()
	}
	if err := restart(env); err != nil {
		if !errors.Is(err, errEnded) {
			return false, err
		}
		if err := died(err); err != nil {
			return false, err
		}
	}
	defer func() { s.v.kill() }()
	for _, step := range s.steps() {
		err := step()
		if err == nil {
			continue
		}
		if !errors.Is(err, errNoAnswer) && !strings.Contains(err.Error(), "stop the server") {
			return ended, err
		}
		if err := died(err); err != nil {
			return ended, err
		}
	}
	s.v.kill()
	if err := restart(); err != nil {
		return ended, err
	}
	k.check(s.v, true)
	k.anew(s.v)
	return ended, nil
}
