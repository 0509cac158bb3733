package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/chaos/rig"
)

// script is a run of operations by one client and the operator, always the same one: so that its nth durable change is
// always about the same. Each step can follow on any state that the steps before it may have left.
type script struct {
	*rig.Client
	k     *rig.Checker
	v     *rig.Server
	died  bool     // the first server has
	a, b  rig.Blob // pushed early
	first rig.Manifest
}

// steps returns what is done, in order. Every way to change something is in it.
func (s *script) steps() []func() error {
	const repo, other = "team/model", "lab/x"
	var cut *rig.Session
	return []func() error{
		func() error { return s.Post(repo, s.a) },
		func() error { return s.Put(repo, s.b) },
		func() (err error) { s.first, err = s.Base(repo, 2, "v1"); return err },
		func() error { return s.chunked(repo, 3) },
		func() (err error) { cut, err = s.Begin(repo, s.Fresh(5000)); return err },
		func() error { return s.part(cut, 2000) },
		func() error { _, err := s.Base(repo, 1, "v1"); return err }, // the tag moves
		func() error { _, err := s.Base(repo, 1, "x1", "x2"); return err },
		func() error { return s.whole(s.first, s.Adapter) },
		func() error { return s.whole(s.first, func(m rig.Manifest) error { return s.List(m) }) },
		func() error { return s.moved(other, repo, s.a) },
		func() error { return s.part(cut, 1000) },
		func() error { return s.cancelled(repo) },
		func() error { return s.wrongDigest(repo) },
		func() error { return s.untag(rig.Key{Repo: repo, Name: "x1"}) },
		func() error { return s.whole(s.first, s.DeleteManifest) },
		func() error { return s.whole(s.first, s.again) },
		func() error { return s.whole(s.first, s.again) }, // a base of others is known while its blobs are there
		func() error { return s.DeleteSomeBlob() },
		func() error { return s.finish(cut) },
		func() error { return s.spoil(repo, s.b) },
		func() error { return s.Wire.Scrub() },
		func() error { return s.Wire.Scrub() }, // when the first one was cut short
		func() error { return s.healed(repo, s.b) },
		func() error { return s.Wire.Collect() }, // all are referred to, or wait for a manifest
		func() error { return s.reindex() },
		func() error { return s.Wire.Collect() }, // those that waited go
		func() error { _, err := s.Base(repo, 1, "last"); return err },
		func() error { return s.v.Stop() },
	}
}

// whole does something with a manifest, which is put if it is not there.
func (s *script) whole(m rig.Manifest, do func(rig.Manifest) error) error {
	if m.Digest.IsZero() {
		return nil // its push did not come to an end, and what was to become of it is not known
	}
	if _, ok := s.Ledger.Names[rig.Key{Repo: m.Repo, Name: m.Digest.String()}]; !ok {
		if err := s.PutManifest(m, true); err != nil {
			return err
		}
	}
	return do(m)
}

// again puts a manifest that is there, or was.
func (s *script) again(m rig.Manifest) error { return s.PutManifest(m, false, "v1") }

func (s *script) chunked(repo string, parts int64) error {
	u, err := s.Begin(repo, s.Fresh(9000))
	for range parts {
		if err == nil {
			err = s.Patch(u, 3000)
		}
	}
	if err != nil {
		return err
	}
	return s.End(u)
}

// part sends a piece of an upload that is still open.
func (s *script) part(u *rig.Session, n int64) error {
	if !s.isOpen(u) {
		return nil
	}
	return s.Patch(u, n)
}

func (s *script) finish(u *rig.Session) error {
	if !s.isOpen(u) {
		return nil
	}
	return s.End(u)
}

func (s *script) isOpen(u *rig.Session) bool { return u != nil && slices.Contains(s.Sessions, u) }

func (s *script) moved(to, from string, b rig.Blob) error {
	if err := s.Need(from, b); err != nil {
		return err
	}
	return s.Mount(to, from, b)
}

func (s *script) cancelled(repo string) error {
	u, err := s.Begin(repo, s.Fresh(700))
	if err == nil {
		err = s.Patch(u, 500)
	}
	if err != nil {
		return err
	}
	return s.Cancel(u)
}

