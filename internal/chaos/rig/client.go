package rig

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

var (
	// ErrNoAnswer: the request may have been done or not.
	ErrNoAnswer = errors.New("no answer")
	// ErrRefused: the server said that it failed, while it was made to fail.
	ErrRefused = errors.New("refused")
)

// Client is one user of a registry. It does one thing at a time and knows what it was told.
type Client struct {
	Ledger
	ID      int
	Rand    *rand.Rand
	Wire    *Wire            // to the server that runs now
	Board   *Board           // of all clients
	Small   bool             // it sends no large blobs
	Faulty  bool             // the server is being made to fail: it may say so
	Acked   int              // changes that were acknowledged
	Codes   map[api.Code]int // what it was refused with
	Refusal Answer           // the last time

	repos []string
	count uint64 // blobs and manifests made so far
}

// repositories are shared by all clients.
var repositories = []string{"team/model", "team/other", "lab/x"}

// NewClient returns a client that has no server yet. No other client of a registry may have its id, above 0.
func NewClient(id int, seed uint64) *Client {
	return &Client{
		Ledger: newLedger(), ID: id, Rand: rand.New(rand.NewPCG(seed, uint64(id))), repos: repositories,
		Codes: map[api.Code]int{}, Board: new(Board),
	}
}

func (c *Client) repo() string { return c.repos[c.Rand.IntN(len(c.repos))] }

// Ask sends a request that must be answered with a status.
func (c *Client) Ask(status int, method, path string, body []byte, header ...string) (Answer, error) {
	a, err := c.Wire.do(method, path, body, header...)
	switch {
	case err != nil:
		return a, fmt.Errorf("%w to %s %s: %w", ErrNoAnswer, method, path, err)
	case a.Status == status:
		return a, nil
	case c.Faulty && a.Status >= 500 && a.Code() != "":
		c.Codes[a.Code()]++
		c.Refusal = a
		return a, fmt.Errorf("%w: %s %s: %s", ErrRefused, method, path, a)
	}
	return a, fmt.Errorf("%s %s: got %s, want %d", method, path, a, status)
}

// open says whether an error leaves open whether the request was done.
func open(err error) bool { return errors.Is(err, ErrNoAnswer) || errors.Is(err, ErrRefused) }

// change asks for a change of names.
func (c *Client) change(ch Change, status int, method, path string, body []byte, header ...string) error {
	_, err := c.Ask(status, method, path, body, header...)
	switch {
	case err == nil:
		c.made(ch)
		c.Acked++
	case open(err):
		c.doubts = append(c.doubts, ch)
	}
	return err
}

// Fresh makes a blob that nobody has.
func (c *Client) Fresh(size int) Blob {
	c.count++
	return newBlob(uint64(c.ID)<<40|c.count, size)
}

// size is that of a new blob: small most of the time.
func (c *Client) size() int {
	if !c.Small && c.Rand.IntN(10) == 0 {
		return 100_000 + c.Rand.IntN(900_000)
	}
	return 100 + c.Rand.IntN(20_000)
}

// keep notes how a request ended that puts a blob into a repository.
func (c *Client) keep(repo string, b Blob, err error) error {
	switch {
	case err == nil:
		c.held(repo, b)
		c.Acked++
	case open(err):
		if _, ok := c.Blobs[Place{repo, b.Digest}]; !ok {
			c.maybe[Place{repo, b.Digest}] = b
		}
	}
	return err
}

// Post pushes a blob with one request.
func (c *Client) Post(repo string, b Blob) error {
	_, err := c.Ask(http.StatusCreated, "POST", api.PathUploads(repo)+"?digest="+b.Digest.String(), b.Bytes())
	return c.keep(repo, b, err)
}

// Put pushes a blob with POST and PUT.
func (c *Client) Put(repo string, b Blob) error {
	s, err := c.Begin(repo, b)
	if err == nil {
		err = c.End(s)
	}
	return err
}

// Mount makes a blob of one repository visible in another.
func (c *Client) Mount(repo, from string, b Blob) error {
	_, err := c.Ask(http.StatusCreated, "POST", api.PathUploads(repo)+"?mount="+b.Digest.String()+"&from="+from, nil)
	return c.keep(repo, b, err)
}

// Begin opens an upload.
func (c *Client) Begin(repo string, b Blob) (*Session, error) {
	var header []string
	if c.Rand.IntN(2) == 0 {
		header = []string{api.HeaderExpectDigest, b.Digest.String(), api.HeaderExpectSize, fmt.Sprint(b.Length)}
	}
	a, err := c.Ask(http.StatusAccepted, "POST", api.PathUploads(repo), nil, header...)
	if err != nil {
		return nil, err
	}
	s := &Session{Repo: repo, At: a.header.Get("Location"), Blob: b}
	c.Sessions = append(c.Sessions, s)
	c.Acked++
	return s, nil
}

