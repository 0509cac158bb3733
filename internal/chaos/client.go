package main

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
	// errNoAnswer: the request may have been done or not.
	errNoAnswer = errors.New("no answer")
	// errRefused: the server said that it failed, while it was made to fail.
	errRefused = errors.New("refused")
)

// client is one user of a registry. It does one thing at a time and knows what it was told.
type client struct {
	ledger
	id     int
	rng    *rand.Rand
	wire   *wire
	repos  []string
	board  *board // of all clients
	count  uint64 // blobs and manifests made so far
	acked  int    // changes that were acknowledged
	small  bool   // it sends no large blobs
	faulty bool   // the server is being made to fail: it may say so
	codes  map[api.Code]int
	refuse answer // the last answer to be refused with
}

// repositories are shared by all clients.
var repositories = []string{"team/model", "team/other", "lab/x"}

func newClient(id int, seed uint64) *client {
	return &client{
		ledger: newLedger(), id: id, rng: rand.New(rand.NewPCG(seed, uint64(id))), repos: repositories,
		codes: map[api.Code]int{}, board: new(board),
	}
}

func (c *client) repo() string { return c.repos[c.rng.IntN(len(c.repos))] }

// ask sends a request that must be answered with a status.
func (c *client) ask(status int, method, path string, body []byte, header ...string) (answer, error) {
	a, err := c.wire.do(method, path, body, header...)
	switch {
	case err != nil:
		return a, fmt.Errorf("%w to %s %s: %w", errNoAnswer, method, path, err)
	case a.status == status:
		return a, nil
	case c.faulty && a.status >= 500 && a.code() != "":
		c.codes[a.code()]++
		c.refuse = a
		return a, fmt.Errorf("%w: %s %s: %s", errRefused, method, path, a)
	}
	return a, fmt.Errorf("%s %s: got %s, want %d", method, path, a, status)
}

// open says whether an error leaves open whether the request was done.
func open(err error) bool { return errors.Is(err, errNoAnswer) || errors.Is(err, errRefused) }

// change asks for a change of names.
func (c *client) change(ch change, status int, method, path string, body []byte, header ...string) error {
	_, err := c.ask(status, method, path, body, header...)
	switch {
	case err == nil:
		c.made(ch)
		c.acked++
	case open(err):
		c.doubts = append(c.doubts, ch)
	}
	return err
}

// fresh makes a blob that nobody has.
func (c *client) fresh(size int) blob {
	c.count++
	return newBlob(uint64(c.id)<<40|c.count, size)
}

// size is that of a new blob: small most of the time.
func (c *client) size() int {
	if !c.small && c.rng.IntN(10) == 0 {
		return 100_000 + c.rng.IntN(900_000)
	}
	return 100 + c.rng.IntN(20_000)
}

// keep notes how a request ended that puts a blob into a repository.
func (c *client) keep(repo string, b blob, err error) error {
	switch {
	case err == nil:
		c.held(repo, b)
		c.acked++
	case open(err):
		if _, ok := c.blobs[place{repo, b.digest}]; !ok {
			c.maybe[place{repo, b.digest}] = b
		}
	}
	return err
}

// post pushes a blob with one request.
func (c *client) post(repo string, b blob) error {
	_, err := c.ask(http.StatusCreated, "POST", api.PathUploads(repo)+"?digest="+b.digest.String(), b.bytes())
	return c.keep(repo, b, err)
}

// put pushes a blob with POST and PUT.
func (c *client) put(repo string, b blob) error {
	s, err := c.begin(repo, b)
	if err == nil {
		err = c.end(s)
	}
	return err
}

// mount makes a blob of one repository visible in another.
func (c *client) mount(repo, from string, b blob) error {
	_, err := c.ask(http.StatusCreated, "POST", api.PathUploads(repo)+"?mount="+b.digest.String()+"&from="+from, nil)
	return c.keep(repo, b, err)
}

// begin opens an upload.
func (c *client) begin(repo string, b blob) (*session, error) {
	var header []string
	if c.rng.IntN(2) == 0 {
		header = []string{api.HeaderExpectDigest, b.digest.String(), api.HeaderExpectSize, fmt.Sprint(b.length)}
	}
	a, err := c.ask(http.StatusAccepted, "POST", api.PathUploads(repo), nil, header...)
	if err != nil {
		return nil, err
	}
	s := &session{repo: repo, at: a.header.Get("Location"), blob: b}
	c.sessions = append(c.sessions, s)
	c.acked++
	return s, nil
}