// wrongDigest ends an upload as another blob: it is refused, and nothing of it stays.
func (s *script) wrongDigest(repo string) error {
	u, err := s.Begin(repo, s.Fresh(600))
	if err != nil {
		return err
	}
	u.Ending = true
	_, err = s.Ask(http.StatusBadRequest, "PUT", u.At+"?digest="+identity.Sum([]byte("x")).String(), u.Blob.Bytes())
	u.Sent = u.Blob.Length
	if err == nil {
		s.Drop(u)
	}
	return err
}

func (s *script) untag(k rig.Key) error {
	if _, ok := s.Ledger.Names[k]; !ok {
		return nil
	}
	return s.DeleteTag(k)
}

// reindex has the server make its index anew, which forgets uploads and blobs without a manifest, and goes on. While
// that is in doubt nothing is known about those.
func (s *script) reindex() error {
	s.Forget()
	err := s.Wire.Operate("/reindex")
	if err == nil {
		s.Acked++
	}
	return err
}

// spoil damages a blob.
func (s *script) spoil(repo string, b rig.Blob) error {
	if err := s.Need(repo, b); err != nil {
		return err
	}
	s.k.Spoilt[b.Digest] = true
	delete(s.Blobs, rig.Place{Repo: repo, Digest: b.Digest})
	return s.k.Site.Flip(b.Digest, 100)
}

// healed pushes again what was set aside.
func (s *script) healed(repo string, b rig.Blob) error {
	err := s.Post(repo, b)
	if err == nil {
		delete(s.k.Spoilt, b.Digest)
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
	fmt.Fprintf(c.out, "boundaries: one in %d of %d changes, kills %d, acknowledged %d, to be sent again %d, lost %d\n",
		c.every, b.last, b.kills, b.acked, b.again, b.lost)
	return err
}

// all tries one change after another, several at a time, until the script ends before it comes to the change.
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
	err = b.at("", func(site *rig.Site) error {
		s := &script{Client: rig.NewClient(1, 1)}
		s.k = rig.NewChecker(site, []*rig.Client{s.Client})
		s.a, s.b = s.Fresh(3000), s.Fresh(400)
		err := errors.Join(s.run(ctx, "CHAOS_KILL="+at), s.k.Err())
		ended = !s.died
		b.mu.Lock()
		defer b.mu.Unlock()
		b.acked += s.Acked
		b.again += s.k.Again
		b.lost += len(s.k.Lost)
		if s.died {
			b.kills++
		}
		if err != nil {
			return fmt.Errorf("killed %s: %w", at, err)
		}
		return nil
	})
	return ended, err
}

// run does all steps with a server that has env in its environment, and with another one when that has died.
func (s *script) run(ctx context.Context, env string) error {
	defer func() { s.v.Kill() }()
	if err := s.start(ctx, env); errors.Is(err, rig.ErrEnded) {
		if err := s.revive(ctx, err); err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	for _, step := range s.steps() {
		err := step()
		if errors.Is(err, rig.ErrNoAnswer) || errors.Is(err, rig.ErrStop) {
			err = s.revive(ctx, err)
		}
		if err != nil {
			return err
		}
	}
	s.v.Kill()
	if err := s.start(ctx); err != nil {
		return err
	}
	s.k.Check(s.v, true)
	s.k.Anew(s.v)
	return nil
}

func (s *script) start(ctx context.Context, env ...string) (err error) {
	if s.v, err = s.k.Site.Start(env...); err != nil {
		return err
	}
	if err := s.v.Ready(ctx); err != nil {
		return err
	}
	s.Wire = s.v.Wire()
	return nil
}

// patience is how long a server may take to die once it does not answer.
const patience = 10 * time.Second

// revive starts a server in place of one that has killed itself, which happens once, and compares.
func (s *script) revive(ctx context.Context, cause error) error {
	select {
	case <-s.v.Ended:
	case <-time.After(patience):
		return fmt.Errorf("the server lives: %w: %s", cause, s.v.Log)
	}
	if s.died || !s.v.Killed() {
		return fmt.Errorf("the server ended by itself: %w: %s", cause, s.v.Log)
	}
	s.died = true
	if err := s.start(ctx); err != nil {
		return err
	}
	s.k.Check(s.v, true)
	return s.k.Err()
}