// Patch sends the next n bytes of an upload.
func (c *Client) Patch(s *Session, n int64) error {
	n = min(n, s.Blob.Length-s.Acked)
	if n == 0 {
		return nil
	}
	s.Sent = max(s.Sent, s.Acked+n)
	piece := s.Blob.Bytes()[s.Acked : s.Acked+n]
	where := fmt.Sprintf("%d-%d", s.Acked, s.Acked+n-1)
	a, err := c.Ask(http.StatusAccepted, "PATCH", s.At, piece, "Content-Range", where)
	if err != nil {
		return c.notPatched(s, err)
	}
	if got, err := received(a); err != nil || got != s.Acked+n {
		return fmt.Errorf("PATCH %s: Range %q, want %d bytes, %v", s.At, a.header.Get("Range"), s.Acked+n, err)
	}
	s.Acked += n
	c.Acked++
	return nil
}

// notPatched notes what a server that failed says about an upload: one for which there was no space is gone.
func (c *Client) notPatched(s *Session, err error) error {
	s.unsure = true
	if errors.Is(err, ErrRefused) && c.Refusal.Code() == api.CodeStoreFull {
		c.Drop(s)
	}
	return err
}

// locate asks where an upload is of which a request got no good answer. It is an error if bytes that were acknowledged
// are gone, and gone says that the upload has ended, as it was asked to.
func (c *Client) locate(s *Session) (gone bool, err error) {
	a, err := c.Wire.do("GET", s.At, nil)
	if err != nil {
		return false, fmt.Errorf("%w to GET %s: %w", ErrNoAnswer, s.At, err)
	}
	if a.Status == http.StatusNotFound && s.Ending {
		c.Drop(s)
		return true, nil
	}
	n, err := received(a)
	if a.Status != http.StatusNoContent || err != nil || n < s.Acked || n > s.Sent {
		c.Drop(s)
		return true, fmt.Errorf("upload %s: %s, %d bytes, acknowledged %d, sent %d", s.At, a, n, s.Acked, s.Sent)
	}
	s.Acked, s.Ending, s.commits, s.unsure = n, false, false, false
	return false, nil
}

// received reads how many bytes of an upload the server has.
func received(a Answer) (int64, error) {
	var first, last int64
	if _, err := fmt.Sscanf(a.header.Get("Range"), "%d-%d", &first, &last); err != nil || first != 0 {
		return 0, fmt.Errorf("an upload has the Range %q", a.header.Get("Range"))
	}
	if last == 0 {
		return 0, nil // the range of nothing looks like that of one byte, which no client here sends
	}
	return last + 1, nil
}

// End sends the rest of an upload and closes it.
func (c *Client) End(s *Session) error {
	s.Sent = s.Blob.Length
	rest := s.Blob.Bytes()[s.Acked:]
	var header []string
	if s.Acked > 0 && len(rest) > 0 {
		header = []string{"Content-Range", fmt.Sprintf("%d-%d", s.Acked, s.Blob.Length-1)}
	}
	a, err := c.Ask(http.StatusCreated, "PUT", s.At+"?digest="+s.Blob.Digest.String(), rest, header...)
	switch {
	case err == nil:
		c.Drop(s)
	case open(err):
		s.Ending, s.commits, s.refused = true, true, errors.Is(err, ErrRefused)
		err = c.notPatched(s, err)
	case s.refused && a.Status == http.StatusNotFound:
		c.Drop(s) // it became a blob when the server said that it failed
		return c.Post(s.Repo, s.Blob)
	}
	return c.keep(s.Repo, s.Blob, err)
}

// Cancel drops an upload.
func (c *Client) Cancel(s *Session) error {
	a, err := c.Ask(http.StatusNoContent, "DELETE", s.At, nil)
	switch {
	case err == nil:
		c.Drop(s)
		c.Acked++
		_, err = c.Ask(http.StatusNotFound, "GET", s.At, nil)
	case open(err):
		s.Ending, s.refused, s.unsure = true, errors.Is(err, ErrRefused), true
	case s.refused && a.Status == http.StatusNotFound:
		c.Drop(s)
		return nil
	}
	return err
}

// Drop forgets an upload.
func (c *Client) Drop(s *Session) {
	c.Sessions = slices.DeleteFunc(c.Sessions, func(o *Session) bool { return o == s })
}

// Need makes a blob visible in a repository, in one way or another.
func (c *Client) Need(repo string, b Blob) error {
	if _, ok := c.Blobs[Place{repo, b.Digest}]; ok {
		return nil
	}
	for p := range c.Blobs {
		if p.Digest == b.Digest && p.Repo != repo {
			return c.Mount(repo, p.Repo, b)
		}
	}
	if c.Rand.IntN(2) == 0 {
		return c.Post(repo, b)
	}
	return c.Put(repo, b)
}

// PutManifest puts a manifest by its digest, or by the first of some tags, and points the others to it too.
func (c *Client) PutManifest(m Manifest, byDigest bool, tags ...string) error {
	c.manifests[m.Digest] = m
	ch := Change{{m.Repo, m.Digest.String()}: m.Digest}
	for _, t := range tags {
		ch[Key{m.Repo, t}] = m.Digest
	}
	ref := m.Digest.String()
	if !byDigest && len(tags) > 0 {
		ref, tags = tags[0], tags[1:]
	}
	query := ""
	if len(tags) > 0 {
		query = "?tag=" + strings.Join(tags, "&tag=")
	}
	path := api.PathManifest(m.Repo, ref) + query
	return c.change(ch, http.StatusCreated, "PUT", path, m.body, "Content-Type", m.mediaType)
}

