package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"oras.land/oras-go/v2/registry/remote/auth"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

// desk takes one upload. It is the registry's side of the protocol and no more.
type desk struct {
	t         *testing.T
	got       []byte
	challenge bool // refuse the next PATCH after its body began, for want of a token
	header    http.Header
	aborted   bool
	held      bool
}

func (d *desk) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Location", "/v2/m/blobs/uploads/7?state=a%2Fb")
	w.Header().Set("Docker-Upload-UUID", "7")
	switch r.Method {
	case http.MethodPost:
		d.header = r.Header
		if q := r.URL.Query(); q.Get("mount") == digest.String() && (q.Get("from") == "has" || d.held) {
			w.WriteHeader(http.StatusCreated)
			return
		}
		w.WriteHeader(http.StatusAccepted)
	case http.MethodGet, http.MethodPatch:
		d.append(w, r)
	case http.MethodPut:
		if want := r.URL.Query().Get("digest"); want != identity.Sum(d.got).String() || r.URL.Query().Get("state") != "a/b" {
			http.Error(w, "digest", http.StatusBadRequest)
			return
		}
		w.WriteHeader(http.StatusCreated)
	case http.MethodDelete:
		d.aborted = true
		w.WriteHeader(http.StatusNoContent)
	}
}

func (d *desk) append(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/v2/m/blobs/uploads/7" {
		http.NotFound(w, r)
		return
	}
	if r.Method == http.MethodPatch {
		if d.challenge {
			d.challenge = false
			io.CopyN(io.Discard, r.Body, 3)
			w.Header().Set("WWW-Authenticate", `Basic realm="kiln"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		var from, to int
		fmt.Sscanf(r.Header.Get("Content-Range"), "%d-%d", &from, &to)
		b, err := io.ReadAll(r.Body)
		if err != nil || from != len(d.got) || to != from+len(b)-1 {
			d.t.Errorf("Content-Range %q with %d bytes at %d: %v", r.Header.Get("Content-Range"), len(b), len(d.got), err)
		}
		d.got = append(d.got, b...)
	}
	if len(d.got) > 0 {
		w.Header().Set("Range", fmt.Sprintf("0-%d", len(d.got)-1))
	}
	if r.Method == http.MethodPatch {
		w.WriteHeader(http.StatusAccepted)
	} else {
		w.WriteHeader(http.StatusNoContent)
	}
}

func TestUpload(t *testing.T) {
	d := &desk{t: t}
	c := dial(t, d.ServeHTTP, Options{})
	ctx := t.Context()
	u, err := c.CreateUpload(ctx, "m", digest, 16)
	if err != nil {
		t.Fatal(err)
	}
	if d.header.Get(api.HeaderExpectDigest) != digest.String() || d.header.Get(api.HeaderExpectSize) != "16" {
		t.Errorf("promised %v", d.header)
	}
	if err := u.Append(ctx, bytes.NewReader(content), 10); err != nil || u.Offset() != 10 {
		t.Fatalf("at %d: %v", u.Offset(), err)
	}
	u, err = c.ResumeUpload(ctx, "m", u.Location())
	if err != nil || u.Offset() != 10 {
		t.Fatalf("resumed at %d: %v", u.Offset(), err)
	}
	if err := u.Append(ctx, io.MultiReader(bytes.NewReader(content[10:])), 6); err != nil {
		t.Fatal(err)
	}
	if err := u.Commit(ctx, identity.Sum([]byte("other"))); err == nil {
		t.Error("committed as another blob")
	}
	if err := u.Commit(ctx, digest); err != nil {
		t.Error(err)
	}
	if _, err := c.ResumeUpload(ctx, "m", "/v2/m/blobs/uploads/gone"); !errors.Is(err, api.ErrBlobUploadUnknown) {
		t.Errorf("resumed an upload that is gone: %v", err)
	}
	if got := c.moved.Load(); got != 16 {
		t.Errorf("%d bytes moved", got)
	}
}

// TestUploadShortSource has a file that is shorter than it was: nothing may be made up for the missing bytes.
func TestUploadShortSource(t *testing.T) {
	c := dial(t, func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.ReadAll(r.Body); err == nil {
			t.Error("the request ended well")
		}
	}, Options{})
	u := &Upload{c: c, repo: "m", location: "/v2/m/blobs/uploads/7"}
	err := u.Append(t.Context(), strings.NewReader("short"), 16)
	if err == nil {
		t.Error("appended 16 bytes of 5")
	}
}

// TestUploadTokenRunsOut refuses a chunk half-way for want of a token: it is sent again where its source can be rewound.
func TestUploadTokenRunsOut(t *testing.T) {
	d := &desk{t: t, challenge: true}
	c := dial(t, d.ServeHTTP, Options{})
	c.auth.Credential = login
	u := &Upload{c: c, repo: "m", location: "/v2/m/blobs/uploads/7"}
	r := bytes.NewReader(append([]byte("skipped"), content...))
	r.Seek(7, io.SeekStart)
	if err := u.Append(t.Context(), r, 16); err != nil || !bytes.Equal(d.got, content) {
		t.Errorf("got %q, %v", d.got, err)
	}
}

func TestMount(t *testing.T) {
	d := &desk{t: t}
	c := dial(t, d.ServeHTTP, Options{})
	if ok, err := c.Mount(t.Context(), "m", "has", digest); !ok || err != nil || d.aborted {
		t.Errorf("%t, %v, aborted %t", ok, err, d.aborted)
	}
	if ok, err := c.Mount(t.Context(), "m", "lacks", digest); ok || err != nil || !d.aborted {
		t.Errorf("%t, %v, aborted %t", ok, err, d.aborted)
	}
	for _, d.held = range []bool{true, false} {
		if u, err := c.CreateUpload(t.Context(), "m", digest, 16); err != nil || u.Held() != d.held {
			t.Errorf("found elsewhere: %+v, %v, want %t", u, err, d.held)
		}
	}
}

func TestReceived(t *testing.T) {
	for v, want := range map[string]int64{"": 0, "0-0": 0, "0-9": 10, "bytes=0-9": 10, "1-9": -1, "0-x": -1, "9": -1, "0--4": -1} {
		got, err := received(&http.Response{Header: http.Header{"Range": {v}}, Request: &http.Request{URL: mustURL("http://h/")}})
		if (err != nil) != (want < 0) || err == nil && got != want {
			t.Errorf("%q: %d, %v", v, got, err)
		}
	}
}

func mustURL(s string) *url.URL {
	u, err := url.Parse(s)
	if err != nil {
		panic(err)
	}
	return u
}

func login(context.Context, string) (auth.Credential, error) {
	return auth.Credential{Username: "ada", Password: "pw"}, nil
}
