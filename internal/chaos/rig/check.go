package rig

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
)

// Verdict is what a run found. It is safe for concurrent use.
type Verdict struct {
	Lost  []string // what was acknowledged and is not there as it was
	Again int      // uploads that have to be sent again as their last request got no answer

	mu  sync.Mutex
	bad []string // all else that must not be
}

// Lose notes that something which was acknowledged is not there as it was.
func (v *Verdict) Lose(format string, args ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.Lost = append(v.Lost, fmt.Sprintf(format, args...))
}

// blame notes anything else that must not be.
func (v *Verdict) blame(format string, args ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.bad = append(v.bad, fmt.Sprintf(format, args...))
}

// Err is nil if nothing was found.
func (v *Verdict) Err() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.Lost)+len(v.bad) == 0 {
		return nil
	}
	const most = 20
	var text []string
	for _, s := range v.Lost {
		text = append(text, "lost: "+s)
	}
	for _, s := range v.bad {
		text = append(text, "wrong: "+s)
	}
	if more := len(text) - most; more > 0 {
		text = append(text[:most], fmt.Sprintf("and %d more", more))
	}
	return errors.New(strings.Join(text, "\n"))
}

// Checker compares a registry with what its clients were told. It remembers what it has compared, as nothing that was
// once durable changes by itself: only a full check looks at everything again.
type Checker struct {
	Verdict
	Site   *Site
	Spoilt map[identity.Digest]bool // damaged on purpose, and not yet healed

	clients []*Client
	seen    map[any]bool
	files   map[identity.Digest]fs.FileInfo // of the store's folder, as they were when they were hashed
}

// NewChecker returns a checker of what a site's registry tells its clients.
func NewChecker(s *Site, clients []*Client) *Checker {
	return &Checker{
		Site: s, clients: clients, seen: map[any]bool{}, files: map[identity.Digest]fs.FileInfo{},
		Spoilt: map[identity.Digest]bool{},
	}
}

// parallel is how many requests a check has under way.
const parallel = 8

// each calls the tasks, some at a time.
func each(tasks []func()) {
	var wg sync.WaitGroup
	room := make(chan struct{}, parallel)
	for _, task := range tasks {
		room <- struct{}{}
		wg.Go(func() {
			task()
			<-room
		})
	}
	wg.Wait()
}

// Check looks at a server that has just started. Nothing else may use it.
func (k *Checker) Check(v *Server, full bool) {
	if full {
		clear(k.seen)
		clear(k.files)
	}
	w := v.Wire()
	defer w.Close()
	rows, err := w.export()
	if err != nil {
		k.blame("%v", err)
		return
	}
	k.names(namesOf(rows))
	tasks := k.listings(w, rows)
	for _, r := range rows {
		if r.Type == "manifest" && k.isNew(r.Repository+r.Digest.Hex()) {
			tasks = append(tasks, func() { k.manifest(w, r) })
		}
	}
	for _, c := range k.clients {
		tasks = append(tasks, k.blobs(w, c)...)
		tasks = append(tasks, k.finds(w, c)...)
		tasks = append(tasks, func() { k.sessions(w, c) })
	}
	each(tasks)
	if folder := k.Site.Folder(); folder != "" {
		k.folder(folder)
	}
	for _, line := range v.Log.wrong() {
		k.blame("the log says: %s", line)
	}
}

// isNew says whether something was not looked at before.
func (k *Checker) isNew(what any) bool {
	was := k.seen[what]
	k.seen[what] = true
	return !was
}

// names compares all names that there are with all that were acknowledged.
func (k *Checker) names(seen Names) {
	want := Names{}
	for _, c := range k.clients {
		for _, text := range c.settle(seen) {
			k.blame("client %d: %s", c.ID, text)
		}
		maps.Copy(want, c.Ledger.Names)
	}
	for name, d := range want {
		if seen[name] != d {
			k.Lose("%s:%s is %s, acknowledged was %s", name.Repo, name.Name, seen[name], d)
		}
	}
	for name, d := range seen {
		if _, ok := want[name]; !ok {
			k.Lose("%s:%s is %s, acknowledged was that it is deleted", name.Repo, name.Name, d)
		}
	}
}

// listings compares the lists of tags with the export.
func (k *Checker) listings(w *Wire, rows []index.Row) (tasks []func()) {
	for _, repo := range repositories {
		want, exists := []string{}, false
		for _, r := range rows {
			exists = exists || r.Repository == repo
			if r.Repository == repo && r.Type == "tag" {
				want = append(want, r.Tag)
			}
		}
		if !exists {
			continue
		}
		tasks = append(tasks, func() {
			var list api.TagList
			if err := w.JSON(api.PathTags(repo), &list); err != nil || !slices.Equal(list.Tags, want) {
				k.Lose("tags of %s: %q, want %q, %v", repo, list.Tags, want, err)
			}
		})
	}
	return tasks
}

