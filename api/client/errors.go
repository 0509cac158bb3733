package client

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/kiln-registry/kiln-registry/api"
)

var (
	// ErrRangeIgnored: a part of a blob was asked for and the server sent all of it.
	ErrRangeIgnored = errors.New("server ignored the Range header")
	// ErrNotBlob: the answer is not the blob that was asked for: an HTML page, an encoded body, another length.
	ErrNotBlob = errors.New("answer is not the blob")
	// ErrMismatch: the bytes of an answer do not hash to the digest that was asked for or that the server states.
	ErrMismatch = errors.New("digest mismatch")
)

// maxErrorBody is how much of an error's body is read, in bytes.
const maxErrorBody = 64 << 10

// StatusError is an answer with a status that was not hoped for. It unwraps to an *api.Error: the first one of the
// body, else the one that the status stands for.
type StatusError struct {
	Host        string // the one that answered, which is not the registry's after a redirect
	Method      string
	Path        string
	Status      int
	ContentType string
	RetryAfter  time.Duration // zero: not said
	Redirected  bool          // the target of a redirect answered, not the registry
	Err         error         // nil: the answer says no more than the status
}

// Error names the request, the status, and the registry's own words or else the type of the body.
func (e *StatusError) Error() string {
	s := fmt.Sprintf("%s %s%s: %d", e.Method, e.Host, e.Path, e.Status)
	if text := http.StatusText(e.Status); text != "" {
		s += " " + text
	}
	if e.Err != nil {
		return s + ": " + e.Err.Error()
	}
	if e.ContentType != "" {
		s += " (" + e.ContentType + ")"
	}
	return s
}

// Unwrap returns Err.
func (e *StatusError) Unwrap() error { return e.Err }

func newStatusError(resp *http.Response, r call, base *url.URL) *StatusError {
	u := resp.Request.URL
	e := &StatusError{
		Host: u.Host, Method: r.method, Path: u.EscapedPath(), Status: resp.StatusCode,
		ContentType: printable(resp.Header.Get("Content-Type")),
		RetryAfter:  parseRetryAfter(resp.Header.Get("Retry-After"), time.Now()),
		Redirected:  r.straight || resp.Request.Response != nil && u.Host != base.Host,
	}
	if err := firstError(resp); err != nil {
		e.Err = err
		return e
	}
	switch {
	case e.Redirected:
	case resp.StatusCode == http.StatusUnauthorized:
		e.Err = api.ErrUnauthorized
	case resp.StatusCode == http.StatusForbidden:
		e.Err = api.ErrDenied
	case resp.StatusCode == http.StatusNotFound:
		e.Err = r.missing
	}
	return e
}

// firstError reads the OCI error body. A HEAD, a proxy's page and a foreign body give nil.
func firstError(resp *http.Response) error {
	if t, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); t != "application/json" {
		return nil
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	if err != nil {
		return nil
	}
	var body api.Errors
	if json.Unmarshal(b, &body) != nil || len(body.Errors) == 0 || body.Errors[0] == nil || body.Errors[0].Code == "" {
		return nil
	}
	first := body.Errors[0]
	first.Code, first.Message = api.Code(printable(string(first.Code))), printable(first.Message)
	return first
}

// notBlob says that an answer with a good status is not what was asked for.
func notBlob(resp *http.Response, format string, args ...any) error {
	return fmt.Errorf("%s answered %d with content type %q: %w: %s", resp.Request.URL.Host, resp.StatusCode,
		printable(resp.Header.Get("Content-Type")), ErrNotBlob, fmt.Sprintf(format, args...))
}

func isHTML(resp *http.Response) bool {
	t, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	return t == "text/html" || t == "application/xhtml+xml"
}

// encoded returns the content encoding of an answer, or nothing where the body is as it is stored.
func encoded(resp *http.Response) string {
	if e := resp.Header.Get("Content-Encoding"); e != "identity" {
		return e
	}
	return ""
}

// printable keeps what a server says to one line of harmless text of bounded length.
func printable(s string) string {
	const limit = 500
	if len(s) > limit {
		s = s[:limit] + "…"
	}
	return Line(s)
}

// Escape writes every Unseen rune of s, newline and tab included, as JSON would escape it: \u001b.
func Escape(s string) string {
	if !strings.ContainsFunc(s, api.Unseen) {
		return s
	}
	var b []byte
	for _, r := range s {
		if api.Unseen(r) {
			b = api.AppendEscaped(b, r)
		} else {
			b = utf8.AppendRune(b, r)
		}
	}
	return string(b)
}

// Line is Escape for text that is to be one line: a newline or a tab becomes a space.
func Line(s string) string {
	return Escape(strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || r == '\r' {
			return ' '
		}
		return r
	}, s))
}
