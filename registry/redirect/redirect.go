// Package redirect sends callers on to the object store for the bytes of a blob: it decides for whom that is right, and
// keeps the links that they get. Whether a caller may have the blob was decided before.
package redirect

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
)

const (
	// Skew is how far the clocks of the registry, its store and its callers may be apart. Object stores take as much.
	Skew = 15 * time.Minute
	// reserve is how much earlier than a link ends whoever has it is told that it does.
	reserve = 10 * time.Second
	// maxKept bounds the links that are kept, of some 600 bytes each.
	maxKept = 16384
	// complain is how often it is told at most that no links can be had.
	complain = time.Minute
)

// Rules say which requests for a blob are sent on to the store.
type Rules struct {
	TTL      time.Duration  // how long a link serves its blob
	MinSize  int64          // bytes of the smallest blob that is sent on
	Networks []netip.Prefix // of callers that are sent on, by the address that the connection comes from; empty: all
}

// hold is for how long the bytes of a copy may still be asked for by a link once nobody gets a new one.
func (r Rules) hold() time.Duration { return r.TTL + Skew }

// near says whether an address of the form host:port is one of a caller that is sent on.
func (r Rules) near(remote string) bool {
	if len(r.Networks) == 0 {
		return true
	}
	from, err := netip.ParseAddrPort(remote)
	if err != nil {
		return false
	}
	addr := from.Addr().Unmap().WithZone("")
	for _, n := range r.Networks {
		if n.Contains(addr) {
			return true
		}
	}
	return false
}

// Links are the links that callers get. All who ask for a copy get the same one, until half of its time is over: it
// names no caller and no repository, and each of them was found to have the right to those bytes, which is all that
// it gives. So one URL serves all ranges of a blob, also behind a cache. A nil *Links gives none; it is safe for
// concurrent use.
type Links struct {
	rules Rules
	store blobstore.Linker
	log   *slog.Logger
	now   func() time.Time

	mu    sync.Mutex // guards what follows
	kept  map[identity.Digest]*kept
	since time.Time // what was given before that is not known
	told  time.Time // when it was said last that none can be had
}

// kept is a link to a copy of one blob.
type kept struct {
	mu         sync.Mutex // held while it is made, so that many who ask at a time wait for one
	generation string     // of the copy
	link       blobstore.Link
	until      time.Time // until when it is given
	serves     time.Time // until when any that was given for the blob may serve, by the clocks of all
}

// New returns the links to blobs of a store, by rules. Nil rules: nobody gets any.
func New(rules *Rules, store blobstore.Store, log *slog.Logger, now func() time.Time) (*Links, error) {
	if rules == nil {
		return nil, nil
	}
	linker, ok := store.(blobstore.Linker)
	if !ok {
		return nil, fmt.Errorf("redirects: this store has no links that clients could follow")
	}
	if rules.TTL < time.Minute {
		return nil, fmt.Errorf("redirects: links for %s: want a minute at least", rules.TTL)
	}
	return &Links{rules: *rules, store: linker, log: log, now: now, kept: map[identity.Digest]*kept{},
		since: now()}, nil
}

// Wanted says whether a request for a blob is to be sent on: it is large enough, the request comes from where the store
// can be reached, and does not say Kiln-Redirect: off.
func (l *Links) Wanted(req *http.Request, i blobstore.Info) bool {
	return l != nil && req.Method == http.MethodGet && i.Size >= l.rules.MinSize && i.Size > 0 &&
		req.Header.Get(api.HeaderRedirect) != api.RedirectOff && l.rules.near(req.RemoteAddr)
}

// Link returns a link to a copy that serves it for half of the TTL at least, or as long as the store's credentials. An
// error says that there is none now; it was logged, unless that happens all the time.
func (l *Links) Link(ctx context.Context, i blobstore.Info) (blobstore.Link, error) {
	k := l.of(i.Digest)
	k.mu.Lock()
	defer k.mu.Unlock()
	now := l.now()
	if k.generation == i.Generation && now.Before(k.until) {
		return k.link, nil
	}
	link, err := l.store.Link(ctx, i, l.rules.TTL)
	if err == nil && !link.Until.After(now.Add(reserve)) {
		err = fmt.Errorf("link to blob %s: what signs it ends at once", i.Digest)
	}
	if err != nil {
		if ctx.Err() == nil {
			l.complain(i, err)
		}
		return blobstore.Link{}, err
	}
	k.generation, k.link, k.until = i.Generation, link, now.Add(link.Until.Sub(now)/2)
	if end := link.Until.Add(Skew); end.After(k.serves) {
		k.serves = end
	}
	return link, nil
}

// Serve says whether somebody may have a link to a blob that still serves, so that its bytes have to stay. Those that an
// earlier process gave are not known: for as long as one of them may serve, there may be one to every blob.
func (l *Links) Serve(d identity.Digest) bool {
	if l == nil {
		return false
	}
	now := l.now()
	l.mu.Lock()
	k, since := l.kept[d], l.since
	l.mu.Unlock()
	if now.Before(since.Add(l.rules.hold())) {
		return true
	} else if k == nil {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return now.Before(k.serves)
}

// of returns what is kept of a blob.
func (l *Links) of(d identity.Digest) *kept {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.kept[d]
	if k == nil {
		if len(l.kept) >= maxKept { // once in many thousand links: whoever asks next gets another one
			clear(l.kept)
			l.since = l.now()
		}
		k = new(kept)
		l.kept[d] = k
	}
	return k
}

func (l *Links) complain(i blobstore.Info, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now := l.now(); now.Sub(l.told) >= complain {
		l.told = now
		l.log.Warn("no link to a blob: it is sent through the registry", "digest", i.Digest.String(), "error", err)
	}
}

// Answer sends a caller on. It may keep the link for as long as that serves, and for itself alone; a page that it is on
// is not told to the store. The body does not repeat it.
func (l *Links) Answer(w http.ResponseWriter, link blobstore.Link) {
	const body = "the bytes are at the address of the Location header\n"
	h := w.Header()
	h.Del("Accept-Ranges")
	h.Del("Content-Range")
	h.Set("Location", link.URL)
	h.Set("Cache-Control", fmt.Sprintf("private, max-age=%d", max(0, int(link.Until.Sub(l.now().Add(reserve)).Seconds()))))
	h.Set("Vary", "Authorization, "+api.HeaderRedirect)
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(http.StatusTemporaryRedirect)
	_, _ = io.WriteString(w, body) // a client that has left needs none
}
