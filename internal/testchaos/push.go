package testchaos

import (
	"fmt"
	"net/http"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

// manner is how a pusher goes about a push.
type manner int

// The manners.
const (
	careful  manner = iota // asks for each blob and uploads what is missing
	eager                  // uploads everything, also what is there
	mounting               // mounts from another repository what it can
	trusting               // asks for each blob, and gives up if one is missing
	slow                   // careful, and a long time passes before its manifest
	blind                  // puts the manifest only, and sees what comes
	manners
)

// push pushes a model.
func (a *actor) push() {
	if a.Push != nil {
		defer a.Push()()
	}
	repo, m, how := a.repo(), a.model(), manner(a.r.IntN(int(manners)))
	if how != blind {
		for _, i := range a.r.Perm(len(m.blobs)) {
			if !a.offer(repo, m.blobs[i], how) {
				return
			}
		}
	}
	if how == slow && a.Pause != nil {
		a.Pause(a.ctx)
	}
	names, ref := []name{{repo, m.digest.String()}}, m.digest.String()
	if a.once(2) {
		ref = a.tag()
		names = append(names, name{repo, ref})
	}
	got := a.change(false, m.digest, names, func() answer {
		return a.do("PUT", api.PathManifest(repo, ref), m.manifest, "Content-Type", manifestType)
	})
	firm := a.Firm && how != blind && strings.HasPrefix(repo, "firm")
	switch {
	case got.status == http.StatusCreated:
		for range a.r.IntN(4) {
			select {
			case a.tokens <- struct{}{}:
			default:
			}
		}
	case got.status != 0 && firm, got.status != 0 && !strings.Contains(string(got.body), "MANIFEST_BLOB_UNKNOWN"):
		a.lose("push %d to %s, manner %d: the blobs were acknowledged, but the manifest was not taken: %v",
			a.i, repo, how, got)
	}
}

// offer sees to it that the registry has a blob, and says whether it is known to.
func (a *actor) offer(repo string, b *blob, how manner) bool {
	if how != eager && (how != mounting || a.once(2)) {
		switch got := a.do("HEAD", api.PathBlob(repo, b.digest), nil); {
		case got.status == http.StatusOK:
			return true
		case got.status != http.StatusNotFound || how == trusting:
			return false
		}
	}
	if how == mounting {
		query := "?mount=" + b.digest.String()
		if from := a.repo(); from != repo {
			query += "&from=" + from
		}
		got := a.do("POST", api.PathUploads(repo)+query, nil)
		if got.status == http.StatusAccepted {
			return a.send(got.header.Get("Location"), b)
		}
		return got.status == http.StatusCreated
	}
	return a.upload(repo, b)
}

// upload uploads a blob in one of the ways that there are.
func (a *actor) upload(repo string, b *blob) bool {
	if a.once(3) {
		got := a.do("POST", api.PathUploads(repo)+"?digest="+b.digest.String(), b.data)
		return a.stored(got, b)
	}
	var header []string
	if a.once(2) {
		header = []string{api.HeaderExpectDigest, b.digest.String(), api.HeaderExpectSize, fmt.Sprint(len(b.data))}
	}
	got := a.do("POST", api.PathUploads(repo), nil, header...)
	return got.status == http.StatusAccepted && a.send(got.header.Get("Location"), b)
}

// send sends the bytes of an open upload, in chunks or at once.
func (a *actor) send(at string, b *blob) bool {
	rest := b.data
	for a.once(2) && len(rest) > 1 {
		n := 1 + a.r.IntN(len(rest))
		got := a.do("PATCH", at, rest[:n])
		if got.status != http.StatusAccepted {
			return false
		}
		rest = rest[n:]
	}
	return a.stored(a.do("PUT", at+"?digest="+b.digest.String(), rest), b)
}

func (a *actor) stored(got answer, b *blob) bool {
	if got.status >= 400 {
		a.lose("upload of %s refused: %v", b.digest, got)
	}
	return got.status == http.StatusCreated
}

// pull looks at a manifest and what it refers to.
func (a *actor) pull() {
	repo, m := a.repo(), a.model()
	n := name{repo, m.digest.String()}
	since := a.ledger.tick()
	must := a.ledger.manifest(n)
	got := a.do("GET", api.PathManifest(repo, n.ref), nil)
	switch {
	case got.status == 0:
		return
	case got.status == http.StatusNotFound:
		if !must.absent && !a.ledger.deletedSince(n, since) {
			a.lose("manifest %v is gone", n)
		}
		return
	case got.status != http.StatusOK || identity.Sum(got.body) != m.digest:
		a.lose("manifest %v: %v", n, got)
		return
	}
	for _, b := range m.blobs {
		got := a.do("GET", api.PathBlob(repo, b.digest), nil)
		if got.status == 0 || a.ledger.deletedSince(n, since) {
			return
		}
		if got.status != http.StatusOK || identity.Sum(got.body) != b.digest {
			a.lose("blob %s of manifest %v: %v", b.digest, n, got.status)
		}
	}
	a.Pulled.Add(1)
}
