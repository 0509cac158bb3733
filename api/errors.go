package api

import (
	"errors"
	"fmt"
	"net/http"
)

// Code is an error code: those of the OCI distribution spec 1.1 and, below them, those of this project.
type Code string

// The error codes. codes holds their HTTP status.
const (
	CodeBlobUnknown         Code = "BLOB_UNKNOWN"
	CodeBlobUploadInvalid   Code = "BLOB_UPLOAD_INVALID"
	CodeBlobUploadUnknown   Code = "BLOB_UPLOAD_UNKNOWN"
	CodeDigestInvalid       Code = "DIGEST_INVALID"
	CodeManifestBlobUnknown Code = "MANIFEST_BLOB_UNKNOWN"
	CodeManifestInvalid     Code = "MANIFEST_INVALID"
	CodeManifestUnknown     Code = "MANIFEST_UNKNOWN"
	CodeNameInvalid         Code = "NAME_INVALID"
	CodeNameUnknown         Code = "NAME_UNKNOWN"
	CodeSizeInvalid         Code = "SIZE_INVALID"
	CodeUnauthorized        Code = "UNAUTHORIZED"
	CodeDenied              Code = "DENIED"
	CodeUnsupported         Code = "UNSUPPORTED"
	CodeTooManyRequests     Code = "TOOMANYREQUESTS"

	CodeTagInvalid        Code = "TAG_INVALID"        // the tag breaks the grammar
	CodeRangeInvalid      Code = "RANGE_INVALID"      // a range that the blob, or the upload, cannot satisfy
	CodeContentTooLarge   Code = "CONTENT_TOO_LARGE"  // the body is over the limit for its kind
	CodeBlobReferred      Code = "BLOB_REFERRED"      // a manifest of the repository refers to the blob
	CodeParameterInvalid  Code = "PARAMETER_INVALID"  // a query parameter, header or JSON body does not parse
	CodeAggregateUnknown  Code = "AGGREGATE_UNKNOWN"  // nothing of that aggregate that the caller may pull
	CodeMidstatesUnknown  Code = "MIDSTATES_UNKNOWN"  // the blob is held, and has no midstates
	CodeAggregateConflict Code = "AGGREGATE_CONFLICT" // not sent as a code: the reason in the detail of MANIFEST_INVALID
	CodeDocumentConflict  Code = "DOCUMENT_CONFLICT"  // not sent as a code: another reason there
	CodeDocumentInvalid   Code = "DOCUMENT_INVALID"   // not sent as a code: another reason there
	CodeTagImmutable      Code = "TAG_IMMUTABLE"      // not sent as a code: the reason in the detail of DENIED
	CodeReadOnly          Code = "READ_ONLY"          // not sent as a code: the reason in the detail of UNSUPPORTED
	CodeRouteUnknown      Code = "ROUTE_UNKNOWN"      // no such route
	CodeUploadBusy        Code = "UPLOAD_BUSY"        // another request is using the upload; try again
	CodeStoreFull         Code = "STORE_FULL"         // no space left; what was acknowledged is kept and still served
	CodeUnavailable       Code = "UNAVAILABLE"        // starting, rebuilding the index or stopping; try again
	CodeInternal          Code = "INTERNAL"           // the registry failed; its log says how
)

