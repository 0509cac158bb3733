package upkeep

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
)

// Event is one line of what a collection or a scrub says while it works, in JSON. One of its members is set.
type Event struct {
	Blob       *Blob       `json:"blob,omitempty"`       // collected, or would be
	Finding    *Finding    `json:"finding,omitempty"`    // of a scrub
	Aside      *Aside      `json:"aside,omitempty"`      // a blob in quarantine, or one that is lost
	Collection *Collection `json:"collection,omitempty"` // how it ended
	Scrub      *Scrubbing  `json:"scrub,omitempty"`      // how it ended
	Error      *Failure    `json:"error,omitempty"`      // why it ended before it was done
	End        bool        `json:"end,omitempty"`        // nothing comes any more, and there was no error
}

// Aside is a blob in quarantine, or one that is lost.
type Aside struct {
	Digest       identity.Digest `json:"digest"`
	Size         int64           `json:"size"`           // 0 for one that is lost
	Lost         Verdict         `json:"lost,omitempty"` // missing, unreadable, or damaged and not set aside
	Why          string          `json:"why"`
	Since        time.Time       `json:"since"`
	Repositories []string        `json:"repositories"` // some of those in which it is missing now
}

// maxRepositories is how many repositories an Aside names.
const maxRepositories = 16

// Failure is an error on its way through a socket. It is an error itself.
type Failure struct {
	Reason  string `json:"reason,omitempty"` // names the error of this package that it is
	Message string `json:"message"`
}

var reasons = map[string]error{
	"running": ErrRunning, "too-much": ErrTooMuch, "lacking": ErrLacking, "not-level": ErrNotLevel,
	"read-only": ErrReadOnly,
}

// FailureOf returns err for the other end of a socket.
func FailureOf(err error) *Failure {
	f := &Failure{Message: err.Error()}
	for reason, is := range reasons {
		if errors.Is(err, is) {
			f.Reason = reason
		}
	}
	return f
}

func (f *Failure) Error() string { return f.Message }

// Is says whether it is an error of this package.
func (f *Failure) Is(target error) bool { return target != nil && reasons[f.Reason] == target }

// Tell is Collect, told as events.
func (c *Collector) Tell(ctx context.Context, t Terms, tell func(Event)) error {
	t.Gone = func(b Blob) { tell(Event{Blob: &b}) }
	did, err := c.Collect(ctx, t)
	if !did.Began.IsZero() {
		tell(Event{Collection: &did})
	}
	return err
}

// Tell is Scrub, told as events.
func (s *Scrubber) Tell(ctx context.Context, o Order, tell func(Event)) error {
	o.Found = func(f Finding) { tell(Event{Finding: &f}) }
	did, err := s.Scrub(ctx, o)
	if !did.Began.IsZero() {
		tell(Event{Scrub: &did})
	}
	return err
}

// TellAside tells of every blob in quarantine, and then of those that are lost.
func (s *Scrubber) TellAside(ctx context.Context, tell func(Event)) error {
	if q, ok := s.store.(blobstore.Quarantine); ok {
		for i, err := range q.Aside(ctx) {
			if err != nil {
				return err
			}
			if err := s.tellAside(ctx, Aside{Digest: i.Digest, Size: i.Size, Why: i.Why, Since: i.Since}, tell); err != nil {
				return err
			}
		}
	}
	lost, err := s.Lost(ctx)
	if err != nil {
		return err
	}
	for _, l := range lost {
		a := Aside{Digest: l.Digest, Lost: l.Verdict, Why: string(l.Verdict) + ": " + l.Why, Since: l.Since}
		if l.Verdict == Damaged {
			a.Why = "damaged, and not set aside: " + l.Why
		}
		if err := s.tellAside(ctx, a, tell); err != nil {
			return err
		}
	}
	return nil
}

