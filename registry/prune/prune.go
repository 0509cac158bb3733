// Package prune drops from a registry what somebody asks it to drop: old manifests, all but the newest of each name, and
// uploads that nobody goes on with.
package prune

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

// Pruner drops things of one registry. All fields are needed. It is safe for concurrent use.
type Pruner struct {
	Index   *index.Index
	Uploads blobstore.Uploads
	Now     func() time.Time
	// ReadOnly leaves only dry runs.
	ReadOnly bool
	// Level brings the index level with the store. ErrUnavailable while it can't.
	Level func(context.Context) error
	// Hold has do read the index and make the changes that follow, while nobody else puts anything into the repository.
	Hold func(ctx context.Context, repo string, do func() error) error
	// Delete deletes manifests of one repository that no tag names. It is called by do of Hold.
	Delete func(ctx context.Context, old []index.Record) error
	// Drop ends an upload, whoever it belongs to. blobstore.ErrUploadBusy if it is in use right now.
	Drop func(ctx context.Context, id string) error
}

// errReadOnly is what a registry says that is read-only, to administrators too.
var errReadOnly = api.Errorf(api.CodeUnsupported, "the registry is read-only")

// Event is one line of what is told over the administration socket. One of its members is set.
type Event struct {
	Manifest *Manifest  `json:"manifest,omitempty"` // of Retain
	Retained *Retained  `json:"retained,omitempty"`
	Upload   *Upload    `json:"upload,omitempty"` // of PurgeUploads
	Purged   *Purged    `json:"purged,omitempty"`
	Error    *api.Error `json:"error,omitempty"` // why it ended before it was done
	End      bool       `json:"end,omitempty"`   // nothing comes any more, and there was no error
}

// TellRetain is Retain for everybody, told as events.
func (p *Pruner) TellRetain(ctx context.Context, t Retention, tell func(Event) error) error {
	did, err := p.Retain(ctx, access.Everyone(), t, func(m Manifest) error { return tell(Event{Manifest: &m}) })
	return errors.Join(err, tell(Event{Retained: &did}))
}

// TellPurge is PurgeUploads, told as events.
func (p *Pruner) TellPurge(ctx context.Context, o Abandoned, tell func(Event) error) error {
	did, err := p.PurgeUploads(ctx, o, func(u Upload) error { return tell(Event{Upload: &u}) })
	return errors.Join(err, tell(Event{Purged: &did}))
}

// Handler serves the parts of a socket for administrators that are about pruning. It asks nobody who they are.
//
//	POST /retain  Retain, by the Retention in the query
//	POST /purge   PurgeUploads, by the Abandoned in the query
//
// Each answers with Events, one a line; the last one says how it ended.
func (p *Pruner) Handler() http.Handler {
	m := http.NewServeMux()
	m.HandleFunc("POST /retain", events(func(q *http.Request, tell func(Event) error) error {
		t, err := parseRetention(q.URL.Query())
		if err != nil {
			return err
		}
		return p.TellRetain(q.Context(), t, tell)
	}))
	m.HandleFunc("POST /purge", events(func(q *http.Request, tell func(Event) error) error {
		o, err := parseAbandoned(q.URL.Query())
		if err != nil {
			return err
		}
		return p.TellPurge(q.Context(), o, tell)
	}))
	return m
}

// events answers with what work tells, and with its error, if there is one.
func events(work func(q *http.Request, tell func(Event) error) error) http.HandlerFunc {
	return func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("Content-Type", "application/jsonl")
		enc := json.NewEncoder(w)
		last := Event{End: true}
		if err := work(q, func(e Event) error { return enc.Encode(e) }); err != nil {
			last = Event{Error: failure(err)}
		}
		_ = enc.Encode(last) // it fails where the reader is gone
	}
}

// failure is an error for an administrator, from whom nothing is kept back.
func failure(err error) *api.Error {
	var e *api.Error
	if errors.As(err, &e) {
		return api.Errorf(e.Code, "%v", err)
	}
	return api.Errorf(api.CodeInternal, "%v", err)
}
