package testchaos

import (
	"context"
	"math/rand/v2"
	"net/http"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

// Check looks at every name while no load runs, and pulls every manifest that is there. Lost says afterwards what is
// wrong. It returns the blobs that those manifests refer to.
func (l *Load) Check(url string) map[identity.Digest]bool {
	l.init()
	l.url = url
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	a := &actor{Load: l, ctx: ctx, stop: func() { l.lose("the registry does not answer") }, r: rand.New(rand.NewPCG(1, 2))}
	used := map[identity.Digest]bool{}
	for _, repo := range repos {
		for _, m := range l.world.models {
			if a.whole(repo, m) {
				for _, b := range m.blobs {
					used[b.digest] = true
				}
			}
		}
		for i := range worldTags {
			a.tagged(name{repo, tagName(i)})
		}
	}
	return used
}

// whole checks one manifest, and says whether it is there.
func (a *actor) whole(repo string, m *model) bool {
	n := name{repo, m.digest.String()}
	want := a.ledger.manifest(n)
	got := a.do("GET", api.PathManifest(repo, n.ref), nil)
	if got.status == http.StatusNotFound {
		if !want.absent {
			a.lose("manifest %v was acknowledged and is gone", n)
		}
		return false
	}
	switch {
	case got.status != http.StatusOK || identity.Sum(got.body) != m.digest:
		a.lose("manifest %v: %v", n, got)
	case !want.present:
		a.lose("manifest %v was deleted and is there", n)
	}
	for _, b := range m.blobs {
		got := a.do("GET", api.PathBlob(repo, b.digest), nil)
		if got.status != http.StatusOK || identity.Sum(got.body) != b.digest {
			a.lose("blob %s of manifest %v: %d", b.digest, n, got.status)
		}
	}
	a.Pulled.Add(1)
	return true
}

// tagged checks one tag.
func (a *actor) tagged(n name) {
	got := a.do("GET", api.PathManifest(n.repo, n.ref), nil)
	d := identity.Digest{}
	if got.status == http.StatusOK {
		d = identity.Sum(got.body)
	} else if got.status != http.StatusNotFound {
		a.lose("tag %v: %v", n, got)
		return
	}
	if !a.ledger.tag(n, d) {
		a.lose("tag %v points to %s, which is not what was acknowledged last", n, d)
	}
}

// DeleteAll deletes every manifest.
func (l *Load) DeleteAll(url string) {
	l.url = url
	a := &actor{Load: l, ctx: context.Background(), stop: func() { l.lose("the registry does not answer") }}
	for _, repo := range repos {
		for _, m := range l.world.models {
			n := name{repo, m.digest.String()}
			a.change(true, identity.Digest{}, []name{n}, func() answer {
				return a.do("DELETE", api.PathManifest(repo, n.ref), nil)
			})
		}
	}
}