// codes is the one place that ties a code to its HTTP status and to the message used where no better one is at hand.
var codes = map[Code]struct {
	status  int
	message string
}{
	CodeBlobUnknown:       {http.StatusNotFound, "blob unknown to this repository"},
	CodeBlobUploadInvalid: {http.StatusBadRequest, "blob upload invalid"},
	CodeBlobUploadUnknown: {http.StatusNotFound, "blob upload unknown to this repository"},
	CodeDigestInvalid: {
		http.StatusBadRequest,
		"the digest is not sha256: and 64 lowercase hex digits, or does not match the content",
	},
	CodeManifestBlobUnknown: {
		http.StatusBadRequest,
		"the manifest refers to a blob or manifest that this repository does not hold",
	},
	CodeManifestInvalid:  {http.StatusBadRequest, "manifest invalid"},
	CodeManifestUnknown:  {http.StatusNotFound, "manifest unknown to this repository"},
	CodeNameInvalid:      {http.StatusBadRequest, "invalid repository name"},
	CodeNameUnknown:      {http.StatusNotFound, "repository unknown to this registry"},
	CodeSizeInvalid:      {http.StatusBadRequest, "the size does not match the content"},
	CodeUnauthorized:     {http.StatusUnauthorized, "authentication required"},
	CodeDenied:           {http.StatusForbidden, "the caller is not allowed to do that"},
	CodeUnsupported:      {http.StatusMethodNotAllowed, "the operation is unsupported"},
	CodeTooManyRequests:  {http.StatusTooManyRequests, "too many requests"},
	CodeTagInvalid:       {http.StatusBadRequest, "invalid tag"},
	CodeRangeInvalid:     {http.StatusRequestedRangeNotSatisfiable, "the range cannot be satisfied"},
	CodeContentTooLarge:  {http.StatusRequestEntityTooLarge, "the body is too large"},
	CodeBlobReferred:     {http.StatusConflict, "a manifest of the repository refers to the blob"},
	CodeParameterInvalid: {http.StatusBadRequest, "invalid parameter"},
	CodeAggregateUnknown: {http.StatusNotFound, "no base model of that aggregate is known here"},
	CodeMidstatesUnknown: {http.StatusNotFound, "no midstates of this blob are recorded here"},
	CodeRouteUnknown:     {http.StatusNotFound, "no such route"},
	CodeUploadBusy:       {http.StatusTooManyRequests, "the upload is in use by another request"},
	CodeStoreFull:        {http.StatusInsufficientStorage, "no space left in the store"},
	CodeUnavailable:      {http.StatusServiceUnavailable, "the registry is not ready"},
	CodeInternal:         {http.StatusInternalServerError, "the registry failed"},
}

// One error per code, for errors.Is: it matches every *Error of that code, on either side of HTTP.
var (
	ErrBlobUnknown         = &Error{Code: CodeBlobUnknown}
	ErrBlobUploadInvalid   = &Error{Code: CodeBlobUploadInvalid}
	ErrBlobUploadUnknown   = &Error{Code: CodeBlobUploadUnknown}
	ErrDigestInvalid       = &Error{Code: CodeDigestInvalid}
	ErrManifestBlobUnknown = &Error{Code: CodeManifestBlobUnknown}
	ErrManifestInvalid     = &Error{Code: CodeManifestInvalid}
	ErrManifestUnknown     = &Error{Code: CodeManifestUnknown}
	ErrNameInvalid         = &Error{Code: CodeNameInvalid}
	ErrNameUnknown         = &Error{Code: CodeNameUnknown}
	ErrSizeInvalid         = &Error{Code: CodeSizeInvalid}
	ErrUnauthorized        = &Error{Code: CodeUnauthorized}
	ErrDenied              = &Error{Code: CodeDenied}
	ErrUnsupported         = &Error{Code: CodeUnsupported}
	ErrTooManyRequests     = &Error{Code: CodeTooManyRequests}
	ErrTagInvalid          = &Error{Code: CodeTagInvalid}
	ErrRangeInvalid        = &Error{Code: CodeRangeInvalid}
	ErrContentTooLarge     = &Error{Code: CodeContentTooLarge}
	ErrBlobReferred        = &Error{Code: CodeBlobReferred}
	ErrParameterInvalid    = &Error{Code: CodeParameterInvalid}
	ErrAggregateUnknown    = &Error{Code: CodeAggregateUnknown}
	ErrMidstatesUnknown    = &Error{Code: CodeMidstatesUnknown}
	ErrRouteUnknown        = &Error{Code: CodeRouteUnknown}
	ErrUploadBusy          = &Error{Code: CodeUploadBusy}
	ErrStoreFull           = &Error{Code: CodeStoreFull}
	ErrUnavailable         = &Error{Code: CodeUnavailable}
	ErrInternal            = &Error{Code: CodeInternal}
)