// patch sends the next n bytes of an upload.
func (c *client) patch(s *session, n int64) error {
	n = min(n, s.blob.length-s.acked)
	if n == 0 {
		return nil
	}
	s.sent = max(s.sent, s.acked+n)
	piece := s.blob.bytes()[s.acked : s.acked+n]
	a, err := c.ask(http.StatusAccepted, "PATCH", s.at, piece, "Content-Range", fmt.Sprintf("%d-%d", s.acked, s.acked+n-1))
	if err != nil {
		return c.notPatched(s, err)
	}
	if got, err := received(a); err != nil || got != s.acked+n {
		return fmt.Errorf("PATCH %s: Range %q, want %d bytes, %v", s.at, a.header.Get("Range"), s.acked+n, err)
	}
	s.acked += n
	c.acked++
	return nil
}

// notPatched notes what a server that failed says about an upload: one for which there was no space is gone.
func (c *client) notPatched(s *session, err error) error {
	s.unsure = true
	if errors.Is(err, errRefused) && c.refuse.code() == api.CodeStoreFull {
		c.drop(s)
	}
	return err
}

// locate asks where an upload is of which a request got no good answer. It is an error if bytes that were acknowledged are
// gone, and gone says that the upload has ended, as it was asked to.
func (c *client) locate(s *session) (gone bool, err error) {
	a, err := c.wire.do("GET", s.at, nil)
	if err != nil {
		return false, fmt.Errorf("%w to GET %s: %w", errNoAnswer, s.at, err)
	}
	if a.status == http.StatusNotFound && s.ending {
		c.drop(s)
		return true, nil
	}
	n, err := received(a)
	if a.status != http.StatusNoContent || err != nil || n < s.acked || n > s.sent {
		c.drop(s)
		return true, fmt.Errorf("upload %s: %s, %d bytes, acknowledged %d, sent %d", s.at, a, n, s.acked, s.sent)
	}
	s.acked, s.ending, s.unsure = n, false, false
	return false, nil
}

// received reads how many bytes of an upload the server has.
func received(a answer) (int64, error) {
	var first, last int64
	if _, err := fmt.Sscanf(a.header.Get("Range"), "%d-%d", &first, &last); err != nil || first != 0 {
		return 0, fmt.Errorf("Range %q", a.header.Get("Range"))
	}
	if last == 0 {
		return 0, nil // the range of nothing looks like that of one byte, which no client here sends
	}
	return last + 1, nil
}

// end sends the rest of an upload and closes it.
func (c *client) end(s *session) error {
	s.sent = s.blob.length
	rest := s.blob.bytes()[s.acked:]
	var header []string
	if s.acked > 0 && len(rest) > 0 {
		header = []string{"Content-Range", fmt.Sprintf("%d-%d", s.acked, s.blob.length-1)}
	}
	a, err := c.ask(http.StatusCreated, "PUT", s.at+"?digest="+s.blob.digest.String(), rest, header...)
	switch {
	case err == nil:
		c.drop(s)
	case open(err):
		s.ending, s.commits, s.refused = true, true, errors.Is(err, errRefused)
		err = c.notPatched(s, err)
	case s.refused && a.status == http.StatusNotFound:
		c.drop(s) // it became a blob when the server said that it failed
		return c.post(s.repo, s.blob)
	}
	return c.keep(s.repo, s.blob, err)
}

// cancel drops an upload.
func (c *client) cancel(s *session) error {
	a, err := c.ask(http.StatusNoContent, "DELETE", s.at, nil)
	switch {
	case err == nil:
		c.drop(s)
		c.acked++
		_, err = c.ask(http.StatusNotFound, "GET", s.at, nil)
	case open(err):
		s.ending, s.refused, s.unsure = true, errors.Is(err, errRefused), true
	case s.refused && a.status == http.StatusNotFound:
		c.drop(s)
		return nil
	}
	return err
}

func (c *client) drop(s *session) {
	c.sessions = slices.DeleteFunc(c.sessions, func(o *session) bool { return o == s })
}

// need makes a blob visible in a repository, in one way or another.
func (c *client) need(repo string, b blob) error {
	if _, ok := c.blobs[place{repo, b.digest}]; ok {
		return nil
	}
	for p := range c.blobs {
		if p.digest == b.digest && p.repo != repo {
			return c.mount(repo, p.repo, b)
		}
	}
	if c.rng.IntN(2) == 0 {
		return c.post(repo, b)
	}
	return c.put(repo, b)
}

// putManifest puts a manifest by its digest, or by the first of some tags, and points the others to it too.
func (c *client) putManifest(m manifest, byDigest bool, tags ...string) error {
	c.manifests[m.digest] = m
	ch := change{{m.repo, m.digest.String()}: m.digest}
	for _, t := range tags {
		ch[key{m.repo, t}] = m.digest
	}
	ref := m.digest.String()
	if !byDigest && len(tags) > 0 {
		ref, tags = tags[0], tags[1:]
	}
	query := ""
	if len(tags) > 0 {
		query = "?tag=" + strings.Join(tags, "&tag=")
	}
	return c.change(ch, http.StatusCreated, "PUT", api.PathManifest(m.repo, ref)+query, m.body, "Content-Type", m.mediaType)
}

