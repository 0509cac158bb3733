package attach

import (
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/identity"
)

// PathResident is where a holder says what it holds. All other paths are below it.
const PathResident = "/v1/resident"

// Protocol is the value of Upgrade for an attach.
const Protocol = "kiln-attach"

// Path is the path of a base. An attach upgrades a GET of it, or of the path of an adapter.
func Path(a identity.Aggregate) string { return PathResident + "/" + a.String() }

// PathAudit is the path on which POST reads the memory back.
func PathAudit(a identity.Aggregate) string { return Path(a) + "/audit" }

// PathHeader is the path of the header of a shard.
func PathHeader(a identity.Aggregate, shard identity.Digest) string {
	return Path(a) + "/shards/" + shard.String() + "/header"
}

// PathGeneration is the path on which GET waits for a generation above a number.
func PathGeneration(a identity.Aggregate, after uint64) string {
	return fmt.Sprintf("%s/generation?after=%d", Path(a), after)
}

// PathAdapters is the path of the adapters on a base.
func PathAdapters(a identity.Aggregate) string { return Path(a) + "/adapters" }

// PathAdapter is the path of one adapter; d is the digest of its manifest.
func PathAdapter(a identity.Aggregate, d identity.Digest) string {
	return PathAdapters(a) + "/" + d.String()
}

// PathAdapterHeader is the path of the header of a shard of an adapter.
func PathAdapterHeader(a identity.Aggregate, d, shard identity.Digest) string {
	return PathAdapter(a, d) + "/shards/" + shard.String() + "/header"
}

// PathAdapterFile is the path of a document that is kept with an adapter.
func PathAdapterFile(a identity.Aggregate, d identity.Digest, name string) string {
	return PathAdapter(a, d) + "/files/" + url.PathEscape(name)
}

// The codes of Error.
const (
	CodeBadRequest = "RESIDENT_BAD_REQUEST"
	CodeOtherUser  = "RESIDENT_OTHER_USER"
	CodeUnknown    = "RESIDENT_UNKNOWN"

	CodeOtherBase        = "RESIDENT_OTHER_BASE"
	CodeDamaged          = "RESIDENT_DAMAGED"
	CodeFailed           = "RESIDENT_FAILED"
	CodeDraining         = "RESIDENT_DRAINING"
	CodeBusy             = "RESIDENT_BUSY"
	CodeNoMemory         = "RESIDENT_NO_MEMORY"
	CodeAdapterUnknown   = "ADAPTER_UNKNOWN"
	CodeAdapterOtherBase = "ADAPTER_OTHER_BASE"
	CodeAdapterInUse     = "ADAPTER_IN_USE"
	CodeAdapterAmbiguous = "ADAPTER_AMBIGUOUS"
	CodeAdapterRefused   = "ADAPTER_REFUSED"
	CodeAdapterRegistry  = "ADAPTER_REGISTRY"
)

var statuses = map[string]int{
	CodeBadRequest: http.StatusBadRequest, CodeOtherUser: http.StatusForbidden, CodeUnknown: http.StatusNotFound,
	CodeOtherBase: http.StatusConflict,
	CodeDamaged:   http.StatusInternalServerError, CodeFailed: http.StatusInternalServerError,
	CodeDraining: http.StatusServiceUnavailable, CodeBusy: http.StatusServiceUnavailable,
	CodeNoMemory: http.StatusInsufficientStorage, CodeAdapterUnknown: http.StatusNotFound,
	CodeAdapterOtherBase: http.StatusConflict, CodeAdapterInUse: http.StatusConflict,
	CodeAdapterAmbiguous: http.StatusConflict, CodeAdapterRefused: http.StatusUnprocessableEntity,
	CodeAdapterRegistry: http.StatusBadGateway,
}

// Error is a request that the holder refused, and its body on the wire.
type Error struct {
	Message string `json:"error"`
	Code    string `json:"code"`
}

// Refuse makes an Error.
func Refuse(code, format string, args ...any) *Error {
	return &Error{Message: fmt.Sprintf(format, args...), Code: code}
}

// Error gives one line: what is refused, and the code.
func (e *Error) Error() string { return fmt.Sprintf("%s (%s)", e.Message, e.Code) }

// Status is the HTTP status of the code, 500 for one that is not known.
func (e *Error) Status() int {
	if s, ok := statuses[e.Code]; ok {
		return s
	}
	return http.StatusInternalServerError
}

// Is says whether both errors have the same code: errors.Is(err, Refuse(CodeDraining, "")).
func (e *Error) Is(target error) bool {
	o, ok := target.(*Error)
	return ok && o.Code == e.Code
}

// Status is what a holder says of itself.
type Status struct {
	Aggregate  identity.Aggregate `json:"aggregate_sha256"`
	Model      string             `json:"model"` // for people
	Backend    string             `json:"backend"`
	State      gpuload.State      `json:"state"`
	Damaged    bool               `json:"damaged"` // an audit found other bytes than were published
	Shards     int                `json:"shards"`
	Tensors    int                `json:"tensors"`
	Bytes      int64              `json:"bytes"` // of the base, headers included
	Devices    []Device           `json:"devices"`
	Leases     int                `json:"leases"` // attached now, to the base or to an adapter
	Generation uint64             `json:"generation"`
	Adapters   []LoadedAdapter    `json:"adapters"`
	Process    int                `json:"pid"`
}

// LoadedAdapter is one adapter on the base.
type LoadedAdapter struct {
	Adapter
	From     string        `json:"from"`      // the reference or the folder that it was loaded from
	Evidence string        `json:"evidence"`  // what says that it is of the base: document or asserted
	StatedAt string        `json:"stated_at"` // where that stands
	Bytes    int64         `json:"size_bytes"`
	Files    []AdapterFile `json:"files"` // that are kept beside the weights
	Leases   int           `json:"leases"`
	Loaded   time.Time     `json:"loaded_at"`
}

// AdapterFile is a document of an adapter.
type AdapterFile struct {
	Name   string          `json:"name"`
	Size   int64           `json:"size_bytes"`
	Digest identity.Digest `json:"sha256"`
}

// Audited is an audit that found every byte as it was published.
type Audited struct {
	Aggregate identity.Aggregate `json:"aggregate_sha256"`
	Bytes     int64              `json:"bytes"` // of the base, headers included
	Seconds   float64            `json:"seconds"`
}

// Released is the answer to the request to end.
type Released struct {
	State  gpuload.State `json:"state"` // gpuload.Draining, or gpuload.Freed where the answer waited for that
	CutOff int           `json:"leases_cut_off"`
}

// Event is what a holder tells those who are attached.
type Event struct {
	Kind       string  `json:"event,omitempty"`
	Generation uint64  `json:"generation,omitempty"`    // of EventGeneration
	Grace      float64 `json:"grace_seconds,omitempty"` // of EventDraining
}

// The kinds of events. Others may come with later versions.
const (
	EventGeneration = "generation" // an adapter came or went
	EventDraining   = "draining"   // close the attachment: after the grace the memory is freed all the same
	EventDamaged    = "damaged"    // an audit found other bytes than were published
)

// Descriptors is a range of file descriptors: asked for by the client, and answered with them.
type Descriptors struct {
	First int `json:"first"`
	Count int `json:"count"` // MaxDescriptors at most
}

// Line is one line of the stream after the document: an event, descriptors, or the error that ends it.
type Line struct {
	Event
	Descriptors *Descriptors `json:"descriptors,omitempty"`
	Error       string       `json:"error,omitempty"`
	Code        string       `json:"code,omitempty"`
}
