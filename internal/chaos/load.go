package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/kiln-registry/kiln-registry/identity"
)

// What a client keeps at a time, so that a registry does not grow with the length of a run.
const (
	maxManifests = 8
	maxSessions  = 3
	tagsPerRepo  = 3
)

// act is one thing that a client may do, and how often it does it.
type act struct {
	weight int
	do     func(*client) error
}

var acts = []act{
	{10, func(c *client) error { return c.post(c.repo(), c.fresh(c.size())) }},
	{10, func(c *client) error { return c.put(c.repo(), c.fresh(c.size())) }},
	{20, (*client).beginSome},
	{30, (*client).goOn},
	{6, (*client).mountSome},
	{20, (*client).baseSome},
	{8, (*client).adapterSome},
	{4, (*client).listSome},
	{15, (*client).moveTag},
	{5, (*client).deleteSomeTag},
	{6, (*client).deleteSomeManifest},
	{3, (*client).deleteSomeBlob},
	{12, (*client).pullSome},
	{8, (*client).findSome},
	{1, (*client).collect},
}

var totalWeight = func() (sum int) {
	for _, a := range acts {
		sum += a.weight
	}
	return sum
}()

// step does one thing, as chance has it.
func (c *client) step() error {
	if len(c.bodies()) >= maxManifests {
		return c.deleteSomeManifest()
	}
	n := c.rng.IntN(totalWeight)
	for _, a := range acts {
		if n -= a.weight; n < 0 {
			return a.do(c)
		}
	}
	return nil
}

// certain says that no change of a name, or of what it points to, is in doubt.
func (l *ledger) certain(k key, d identity.Digest) bool {
	for _, doubt := range l.doubts {
		for about, to := range doubt {
			if about == k || to == d || about == (key{k.repo, d.String()}) {
				return false
			}
		}
	}
	return true
}

// bodies are the manifests that are certainly there, in order of digest, which makes a choice among them depend on chance
// alone.
func (c *client) bodies() (found []manifest) {
	for k, d := range c.names {
		if k.name == d.String() && c.certain(k, d) {
			found = append(found, c.manifests[d])
		}
	}
	slices.SortFunc(found, func(a, b manifest) int { return strings.Compare(string(a.digest[:]), string(b.digest[:])) })
	return found
}

// bases are those of bodies that are bases.
func (c *client) bases() []manifest {
	return slices.DeleteFunc(c.bodies(), func(m manifest) bool { return m.base.IsZero() })
}

func pick[T any](c *client, from []T) (one T, ok bool) {
	if len(from) == 0 {
		return one, false
	}
	return from[c.rng.IntN(len(from))], true
}

func (c *client) tag() string { return fmt.Sprintf("c%d-t%d", c.id, c.rng.IntN(tagsPerRepo)) }

func (c *client) beginSome() error {
	if len(c.sessions) >= maxSessions {
		return c.goOn()
	}
	s, err := c.begin(c.repo(), c.fresh(c.size()))
	if err != nil || c.rng.IntN(3) == 0 {
		return err
	}
	return c.patch(s, 2+c.rng.Int64N(s.blob.length))
}

// goOn sends more of an open upload, ends it or cancels it.
func (c *client) goOn() error {
	s, ok := pick(c, c.sessions)
	if !ok {
		return c.beginSome()
	}
	if s.unsure {
		if gone, err := c.locate(s); gone || err != nil {
			return err
		}
	}
	switch n := c.rng.IntN(10); {
	case n == 0:
		return c.cancel(s)
	case n < 5 && s.blob.length-s.acked > 100:
		return c.patch(s, 2+c.rng.Int64N(s.blob.length-s.acked-50))
	}
	return c.end(s)
}

// anyBlob chooses one of the blobs that are held and were made by this client.
func (c *client) anyBlob() (place, blob, bool) {
	for p, b := range c.blobs {
		if b.size >= 0 {
			return p, b, true
		}
	}
	return place{}, blob{}, false
}

func (c *client) mountSome() error {
	p, b, ok := c.anyBlob()
	to := c.repo()
	if !ok || to == p.repo {
		return c.post(to, c.fresh(c.size()))
	}
	return c.mount(to, p.repo, b)
}

func (c *client) baseSome() error {
	tags := []string{c.tag(), c.tag()}
	if tags[0] == tags[1] {
		tags = tags[:c.rng.IntN(2)]
	}
	_, err := c.base(c.repo(), 1+c.rng.IntN(3), tags...)
	return err
}

// board is where clients show what they are about to put or to delete, for others to refer to just then.
type board struct {
	mu   sync.Mutex
	last manifest
}

// swap shows a manifest, and returns the one that was shown.
func (b *board) swap(m manifest) (was manifest) {
	b.mu.Lock()
	defer b.mu.Unlock()
	was, b.last = b.last, m
	return was
}

// adapterSome puts an adapter of a base, which may be another client's, and come or go at this moment.
func (c *client) adapterSome() error {
	m, ok := pick(c, c.bases())
	if !ok {
		return c.baseSome()
	}
	if other := c.board.swap(m); !other.digest.IsZero() && c.rng.IntN(2) == 0 {
		m = other
	}
	return c.adapter(m)
}

func (c *client) listSome() error {
	m, ok := pick(c, c.bodies())
	if !ok {
		return c.baseSome()
	}
	return c.list(m)
}

// moveTag points a tag to a manifest that is there.
func (c *client) moveTag() error {
	m, ok := pick(c, c.bodies())
	if !ok {
		return c.baseSome()
	}
	return c.putManifest(m, false, c.tag())
}

func (c *client) deleteSomeTag() error {
	for k, d := range c.names {
		if k.name != d.String() && c.certain(k, d) {
			return c.deleteTag(k)
		}
	}
	return c.baseSome()
}

func (c *client) deleteSomeManifest() error {
	m, ok := pick(c, c.bodies())
	if !ok {
		return c.baseSome()
	}
	if !m.base.IsZero() {
		c.board.swap(m)
	}
	return c.deleteManifest(m)
}

func (c *client) deleteSomeBlob() error {
	b, repo := c.fresh(c.size()), c.repo()
	if err := c.post(repo, b); err != nil {
		return err
	}
	return c.deleteBlob(repo, b)
}

func (c *client) pullSome() error {
	m, ok := pick(c, c.bodies())
	if !ok {
		return c.baseSome()
	}
	ref := m.digest.String()
	for k, d := range c.names {
		if k.repo == m.repo && d == m.digest && c.certain(k, d) {
			ref = k.name
			break
		}
	}
	return c.pull(m, ref)
}

func (c *client) findSome() error {
	m, ok := pick(c, c.bases())
	if !ok {
		return c.baseSome()
	}
	return c.find(m)
}

// collect has the collector run, unless it does already. It may fail where changes fail.
func (c *client) collect() error {
	err := c.wire.collect()
	if err != nil && !errors.Is(err, errNoAnswer) && (c.faulty || strings.Contains(err.Error(), `"reason":"running"`)) {
		return nil
	}
	return err
}

// lists says whether a manifest refers to a blob.
func (m manifest) lists(d identity.Digest) bool { return strings.Contains(string(m.body), d.Hex()) }