// manifest checks that a manifest is whole, and all that it refers to.
func (k *Checker) manifest(w *Wire, r index.Row) {
	a, err := w.do("GET", api.PathManifest(r.Repository, r.Digest.String()), nil)
	if err != nil || a.Broken != nil || a.Status != http.StatusOK || identity.Sum(a.Body) != r.Digest {
		k.Lose("manifest %s of %s: %s, %v, %v", r.Digest, r.Repository, a, err, a.Broken)
		return
	}
	for _, d := range r.Refers {
		a, err := w.do("HEAD", api.PathBlob(r.Repository, d), nil)
		if err != nil || a.Status != http.StatusOK {
			k.Lose("manifest %s of %s is not complete: blob %s: %d, %v", r.Digest, r.Repository, d, a.Status, err)
		}
	}
}

// blobs checks which blobs a client finds. One in doubt is taken for what it is found to be.
func (k *Checker) blobs(w *Wire, c *Client) (tasks []func()) {
	for p, b := range c.Ledger.Blobs {
		if k.isNew(p) {
			tasks = append(tasks, func() { k.blob(w, p, b) })
		}
	}
	for p := range c.gone {
		if !k.isNew(struct{ Place }{p}) {
			continue
		}
		tasks = append(tasks, func() {
			if a, err := w.do("HEAD", api.PathBlob(p.Repo, p.Digest), nil); err != nil || a.Status != http.StatusNotFound {
				k.Lose("blob %s of %s: %d, %v, acknowledged was that it is deleted", p.Digest, p.Repo, a.Status, err)
			}
		})
	}
	return append(tasks, func() {
		for p, b := range c.maybe {
			a, err := w.do("HEAD", api.PathBlob(p.Repo, p.Digest), nil)
			switch {
			case err == nil && a.Status == http.StatusOK:
				c.held(p.Repo, b)
				k.blob(w, p, b)
			case err == nil && a.Status == http.StatusNotFound:
				delete(c.maybe, p)
			default:
				k.blame("blob %s of %s: %s, %v", p.Digest, p.Repo, a, err)
			}
		}
	})
}

func (k *Checker) blob(w *Wire, p Place, b Blob) {
	a, err := w.do("GET", api.PathBlob(p.Repo, p.Digest), nil)
	if err != nil || a.Broken != nil || a.Status != http.StatusOK || identity.Sum(a.Body) != p.Digest {
		k.Lose("blob %s of %s: status %d, %d bytes of %d, %v, %v", p.Digest, p.Repo, a.Status, len(a.Body), b.Length, err,
			a.Broken)
	}
}

// finds checks that each base and each artifact is found by what it is made of.
func (k *Checker) finds(w *Wire, c *Client) (tasks []func()) {
	for _, m := range c.Bodies() {
		path := ""
		switch {
		case !m.base.IsZero():
			path = api.PathBase(m.base)
		case !m.subject.IsZero():
			path = api.PathReferrers(m.Repo, m.subject)
		}
		if path == "" || !k.isNew("find"+m.Digest.Hex()) {
			continue
		}
		tasks = append(tasks, func() {
			a, err := w.do("GET", path, nil)
			if err != nil || a.Status != http.StatusOK || !strings.Contains(string(a.Body), m.Digest.Hex()) {
				k.Lose("manifest %s of %s is not found by %s: %s, %v", m.Digest, m.Repo, path, a, err)
			}
		})
	}
	return tasks
}

// sessions checks that the open uploads of a client are where they were acknowledged to be, or after it.
func (k *Checker) sessions(w *Wire, c *Client) {
	c.Wire = w
	for _, s := range slices.Clone(c.Ledger.Sessions) {
		switch gone, err := c.locate(s); {
		case err != nil:
			k.Lose("client %d: %v", c.ID, err)
		case gone:
			k.committed(w, s)
		}
	}
}

// committed counts an upload that was to become a blob and is gone, while its repository does not have that blob: the
// client has to send again what was acknowledged to it. A store keeps uploads until their blob is linked, so that only a
// collection that came in between can have taken the bytes.
func (k *Checker) committed(w *Wire, s *Session) {
	if !s.commits || s.Acked == 0 {
		return
	}
	a, err := w.do("HEAD", api.PathBlob(s.Repo, s.Blob.Digest), nil)
	switch {
	case err == nil && a.Status == http.StatusNotFound:
		k.mu.Lock()
		defer k.mu.Unlock()
		k.Again++
	case err != nil || a.Status != http.StatusOK:
		k.blame("blob %s of %s: %s, %v", s.Blob.Digest, s.Repo, a, err)
	}
}