// tellAside tells of a blob, with the repositories that miss it.
func (s *Scrubber) tellAside(ctx context.Context, a Aside, tell func(Event)) error {
	for repo, err := range s.ix.Holders(ctx, a.Digest, s.now()) {
		if err != nil {
			return fmt.Errorf("repositories that miss %s: %w", a.Digest, err)
		}
		if a.Repositories = append(a.Repositories, repo); len(a.Repositories) == maxRepositories {
			break
		}
	}
	tell(Event{Aside: &a})
	return nil
}

// Handler serves the parts of a socket for administrators that are about upkeep. It asks nobody who they are.
//
//	POST /collect  Collect, by the Terms in the query
//	POST /scrub    Scrub, by the Order in the query
//	GET  /aside    what is in quarantine, and what is lost
//	GET  /upkeep   what was done last
//
// Each answers with Events, one a line; the last one is what it came to.
func Handler(c *Collector, s *Scrubber) http.Handler {
	m := http.NewServeMux()
	m.HandleFunc("POST /collect", events(func(q *http.Request, tell func(Event)) error {
		t, err := parseTerms(q.URL.Query())
		if err != nil {
			return err
		}
		return c.Tell(q.Context(), t, tell)
	}))
	m.HandleFunc("POST /scrub", events(func(q *http.Request, tell func(Event)) error {
		o, err := parseOrder(q.URL.Query())
		if err != nil {
			return err
		}
		return s.Tell(q.Context(), o, tell)
	}))
	m.HandleFunc("GET /aside", events(func(q *http.Request, tell func(Event)) error {
		return s.TellAside(q.Context(), tell)
	}))
	m.HandleFunc("GET /upkeep", events(func(_ *http.Request, tell func(Event)) error {
		if did := c.Last(); did != nil {
			tell(Event{Collection: did})
		}
		pass := s.Pass()
		tell(Event{Scrub: &pass})
		return nil
	}))
	return m
}

// events answers with what work tells, and with its error, if there is one.
func events(work func(q *http.Request, tell func(Event)) error) http.HandlerFunc {
	return func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("Content-Type", "application/jsonl")
		enc, control := json.NewEncoder(w), http.NewResponseController(w)
		tell := func(e Event) {
			_ = enc.Encode(e) // a reader that is gone ends the context
			_ = control.Flush()
		}
		if err := work(q, tell); err != nil {
			tell(Event{Error: FailureOf(err)})
			return
		}
		tell(Event{End: true})
	}
}

// Query is the terms as a query of Handler.
func (t Terms) Query() url.Values {
	return url.Values{
		"grace": {t.Grace.String()}, "max-share": {strconv.FormatFloat(t.MaxShare, 'g', -1, 64)},
		"force": {strconv.FormatBool(t.Force)}, "dry-run": {strconv.FormatBool(t.DryRun)},
		"lease": {t.Lease.String()},
	}
}

// parseTerms reads a query, in which nothing may be left out.
func parseTerms(q url.Values) (t Terms, err error) {
	var errs [5]error
	t.Grace, errs[0] = time.ParseDuration(q.Get("grace"))
	t.MaxShare, errs[1] = strconv.ParseFloat(q.Get("max-share"), 64)
	t.Force, errs[2] = strconv.ParseBool(q.Get("force"))
	t.DryRun, errs[3] = strconv.ParseBool(q.Get("dry-run"))
	t.Lease, errs[4] = time.ParseDuration(q.Get("lease"))
	return t, errors.Join(errs[:]...)
}

// Query is the order as a query of Handler.
func (o Order) Query() url.Values {
	q := url.Values{"rate": {strconv.FormatInt(o.Rate, 10)}}
	for _, d := range o.Digests {
		q.Add("digest", d.String())
	}
	return q
}

func parseOrder(q url.Values) (o Order, err error) {
	if o.Rate, err = strconv.ParseInt(q.Get("rate"), 10, 64); err != nil {
		return o, err
	}
	for _, text := range q["digest"] {
		d, err := identity.ParseDigest(text)
		if err != nil {
			return o, err
		}
		o.Digests = append(o.Digests, d)
	}
	return o, nil
}
