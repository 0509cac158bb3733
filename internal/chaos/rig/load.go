package rig

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
	do     func(*Client) error
}

var acts = []act{
	{10, func(c *Client) error { return c.Post(c.repo(), c.Fresh(c.size())) }},
	{10, func(c *Client) error { return c.Put(c.repo(), c.Fresh(c.size())) }},
	{20, (*Client).beginSome},
	{30, (*Client).goOn},
	{6, (*Client).mountSome},
	{20, (*Client).baseSome},
	{8, (*Client).adapterSome},
	{4, (*Client).listSome},
	{15, (*Client).moveTag},
	{5, (*Client).deleteSomeTag},
	{6, (*Client).deleteSomeManifest},
	{3, (*Client).DeleteSomeBlob},
	{12, (*Client).pullSome},
	{8, (*Client).findSome},
	{1, (*Client).collect},
}

var totalWeight = func() (sum int) {
	for _, a := range acts {
		sum += a.weight
	}
	return sum
}()

// Step does one thing, as chance has it.
func (c *Client) Step() error {
	if len(c.Bodies()) >= maxManifests {
		return c.deleteSomeManifest()
	}
	n := c.Rand.IntN(totalWeight)
	for _, a := range acts {
		if n -= a.weight; n < 0 {
			return a.do(c)
		}
	}
	return nil
}

// certain says that no change of a name, or of what it points to, is in doubt.
func (l *Ledger) certain(k Key, d identity.Digest) bool {
	for _, doubt := range l.doubts {
		for about, to := range doubt {
			if about == k || to == d || about == (Key{k.Repo, d.String()}) {
				return false
			}
		}
	}
	return true
}

// Bodies are the manifests that are certainly there, in order of digest, so that a choice among them depends on chance
// alone.
func (c *Client) Bodies() (found []Manifest) {
	for k, d := range c.Names {
		if k.Name == d.String() && c.certain(k, d) {
			found = append(found, c.manifests[d])
		}
	}
	slices.SortFunc(found, func(a, b Manifest) int { return strings.Compare(string(a.Digest[:]), string(b.Digest[:])) })
	return found
}

// bases are those of bodies that are bases.
func (c *Client) bases() []Manifest {
	return slices.DeleteFunc(c.Bodies(), func(m Manifest) bool { return m.base.IsZero() })
}

func pick[T any](c *Client, from []T) (one T, ok bool) {
	if len(from) == 0 {
		return one, false
	}
	return from[c.Rand.IntN(len(from))], true
}

func (c *Client) tag() string { return fmt.Sprintf("c%d-t%d", c.ID, c.Rand.IntN(tagsPerRepo)) }

func (c *Client) beginSome() error {
	if len(c.Sessions) >= maxSessions {
		return c.goOn()
	}
	s, err := c.Begin(c.repo(), c.Fresh(c.size()))
	if err != nil || c.Rand.IntN(3) == 0 {
		return err
	}
	return c.Patch(s, 2+c.Rand.Int64N(s.Blob.Length))
}

// goOn sends more of an open upload, ends it or cancels it.
func (c *Client) goOn() error {
	s, ok := pick(c, c.Sessions)
	if !ok {
		return c.beginSome()
	}
	if s.unsure {
		if gone, err := c.locate(s); gone || err != nil {
			return err
		}
	}
	switch n := c.Rand.IntN(10); {
	case n == 0:
		return c.Cancel(s)
	case n < 5 && s.Blob.Length-s.Acked > 100:
		return c.Patch(s, 2+c.Rand.Int64N(s.Blob.Length-s.Acked-50))
	}
	return c.End(s)
}

// anyBlob chooses one of the blobs that are held and were made by this client.
func (c *Client) anyBlob() (Place, Blob, bool) {
	for p, b := range c.Blobs {
		if b.Size >= 0 {
			return p, b, true
		}
	}
	return Place{}, Blob{}, false
}

func (c *Client) mountSome() error {
	p, b, ok := c.anyBlob()
	to := c.repo()
	if !ok || to == p.Repo {
		return c.Post(to, c.Fresh(c.size()))
	}
	return c.Mount(to, p.Repo, b)
}

func (c *Client) baseSome() error {
	tags := []string{c.tag(), c.tag()}
	if tags[0] == tags[1] {
		tags = tags[:c.Rand.IntN(2)]
	}
	_, err := c.Base(c.repo(), 1+c.Rand.IntN(3), tags...)
	return err
}

// Board is where clients show what they are about to put or to delete, for others to refer to just then.
type Board struct {
	mu   sync.Mutex
	last Manifest
}

// swap shows a manifest, and returns the one that was shown.
func (b *Board) swap(m Manifest) (was Manifest) {
	b.mu.Lock()
	defer b.mu.Unlock()
	was, b.last = b.last, m
	return was
}

// adapterSome puts an adapter of a base, which may be another client's, and come or go at this moment.
func (c *Client) adapterSome() error {
	m, ok := pick(c, c.bases())
	if !ok {
		return c.baseSome()
	}
	if other := c.Board.swap(m); !other.Digest.IsZero() && c.Rand.IntN(2) == 0 {
		m = other
	}
	return c.Adapter(m)
}

func (c *Client) listSome() error {
	m, ok := pick(c, c.Bodies())
	if !ok {
		return c.baseSome()
	}
	return c.List(m)
}

// moveTag points a tag to a manifest that is there.
func (c *Client) moveTag() error {
	m, ok := pick(c, c.Bodies())
	if !ok {
		return c.baseSome()
	}
	return c.PutManifest(m, false, c.tag())
}

func (c *Client) deleteSomeTag() error {
	for k, d := range c.Names {
		if k.Name != d.String() && c.certain(k, d) {
			return c.DeleteTag(k)
		}
	}
	return c.baseSome()
}

func (c *Client) deleteSomeManifest() error {
	m, ok := pick(c, c.Bodies())
	if !ok {
		return c.baseSome()
	}
	if !m.base.IsZero() {
		c.Board.swap(m)
	}
	return c.DeleteManifest(m)
}

// DeleteSomeBlob pushes a blob and deletes it.
func (c *Client) DeleteSomeBlob() error {
	b, repo := c.Fresh(c.size()), c.repo()
	if err := c.Post(repo, b); err != nil {
		return err
	}
	return c.deleteBlob(repo, b)
}

func (c *Client) pullSome() error {
	m, ok := pick(c, c.Bodies())
	if !ok {
		return c.baseSome()
	}
	ref := m.Digest.String()
	for k, d := range c.Names {
		if k.Repo == m.Repo && d == m.Digest && c.certain(k, d) {
			ref = k.Name
			break
		}
	}
	return c.Pull(m, ref)
}

func (c *Client) findSome() error {
	m, ok := pick(c, c.bases())
	if !ok {
		return c.baseSome()
	}
	return c.find(m)
}

// collect has the collector run, unless it does already. It may fail where changes fail.
func (c *Client) collect() error {
	err := c.Wire.Collect()
	if err != nil && !errors.Is(err, ErrNoAnswer) && (c.Faulty || strings.Contains(err.Error(), `"reason":"running"`)) {
		return nil
	}
	return err
}

// Lists says whether a manifest refers to a blob.
func (m Manifest) Lists(d identity.Digest) bool { return strings.Contains(string(m.body), d.Hex()) }