// folder checks that every blob on the disk is what its name says, and that those that were acknowledged are there.
func (k *Checker) folder(dir string) {
	found := map[identity.Digest]bool{}
	err := filepath.WalkDir(filepath.Join(dir, "blobs"), func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		d, err := identity.ParseDigest("sha256:" + e.Name())
		if err != nil {
			return fmt.Errorf("%s is no name of a blob", path)
		}
		found[d] = true
		return k.file(d, path)
	})
	if err != nil {
		k.blame("blobs on the disk: %v", err)
	}
	for _, c := range k.clients {
		for p := range c.Ledger.Blobs {
			if !found[p.Digest] {
				k.Lose("blob %s is not on the disk", p.Digest)
			}
		}
	}
}

// file hashes a blob, unless the file is the one that was hashed before.
func (k *Checker) file(d identity.Digest, path string) error {
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	if was := k.files[d]; was != nil && os.SameFile(was, st) && was.ModTime().Equal(st.ModTime()) {
		return nil
	}
	k.files[d] = st
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	h := identity.NewHash()
	if _, err := io.Copy(h, f); err != nil {
		return err
	}
	if got := identity.DigestOf(h); got != d && !k.Spoilt[d] {
		k.blame("blob %s on the disk has the digest %s", d, got)
	}
	return nil
}

// Anew checks that a server makes its index anew as it was. It forgets what no store knows.
func (k *Checker) Anew(v *Server) {
	w := v.Wire()
	before, err := w.export()
	if err == nil {
		err = w.Operate("/reindex")
	}
	after, err2 := w.export()
	if err = errors.Join(err, err2); err != nil {
		k.blame("reindex: %v", err)
		return
	}
	for i := range max(len(before), len(after)) {
		was, now := nth(before, i), nth(after, i)
		if was != now {
			k.Lose("after a reindex the export is another one: line %d: %s\nnow: %s", i+1, was, now)
			return
		}
	}
}

// nth is a row as a line, or nothing if there are not so many.
func nth(rows []index.Row, i int) string {
	if i >= len(rows) {
		return ""
	}
	return fmt.Sprintf("%+v", rows[i])
}

// Rebuild checks that the registry can be made anew from its store alone, with a server and without, and that kiln-pull
// gets whole models out of it. The server is stopped.
func (k *Checker) Rebuild(ctx context.Context, v *Server) {
	export := func() string {
		text, err := k.Site.Registry(ctx, "export")
		if err != nil {
			k.blame("%v", err)
		}
		return text
	}
	want := export()
	same := func(when string) {
		if got := export(); got != want {
			k.Lose("%s the export is another one: %s", when, differ(want, got))
		}
	}
	if _, err := k.Site.Registry(ctx, "reindex"); err != nil {
		k.blame("%v", err)
	}
	same("after a reindex by the server")
	k.pulls(ctx, v)
	if err := v.Stop(); err != nil {
		k.blame("%v", err)
	}
	same("without a server")
	if _, err := k.Site.Registry(ctx, "reindex"); err != nil {
		k.blame("%v", err)
	}
	same("after a reindex without a server")
	for _, c := range k.clients {
		c.Forget()
	}
}

// pulls has the real kiln-pull get one base of each client.
func (k *Checker) pulls(ctx context.Context, v *Server) {
	for _, c := range k.clients {
		bases := c.bases()
		if len(bases) == 0 {
			continue
		}
		m := bases[0]
		ref := fmt.Sprintf("%s/%s@%s", strings.TrimPrefix(v.URL, "http://"), m.Repo, m.Digest)
		to := fmt.Sprintf("pulled-%d", c.ID)
		if _, err := k.Site.Command(ctx, "kiln-pull", "pull", ref, to); err != nil {
			k.Lose("%v", err)
		}
		_ = os.RemoveAll(filepath.Join(k.Site.Dir, to)) // the whole site goes later
	}
}

// differ returns the first line that two texts do not share.
func differ(a, b string) string {
	x, y := strings.Split(a, "\n"), strings.Split(b, "\n")
	for i := range min(len(x), len(y)) {
		if x[i] != y[i] {
			return fmt.Sprintf("line %d: %s\nnow: %s", i+1, x[i], y[i])
		}
	}
	return fmt.Sprintf("%d lines, now %d", len(x), len(y))
}