// Base pushes what a new base needs, and its manifest.
func (c *Client) Base(repo string, shards int, tags ...string) (m Manifest, err error) {
	if err := c.Need(repo, empty); err != nil {
		return m, err
	}
	var set []Blob
	for range shards {
		b := c.Fresh(c.size())
		if err := c.Need(repo, b); err != nil {
			return m, err
		}
		set = append(set, b)
	}
	c.count++
	if m, err = baseOf(repo, mark(c.ID, c.count), set); err != nil {
		return m, err
	}
	c.Board.swap(m)
	return m, c.PutManifest(m, c.Rand.IntN(2) == 0, tags...)
}

// Adapter puts a manifest that says that it was made from a base.
func (c *Client) Adapter(of Manifest) error {
	weights := c.Fresh(1000)
	for _, b := range []Blob{empty, weights} {
		if err := c.Need(of.Repo, b); err != nil {
			return err
		}
	}
	c.count++
	name := map[string]string{api.AnnotationFilepath: "adapter_model.safetensors"}
	m, err := document{
		ArtifactType: api.ArtifactTypeAdapter, Subject: of.descriptor(),
		Layers:      []descriptor{{api.MediaTypeWeight, weights.Digest, weights.Length, name}},
		Annotations: map[string]string{"mark": mark(c.ID, c.count)},
	}.manifest(of.Repo)
	if err != nil {
		return err
	}
	return c.PutManifest(m, true)
}

// List puts an index of manifests.
func (c *Client) List(of ...Manifest) error {
	c.count++
	d := document{Annotations: map[string]string{"mark": mark(c.ID, c.count)}}
	for _, m := range of {
		d.Manifests = append(d.Manifests, *m.descriptor())
	}
	m, err := d.manifest(of[0].Repo)
	if err != nil {
		return err
	}
	return c.PutManifest(m, true)
}

// DeleteTag takes a tag away.
func (c *Client) DeleteTag(k Key) error {
	return c.change(Change{k: {}}, http.StatusAccepted, "DELETE", api.PathManifest(k.Repo, k.Name), nil)
}

// DeleteManifest takes a manifest away, and the tags that name it.
func (c *Client) DeleteManifest(m Manifest) error {
	ch := Change{}
	for k, d := range c.Names {
		if k.Repo == m.Repo && d == m.Digest {
			ch[k] = identity.Digest{}
		}
	}
	moved := c.moving(ch)
	err := c.change(ch, http.StatusAccepted, "DELETE", api.PathManifest(m.Repo, m.Digest.String()), nil)
	if err == nil {
		c.doubts = append(c.doubts, moved...)
	}
	return err
}

// deleteBlob takes a blob out of a repository, of which no manifest refers to it.
func (c *Client) deleteBlob(repo string, b Blob) error {
	p := Place{repo, b.Digest}
	_, err := c.Ask(http.StatusAccepted, "DELETE", api.PathBlob(repo, b.Digest), nil)
	switch {
	case err == nil:
		delete(c.Blobs, p)
		delete(c.maybe, p)
		c.gone[p] = true
		c.Acked++
	case open(err):
		delete(c.Blobs, p)
		c.maybe[p] = b
	}
	return err
}

// Pull reads a manifest and its layers, and checks every byte.
func (c *Client) Pull(m Manifest, ref string) error {
	a, err := c.Ask(http.StatusOK, "GET", api.PathManifest(m.Repo, ref), nil)
	if err != nil {
		return err
	}
	if a.Broken != nil {
		return fmt.Errorf("%w to the end: %w", ErrNoAnswer, a.Broken)
	}
	if string(a.Body) != string(m.body) {
		return fmt.Errorf("manifest %s of %s: other bytes", ref, m.Repo)
	}
	for p, b := range c.Blobs {
		if p.Repo != m.Repo || !strings.Contains(string(m.body), b.Digest.Hex()) {
			continue
		}
		if err := c.pullBlob(m.Repo, b); err != nil {
			return err
		}
	}
	return nil
}

func (c *Client) pullBlob(repo string, b Blob) error {
	a, err := c.Ask(http.StatusOK, "GET", api.PathBlob(repo, b.Digest), nil)
	if err != nil {
		return err
	}
	if a.Broken != nil {
		return fmt.Errorf("%w to the end: %w", ErrNoAnswer, a.Broken)
	}
	if identity.Sum(a.Body) != b.Digest {
		return fmt.Errorf("blob %s of %s: other bytes", b.Digest, repo)
	}
	return nil
}

// find asks who holds the bytes of a base.
func (c *Client) find(m Manifest) error {
	a, err := c.Ask(http.StatusOK, "GET", api.PathBase(m.base), nil)
	if err == nil && a.Broken == nil && !strings.Contains(string(a.Body), m.Digest.Hex()) {
		err = fmt.Errorf("find %s: %s lacks %s", m.base, a, m.Digest)
	}
	return err
}
