package registry

import (
	"context"
	"encoding/json"
	"io"
	"net/http"

	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// Export writes what the registry has acknowledged, one JSON object a line: all manifests, then all tags.
func (r *Registry) Export(ctx context.Context, w io.Writer) error {
	enc := json.NewEncoder(w)
	for row, err := range r.ix.Export(ctx) {
		if err != nil {
			return err
		}
		if err := enc.Encode(row); err != nil {
			return err
		}
	}
	return nil
}

// Admin returns the handler of the administration socket. It asks nobody who they are: whoever can open the socket may
// do everything.
//
//	GET  /export   what Export writes
//	POST /reindex  Reindex; answers when it has ended
//	GET  /health   Health
//
// and what upkeep.Handler has.
func (r *Registry) Admin() http.Handler {
	m := http.NewServeMux()
	m.HandleFunc("GET /export", func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("Content-Type", "application/jsonl")
		if err := r.Export(q.Context(), w); err != nil {
			r.log.Error("export", "error", err)
			panic(http.ErrAbortHandler) // a broken answer tells the reader that lines are missing
		}
	})
	m.HandleFunc("POST /reindex", func(w http.ResponseWriter, q *http.Request) {
		if err := r.Reindex(context.WithoutCancel(q.Context())); err != nil {
			r.log.Error("reindex", "error", err)
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
	m.HandleFunc("GET /health", func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(r.Health()) // it fails where the reader is gone
	})
	m.Handle("/", upkeep.Handler(r.collector, r.scrubber))
	return m
}
