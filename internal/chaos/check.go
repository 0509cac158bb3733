package main

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

// verdict is what a run found. It is safe for concurrent use.
type verdict struct {
	mu    sync.Mutex
	lost  []string // what was acknowledged and is not there as it was
	bad   []string // all else that must not be
	again int      // uploads that have to be sent again as their last request got no answer
}

func (v *verdict) lose(format string, args ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.lost = append(v.lost, fmt.Sprintf(format, args...))
}

func (v *verdict) blame(format string, args ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.bad = append(v.bad, fmt.Sprintf(format, args...))
}

// err is nil if nothing was found.
func (v *verdict) err() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.lost)+len(v.bad) == 0 {
		return nil
	}
	const most = 20
	var text []string
	for _, s := range v.lost {
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

// checker compares a registry with what its clients were told. It remembers what it has compared, as nothing that was
// once durable changes by itself: only a full check looks at everything again.
type checker struct {
	verdict
	site    *site
	clients []*client
	seen    map[any]bool
	files   map[identity.Digest]fs.FileInfo // of the store's folder, as they were when they were hashed
	spoilt  map[identity.Digest]bool        // damaged on purpose, and not yet healed
}

func newChecker(s *site, clients []*client) *checker {
	return &checker{
		site: s, clients: clients, seen: map[any]bool{}, files: map[identity.Digest]fs.FileInfo{},
		spoilt: map[identity.Digest]bool{},
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

// check looks at a server that has just started. Nothing else may use it.
func (k *checker) check(v *server, full bool) {
	if full {
		clear(k.seen)
		clear(k.files)
	}
	w := v.wire()
	defer w.close()
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
	if folder := k.site.folder(); folder != "" {
		k.folder(folder)
	}
	for _, line := range v.log.wrong() {
		k.blame("the log says: %s", line)
	}
}

// isNew says whether something was not looked at before.
func (k *checker) isNew(what any) bool {
	was := k.seen[what]
	k.seen[what] = true
	return !was
}

// names compares all names that there are with all that were acknowledged.
func (k *checker) names(seen names) {
	want := names{}
	for _, c := range k.clients {
		for _, text := range c.settle(seen) {
			k.blame("client %d: %s", c.id, text)
		}
		maps.Copy(want, c.ledger.names)
	}
	for name, d := range want {
		if seen[name] != d {
			k.lose("%s:%s is %s, acknowledged was %s", name.repo, name.name, seen[name], d)
		}
	}
	for name, d := range seen {
		if _, ok := want[name]; !ok {
			k.lose("%s:%s is %s, acknowledged was that it is deleted", name.repo, name.name, d)
		}
	}
}

// listings compares the lists of tags with the export.
func (k *checker) listings(w *wire, rows []index.Row) (tasks []func()) {
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
			if err := w.json(api.PathTags(repo), &list); err != nil || !slices.Equal(list.Tags, want) {
				k.lose("tags of %s: %q, want %q, %v", repo, list.Tags, want, err)
			}
		})
	}
	return tasks
}

// manifest checks that a manifest is whole, and all that it refers to.
func (k *checker) manifest(w *wire, r index.Row) {
	a, err := w.do("GET", api.PathManifest(r.Repository, r.Digest.String()), nil)
	if err != nil || a.broken != nil || a.status != http.StatusOK || identity.Sum(a.body) != r.Digest {
		k.lose("manifest %s of %s: %s, %v, %v", r.Digest, r.Repository, a, err, a.broken)
		return
	}
	for _, d := range r.Refers {
		a, err := w.do("HEAD", api.PathBlob(r.Repository, d), nil)
		if err != nil || a.status != http.StatusOK {
			k.lose("manifest %s of %s is not complete: blob %s: %d, %v", r.Digest, r.Repository, d, a.status, err)
		}
	}
}

// blobs checks which blobs a client finds. One in doubt is taken for what it is found to be.
func (k *checker) blobs(w *wire, c *client) (tasks []func()) {
	for p, b := range c.ledger.blobs {
		if k.isNew(p) {
			tasks = append(tasks, func() { k.blob(w, p, b) })
		}
	}
	for p := range c.gone {
		if !k.isNew(struct{ place }{p}) {
			continue
		}
		tasks = append(tasks, func() {
			if a, err := w.do("HEAD", api.PathBlob(p.repo, p.digest), nil); err != nil || a.status != http.StatusNotFound {
				k.lose("blob %s of %s: %d, %v, acknowledged was that it is deleted", p.digest, p.repo, a.status, err)
			}
		})
	}
	return append(tasks, func() {
		for p, b := range c.maybe {
			a, err := w.do("HEAD", api.PathBlob(p.repo, p.digest), nil)
			switch {
			case err == nil && a.status == http.StatusOK:
				c.held(p.repo, b)
				k.blob(w, p, b)
			case err == nil && a.status == http.StatusNotFound:
				delete(c.maybe, p)
			default:
				k.blame("blob %s of %s: %s, %v", p.digest, p.repo, a, err)
			}
		}
	})
}

