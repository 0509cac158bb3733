package client

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
)

// TestOneLink: a link that may be kept serves all parts of a blob, without the token. Once it is refused the registry
// is asked for another one, and where that is refused as well, for the bytes.
func TestOneLink(t *testing.T) {
	asked, served, refuse := 0, 0, false
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header["Authorization"] != nil {
			t.Error("the token went to another host")
		}
		if served++; refuse {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
	}))
	defer elsewhere.Close()
	c := dial(t, func(w http.ResponseWriter, r *http.Request) {
		if asked++; r.Header.Get("Authorization") != "Bearer secret" {
			t.Error("no token")
		}
		if r.Header.Get(api.HeaderRedirect) == api.RedirectOff {
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
			return
		}
		w.Header().Set("Cache-Control", "private, max-age=600")
		http.Redirect(w, r, fmt.Sprintf("%s/b?signature=%d", elsewhere.URL, asked), http.StatusTemporaryRedirect)
	}, Options{Token: "secret"})
	read := func(off int64, wantAsked, wantServed int) {
		t.Helper()
		body, err := c.Blob(t.Context(), "m", digest, off, 2, 16)
		if err != nil {
			t.Fatal(err)
		}
		defer body.Close()
		got, err := io.ReadAll(body)
		if err != nil || !bytes.Equal(got, content[off:off+2]) || asked != wantAsked || served != wantServed {
			t.Errorf("%q, %v: the registry was asked %d times, the other %d", got, err, asked, served)
		}
	}
	read(0, 1, 1)
	read(4, 1, 2)
	read(8, 1, 3)
	refuse = true
	read(2, 3, 5)
	refuse = false
	read(6, 4, 5)
	if c.Doubt(digest) {
		t.Error("doubted what the registry sent itself")
	}
}

// TestDoubt: a blob of which wrong bytes came by a link comes from the registry.
func TestDoubt(t *testing.T) {
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Write(bytes.Repeat([]byte("x"), 16))
	}))
	defer elsewhere.Close()
	c := dial(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get(api.HeaderRedirect) == api.RedirectOff {
			w.Write(content)
			return
		}
		w.Header().Set("Cache-Control", "max-age=600")
		http.Redirect(w, r, elsewhere.URL, http.StatusTemporaryRedirect)
	}, Options{})
	for _, want := range []string{"xxxxxxxxxxxxxxxx", string(content)} {
		body, err := c.Blob(t.Context(), "m", digest, 0, 16, 16)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(body)
		body.Close()
		if err != nil || string(got) != want {
			t.Errorf("%q, %v, want %q", got, err, want)
		}
		if c.Doubt(digest) != (want != string(content)) {
			t.Errorf("doubt after %q", want)
		}
	}
}

// TestUnreachableLink: a blob comes from the registry where the host that it sends its clients to can't be reached.
func TestUnreachableLink(t *testing.T) {
	elsewhere := httptest.NewServer(http.NotFoundHandler())
	elsewhere.Close()
	asked := 0
	c := dial(t, func(w http.ResponseWriter, r *http.Request) {
		if asked++; r.Header.Get(api.HeaderRedirect) == api.RedirectOff {
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
			return
		}
		w.Header().Set("Cache-Control", "max-age=600")
		http.Redirect(w, r, elsewhere.URL+"/b?signature=1", http.StatusTemporaryRedirect)
	}, Options{})
	for _, want := range []int{2, 3} {
		body, err := c.Blob(t.Context(), "m", digest, 4, 2, 16)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(body)
		body.Close()
		if err != nil || !bytes.Equal(got, content[4:6]) || asked != want {
			t.Errorf("%q, %v, asked %d times", got, err, asked)
		}
	}
	_, err := c.StatBlob(t.Context(), "m", digest)
	if err == nil || !strings.Contains(err.Error(), "sent on to "+strings.TrimPrefix(elsewhere.URL, "http://")) ||
		strings.Contains(err.Error(), "signature") {
		t.Errorf("%v", err)
	}
}