// Error is one error of an answer. It is an error itself: errors.Is matches it with the error of its code, whatever
// its message and detail.
type Error struct {
	Code    Code   `json:"code"`
	Message string `json:"message,omitempty"`
	Detail  any    `json:"detail,omitempty"` // for programs: a Conflict, BadDocument, Immutable, Missing, Refusal or nothing
}

// Errors is the body of every answer with a status of 400 and above.
type Errors struct {
	Errors []*Error `json:"errors"`
}

// Conflict is the detail of a MANIFEST_INVALID of which two places disagree: about the base, with the reason
// AGGREGATE_CONFLICT, or about a file or another document, with DOCUMENT_CONFLICT.
type Conflict struct {
	Reason    Code   `json:"reason"`
	Claimed   string `json:"claimed"`              // what the manifest or a document in it says
	ClaimedAt string `json:"claimed_at,omitempty"` // where: annotation, or file and JSON path
	Derived   string `json:"derived"`              // what the registry finds; "none": nothing
	DerivedAt string `json:"derived_at,omitempty"` // where: layer, subject, annotation, or file and JSON path
}

// BadDocument is the detail of a MANIFEST_INVALID with a document in it that breaks a rule of its format. Reason is
// DOCUMENT_INVALID.
type BadDocument struct {
	Reason Code   `json:"reason"`
	File   string `json:"file"`
	Path   string `json:"path,omitempty"` // in the file
	Rule   string `json:"rule"`
}

// Immutable is the detail of a DENIED that an immutable tag is the reason of. Reason is TAG_IMMUTABLE.
type Immutable struct {
	Reason Code   `json:"reason"`
	Tag    string `json:"tag"`
	Digest string `json:"digest"` // the manifest that the tag names
}

// Refusal is the detail of an UNSUPPORTED of a registry that takes no changes. Reason is READ_ONLY.
type Refusal struct {
	Reason Code `json:"reason"`
}

// Reason returns the reason in the detail of an error, on either side of HTTP; empty if it has none.
func (e *Error) Reason() Code {
	switch d := e.Detail.(type) {
	case Conflict:
		return d.Reason
	case BadDocument:
		return d.Reason
	case Immutable:
		return d.Reason
	case Refusal:
		return d.Reason
	case map[string]any:
		reason, _ := d["reason"].(string)
		return Code(reason)
	}
	return ""
}

// Missing is the detail of a MANIFEST_BLOB_UNKNOWN or SIZE_INVALID of a manifest: which descriptor is meant.
type Missing struct {
	Digest string `json:"digest"`
	Name   string `json:"name,omitempty"` // file name, if the descriptor has one
}

// Errorf returns an error of a code. A message made of no format is the code's usual one.
func Errorf(code Code, format string, args ...any) *Error {
	if format == "" {
		return &Error{Code: code, Message: codes[code].message}
	}
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// With returns a copy of e that carries a detail.
func (e *Error) With(detail any) *Error {
	return &Error{Code: e.Code, Message: e.Message, Detail: detail}
}

// Error returns the message, or the code's usual message where there is none.
func (e *Error) Error() string {
	if e.Message != "" {
		return e.Message
	}
	if m := codes[e.Code].message; m != "" {
		return m
	}
	return string(e.Code)
}

// Is says whether target is an *Error of the same code.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code
}

// Status returns the HTTP status of the code; a code that is not known here gives 500.
func (e *Error) Status() int {
	if c, ok := codes[e.Code]; ok {
		return c.status
	}
	return http.StatusInternalServerError
}

// AsError returns the *Error in err's chain. An error that has none is an internal one: its text stays out of the
// answer.
func AsError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return Errorf(CodeInternal, "")
}
