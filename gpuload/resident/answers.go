package resident

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

// PathModelState is the path of the debug state.
const PathModelState = "/v1/debug/model-state"

// EnableWith says how the debug state is enabled; it is part of the refusal.
const EnableWith = "--debug-model-state, or KILN_DEBUG_ENDPOINTS=1 in the environment"

// DebugEnabled says whether a value of KILN_DEBUG_ENDPOINTS enables the debug state: 1, true, yes or on in any case.
func DebugEnabled(value string) bool {
	switch strings.ToLower(strings.TrimSpace(value)) {
	case "1", "true", "yes", "on":
		return true
	}
	return false
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var status int
	var body any
	get := r.Method == http.MethodGet || r.Method == http.MethodHead
	switch r.URL.Path {
	case api.PathHealth, api.PathHealthV1:
		status, body = s.health()
	case api.PathReady:
		status, body = s.ready()
	case PathModelState:
		status, body = s.modelState(r)
	case PathMetrics:
		switch {
		case s.Metrics == nil:
			status, body = http.StatusNotFound, refusal{Error: "not found"}
		case get:
			s.Metrics.ServeHTTP(w, r)
			return
		}
	default:
		status, body = http.StatusNotFound, refusal{Error: "not found"}
	}
	if status != http.StatusNotFound && !get {
		w.Header().Set("Allow", "GET, HEAD")
		status, body = http.StatusMethodNotAllowed, refusal{Error: "method not allowed"}
	}
	if status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", `Bearer realm="kiln"`)
	}
	write(w, status, body)
}

// refusal is the body of every answer that is not what was asked for.
type refusal struct {
	Error      string `json:"error"`
	EnableWith string `json:"enable_with,omitempty"`
}

// write sends a body. net/http leaves it away for HEAD.
func write(w http.ResponseWriter, status int, body any) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(body); err != nil {
		status = http.StatusInternalServerError
		buf.Reset()
		buf.WriteString(`{"error":"the answer could not be written"}` + "\n")
	}
	writeBytes(w, "application/json", status, buf.Bytes())
}

func writeBytes(w http.ResponseWriter, mediaType string, status int, b []byte) {
	// A client that takes nothing must not hold this up. Errors: the client has gone.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTimeout))
	h := w.Header()
	h.Set("Content-Type", mediaType)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write(b)
}

// health gives 503 with the same body while not ready.
func (s *Server) health() (int, any) {
	h, ending := s.held.Load(), s.ending.Load()
	body := api.Health{
		Status: "ok", Version: s.Version, Role: "resident", Backend: s.Backend, Model: s.Model,
		Checks: []api.Check{{Name: "model_loaded", Pass: h != nil}, {Name: "accepting_requests", Pass: !ending}},
	}
	switch {
	case ending:
		body.Status = "maintenance"
	case h == nil:
		body.Status = "degraded"
	case s.damaged.Load() != nil:
		body.Status = "degraded"
		body.Checks = append(body.Checks, api.Check{Name: "weights_intact", Pass: false})
	}
	if h != nil && h.Weights != nil {
		sum := h.Weights.Manifest().Summary()
		body.BaseWeightIdentity = &sum
	}
	if body.Status != "ok" {
		return http.StatusServiceUnavailable, body
	}
	return http.StatusOK, body
}

func (s *Server) ready() (int, any) {
	switch {
	case s.ending.Load():
		return http.StatusServiceUnavailable, refusal{Error: "stopping"}
	case s.held.Load() == nil:
		return http.StatusServiceUnavailable, refusal{Error: "loading"}
	}
	if e := s.damaged.Load(); e != nil {
		return http.StatusServiceUnavailable, refusal{Error: e.Message}
	}
	return http.StatusOK, struct {
		Ready bool `json:"ready"`
	}{true}
}

// state is the debug state, as far as a process that only holds weights has one.
type state struct {
	Model    modelState    `json:"model"`
	Adapters adapterState  `json:"adapters"`
	Resident residentState `json:"resident"`
}

type modelState struct {
	Path          *string            `json:"path"`
	ServedModelID string             `json:"served_model_id"`
	Config                           // num_layers and so on
	Manifest      *identity.Manifest `json:"base_weight_shard_manifest"`
	Provenance    *struct{}          `json:"execution_provenance"` // null: nothing is executed
	Runtime       string             `json:"backend_runtime"`
}

type adapterState struct {
	Active *string  `json:"active_adapter"`
	Loaded []string `json:"loaded_adapters"`
}

// residentState says how the bytes got where they are and how they were checked.
type residentState struct {
	State        gpuload.State `json:"state"`
	Tensors      int           `json:"tensors"`
	Bytes        int64         `json:"bytes"`
	Verification *verification `json:"verification"` // null: there are no bytes
	Damaged      bool          `json:"damaged"`      // an audit found other bytes than were published
	Leases       int           `json:"leases"`       // attached now
	Generation   uint64        `json:"generation"`   // 0: there is nothing to attach to
}

type verification struct {
	Method    string    `json:"method"` // sha256-full: every byte was hashed as it was loaded
	Completed time.Time `json:"completed_at"`
	LoadedIn  float64   `json:"load_seconds"`
}

// modelState answers 403 while the debug state is not enabled, whoever asks.
func (s *Server) modelState(r *http.Request) (int, any) {
	if !s.Debug {
		return http.StatusForbidden, refusal{"debug endpoint disabled", EnableWith}
	}
	if err := s.allowed(r); err != nil {
		var e *api.Error
		if errors.As(err, &e) {
			return e.Status(), refusal{Error: e.Message}
		}
		return http.StatusUnauthorized, refusal{Error: "authentication required"}
	}
	body := state{
		Model:    modelState{ServedModelID: s.Model, Runtime: s.Backend},
		Adapters: adapterState{Loaded: []string{}},
		Resident: residentState{State: gpuload.Loading},
	}
	if h := s.held.Load(); h != nil {
		h.describe(&body)
		if h.Weights != nil {
			body.Resident.Damaged, body.Resident.Leases = s.damaged.Load() != nil, s.leases.count()
			body.Resident.Generation = h.generation()
			for _, a := range h.adapters() {
				body.Adapters.Loaded = append(body.Adapters.Loaded, cmp.Or(a.Name, a.Digest.String()))
			}
		}
	}
	return http.StatusOK, body
}

func (h *Held) describe(body *state) {
	if h.Path != "" {
		body.Model.Path = &h.Path
	}
	body.Model.Config = h.Config
	if h.Weights == nil {
		body.Resident.State = gpuload.Published
		return
	}
	m := h.Weights.Manifest()
	body.Model.Manifest = &m
	body.Resident = residentState{
		State: h.Weights.State(), Tensors: len(h.Weights.Tensors()), Bytes: int64(m.TotalSize),
		Verification: &verification{attach.MethodFull, h.At.UTC(), h.Weights.Stats().Elapsed.Seconds()},
	}
}

// allowed says whether the caller may see the debug state: whoever may pull something may.
func (s *Server) allowed(r *http.Request) error {
	if s.Gate == nil {
		return nil
	}
	c, err := s.Gate.Caller(r)
	if err != nil {
		return err
	}
	return c.CheckAnywhere(access.Pull)
}