func (k *checker) blob(w *wire, p place, b blob) {
	a, err := w.do("GET", api.PathBlob(p.repo, p.digest), nil)
	if err != nil || a.broken != nil || a.status != http.StatusOK || identity.Sum(a.body) != p.digest {
		k.lose("blob %s of %s: status %d, %d bytes of %d, %v, %v", p.digest, p.repo, a.status, len(a.body), b.length, err,
			a.broken)
	}
}

// finds checks that each base and each artifact is found by what it is made of.
func (k *checker) finds(w *wire, c *client) (tasks []func()) {
	for _, m := range c.bodies() {
		path := ""
		switch {
		case !m.base.IsZero():
			path = api.PathBase(m.base)
		case !m.subject.IsZero():
			path = api.PathReferrers(m.repo, m.subject)
		}
		if path == "" || !k.isNew("find"+m.digest.Hex()) {
			continue
		}
		tasks = append(tasks, func() {
			a, err := w.do("GET", path, nil)
			if err != nil || a.status != http.StatusOK || !strings.Contains(string(a.body), m.digest.Hex()) {
				k.lose("manifest %s of %s is not found by %s: %s, %v", m.digest, m.repo, path, a, err)
			}
		})
	}
	return tasks
}

// sessions checks that the open uploads of a client are where they were acknowledged to be, or after it.
func (k *checker) sessions(w *wire, c *client) {
	c.wire = w
	for _, s := range slices.Clone(c.ledger.sessions) {
		switch gone, err := c.locate(s); {
		case err != nil:
			k.lose("client %d: %v", c.id, err)
		case gone:
			k.committed(w, s)
		}
	}
}

// committed counts an upload that a kill hit between the moment in which it became a blob and the one in which its
// repository had that blob: the bytes are in the store, and the client has to send them again all the same.
func (k *checker) committed(w *wire, s *session) {
	if !s.commits || s.acked == 0 {
		return
	}
	a, err := w.do("HEAD", api.PathBlob(s.repo, s.blob.digest), nil)
	switch {
	case err == nil && a.status == http.StatusNotFound:
		k.mu.Lock()
		defer k.mu.Unlock()
		k.again++
	case err != nil || a.status != http.StatusOK:
		k.blame("blob %s of %s: %s, %v", s.blob.digest, s.repo, a, err)
	}
}

// folder checks that every blob on the disk is what its name says, and that those that were acknowledged are there.
func (k *checker) folder(dir string) {
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
		for p := range c.ledger.blobs {
			if !found[p.digest] {
				k.lose("blob %s is not on the disk", p.digest)
			}
		}
	}
}

// file hashes a blob, unless the file is the one that was hashed before.
func (k *checker) file(d identity.Digest, path string) error {
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
	if got := identity.DigestOf(h); got != d && !k.spoilt[d] {
		k.blame("blob %s on the disk has the digest %s", d, got)
	}
	return nil
}

// anew checks that a server makes its index anew as it was. It forgets what no store knows.
func (k *checker) anew(v *server) {
	w := v.wire()
	before, err := w.export()
	if err == nil {
		err = w.operate("/reindex")
	}
	after, err2 := w.export()
	if err = errors.Join(err, err2); err != nil {
		k.blame("reindex: %v", err)
		return
	}
	for i := range max(len(before), len(after)) {
		was, now := nth(before, i), nth(after, i)
		if was != now {
			k.lose("after a reindex the export is another one: line %d: %s\nnow: %s", i+1, was, now)
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

// rebuild checks that the registry can be made anew from its store alone, with a server and without, and that kiln-pull
// gets whole models out of it. The server is stopped.
func (k *checker) rebuild(ctx context.Context, v *server) {
	export := func() string {
		text, err := k.site.registry(ctx, "export")
		if err != nil {
			k.blame("%v", err)
		}
		return text
	}
	want := export()
	same := func(when string) {
		if got := export(); got != want {
			k.lose("%s the export is another one: %s", when, differ(want, got))
		}
	}
	if _, err := k.site.registry(ctx, "reindex"); err != nil {
		k.blame("%v", err)
	}
	same("after a reindex by the server")
	k.pulls(ctx, v)
	if err := v.stop(); err != nil {
		k.blame("%v", err)
	}
	same("without a server")
	if _, err := k.site.registry(ctx, "reindex"); err != nil {
		k.blame("%v", err)
	}
	same("after a reindex without a server")
	for _, c := range k.clients {
		c.forget()
	}
}

// pulls has the real kiln-pull get one base of each client.
func (k *checker) pulls(ctx context.Context, v *server) {
	for _, c := range k.clients {
		bases := c.bases()
		if len(bases) == 0 {
			continue
		}
		m := bases[0]
		ref := fmt.Sprintf("%s/%s@%s", strings.TrimPrefix(v.url, "http://"), m.repo, m.digest)
		to := fmt.Sprintf("pulled-%d", c.id)
		if _, err := k.site.command(ctx, "kiln-pull", "pull", ref, to); err != nil {
			k.lose("%v", err)
		}
		_ = os.RemoveAll(filepath.Join(k.site.dir, to)) // the whole site goes later
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
