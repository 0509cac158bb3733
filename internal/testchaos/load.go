// Package testchaos puts a registry under a mixed load over HTTP and afterwards says what of that which was
// acknowledged is lost. The registry may be killed meanwhile: what got no answer may have happened or not.
package testchaos

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

// Load is a load. Its exported fields are set before the first Run. A Load may run again, against the same registry or
// another process on its store: it remembers what was acknowledged.
type Load struct {
	Seed                       uint64
	Pushers, Deleters, Pullers int
	// Firm: in repositories in which no blob is deleted, a manifest must be taken whose blobs were just acknowledged,
	// mounted or found by a HEAD.
	Firm bool
	// Push is told when a push begins, and what it returns when that ends; nil: nobody is.
	Push func() (end func())
	// Pause is what slow pushers wait for; nil: nothing.
	Pause func(context.Context)

	once   sync.Once
	world  *world
	ledger ledger
	url    string
	client *http.Client
	tokens chan struct{} // one for each delete that may happen, so that not all is deleted at once

	Acknowledged, Refused, Unanswered, Pulled atomic.Int64

	mu   sync.Mutex
	lost []string
}

// The repositories. Blobs are deleted in the last one only.
var repos = []string{"firm/a", "firm/b", "loose/c"}

func (l *Load) init() {
	l.once.Do(func() {
		l.world = newWorld(l.Seed)
		l.tokens = make(chan struct{}, 1000)
		l.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
	})
}

// Run puts the registry at url under load until ctx ends, or until it answers no more.
func (l *Load) Run(ctx context.Context, url string) {
	l.init()
	l.url = url
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	actors := func(n int, act func(*actor)) {
		for i := range n {
			a := &actor{Load: l, ctx: ctx, stop: cancel, r: rand.New(rand.NewPCG(l.Seed, rand.Uint64())), i: i}
			wg.Go(func() {
				for ctx.Err() == nil {
					act(a)
				}
			})
		}
	}
	actors(l.Pushers, (*actor).push)
	actors(l.Deleters, (*actor).delete)
	actors(l.Pullers, (*actor).pull)
	wg.Wait()
	l.client.CloseIdleConnections()
}

// Lost returns what is wrong, so far.
func (l *Load) Lost() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lost
}

// lose records that something is lost or wrong.
func (l *Load) lose(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost = append(l.lost, fmt.Sprintf(format, args...))
}

// actor is one client.
type actor struct {
	*Load
	ctx  context.Context
	stop func()
	r    *rand.Rand
	i    int
}

// answer is an answer that was read whole; a status of 0: there was none.
type answer struct {
	status int
	header http.Header
	body   []byte
}

func (a answer) String() string { return fmt.Sprintf("%d %.200s", a.status, bytes.TrimSpace(a.body)) }

// do sends a request. Header is pairs of name and value.
func (a *actor) do(method, path string, body []byte, header ...string) answer {
	url := path
	if strings.HasPrefix(path, "/") {
		url = a.url + path
	}
	// Requests end on their own, so that their outcome is known, and not with the context.
	req, err := http.NewRequest(method, url, bytes.NewReader(body))
	if err != nil {
		a.lose("%s %s: %v", method, path, err)
		return answer{}
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := a.client.Do(req)
	if err != nil {
		a.stop()
		return answer{}
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return answer{}
	}
	if resp.StatusCode >= 500 {
		a.lose("%s %s: %d %s", method, path, resp.StatusCode, b)
	}
	return answer{resp.StatusCode, resp.Header, b}
}

func (a *actor) repo() string { return repos[a.r.IntN(len(repos))] }

func (a *actor) model() *model { return a.world.models[a.r.IntN(len(a.world.models))] }

func (a *actor) tag() string { return tagName(a.r.IntN(worldTags)) }

func tagName(i int) string { return fmt.Sprintf("v%d", i) }

func (a *actor) once(n int) bool { return a.r.IntN(n) == 0 }

// change does what changes names, and notes what came of it.
func (a *actor) change(deletes bool, d identity.Digest, names []name, do func() answer) answer {
	end := a.ledger.begin(deletes, d, names...)
	got := do()
	acked := got.status == http.StatusCreated || got.status == http.StatusAccepted
	refused := got.status >= 400 && got.status < 500
	end(acked, refused)
	switch {
	case acked:
		a.Acknowledged.Add(1)
	case refused:
		a.Refused.Add(1)
	default:
		a.Unanswered.Add(1)
	}
	return got
}

// delete deletes a manifest, a tag or a blob.
func (a *actor) delete() {
	select {
	case <-a.tokens:
	case <-a.ctx.Done():
		return
	}
	repo, m := a.repo(), a.model()
	for range 8 { // mostly one that is there
		if a.ledger.manifest(name{repo, m.digest.String()}).present {
			break
		}
		repo, m = a.repo(), a.model()
	}
	switch kind := a.r.IntN(6); {
	case kind == 0:
		tag := a.tag()
		a.change(true, identity.Digest{}, []name{{repo, tag}}, func() answer {
			return a.do("DELETE", api.PathManifest(repo, tag), nil)
		})
	case kind == 1 && strings.HasPrefix(repo, "loose"):
		b := m.blobs[a.r.IntN(len(m.blobs))]
		a.do("DELETE", api.PathBlob(repo, b.digest), nil)
	default:
		a.change(true, identity.Digest{}, []name{{repo, m.digest.String()}}, func() answer {
			return a.do("DELETE", api.PathManifest(repo, m.digest.String()), nil)
		})
	}
}