// base pushes what a new base needs, and its manifest.
func (c *client) base(repo string, shards int, tags ...string) (m manifest, err error) {
	if err := c.need(repo, empty); err != nil {
		return m, err
	}
	var set []blob
	for range shards {
		b := c.fresh(c.size())
		if err := c.need(repo, b); err != nil {
			return m, err
		}
		set = append(set, b)
	}
	c.count++
	if m, err = baseOf(repo, mark(c.id, c.count), set); err != nil {
		return m, err
	}
	c.board.swap(m)
	return m, c.putManifest(m, c.rng.IntN(2) == 0, tags...)
}

// adapter puts a manifest that says that it was made from a base.
func (c *client) adapter(of manifest) error {
	weights := c.fresh(1000)
	for _, b := range []blob{empty, weights} {
		if err := c.need(of.repo, b); err != nil {
			return err
		}
	}
	c.count++
	name := map[string]string{api.AnnotationFilepath: "adapter_model.safetensors"}
	m, err := document{
		ArtifactType: api.ArtifactTypeAdapter, Subject: of.descriptor(),
		Layers:      []descriptor{{api.MediaTypeWeight, weights.digest, weights.length, name}},
		Annotations: map[string]string{"mark": mark(c.id, c.count)},
	}.manifest(of.repo)
	if err != nil {
		return err
	}
	return c.putManifest(m, true)
}

// list puts an index of manifests.
func (c *client) list(of ...manifest) error {
	c.count++
	d := document{Annotations: map[string]string{"mark": mark(c.id, c.count)}}
	for _, m := range of {
		d.Manifests = append(d.Manifests, *m.descriptor())
	}
	m, err := d.manifest(of[0].repo)
	if err != nil {
		return err
	}
	return c.putManifest(m, true)
}

// deleteTag takes a tag away.
func (c *client) deleteTag(k key) error {
	return c.change(change{k: {}}, http.StatusAccepted, "DELETE", api.PathManifest(k.repo, k.name), nil)
}

// deleteManifest takes a manifest away, and the tags that name it.
func (c *client) deleteManifest(m manifest) error {
	ch := change{}
	for k, d := range c.names {
		if k.repo == m.repo && d == m.digest {
			ch[k] = identity.Digest{}
		}
	}
	return c.change(ch, http.StatusAccepted, "DELETE", api.PathManifest(m.repo, m.digest.String()), nil)
}

// deleteBlob takes a blob out of a repository, of which no manifest refers to it.
func (c *client) deleteBlob(repo string, b blob) error {
	p := place{repo, b.digest}
	_, err := c.ask(http.StatusAccepted, "DELETE", api.PathBlob(repo, b.digest), nil)
	switch {
	case err == nil:
		delete(c.blobs, p)
		delete(c.maybe, p)
		c.gone[p] = true
		c.acked++
	case open(err):
		delete(c.blobs, p)
		c.maybe[p] = b
	}
	return err
}

// pull reads a manifest and its layers, and checks every byte.
func (c *client) pull(m manifest, ref string) error {
	a, err := c.ask(http.StatusOK, "GET", api.PathManifest(m.repo, ref), nil)
	if err != nil {
		return err
	}
	if a.broken != nil {
		return fmt.Errorf("%w to the end: %w", errNoAnswer, a.broken)
	}
	if string(a.body) != string(m.body) {
		return fmt.Errorf("manifest %s of %s: other bytes", ref, m.repo)
	}
	for p, b := range c.blobs {
		if p.repo != m.repo || !strings.Contains(string(m.body), b.digest.Hex()) {
			continue
		}
		if err := c.pullBlob(m.repo, b); err != nil {
			return err
		}
	}
	return nil
}

func (c *client) pullBlob(repo string, b blob) error {
	a, err := c.ask(http.StatusOK, "GET", api.PathBlob(repo, b.digest), nil)
	if err != nil {
		return err
	}
	if a.broken != nil {
		return fmt.Errorf("%w to the end: %w", errNoAnswer, a.broken)
	}
	if identity.Sum(a.body) != b.digest {
		return fmt.Errorf("blob %s of %s: other bytes", b.digest, repo)
	}
	return nil
}

// find asks who holds the bytes of a base.
func (c *client) find(m manifest) error {
	a, err := c.ask(http.StatusOK, "GET", api.PathBase(m.base), nil)
	if err == nil && a.broken == nil && !strings.Contains(string(a.body), m.digest.Hex()) {
		err = fmt.Errorf("find %s: %s lacks %s", m.base, a, m.digest)
	}
	return err
}
