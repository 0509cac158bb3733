package client_test

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
)

// TestMirrorAddress: what names a mirror, and the repository there.
func TestMirrorAddress(t *testing.T) {
	for address, want := range map[string][2]string{
		"127.0.0.1:5000":                 {"127.0.0.1:5000", ""},
		"mirror.example/team/model":      {"mirror.example", "team/model"},
		"http://mirror.example:5000/":    {"mirror.example:5000", ""},
		"https://mirror.example/a/b/c-d": {"mirror.example", "a/b/c-d"},
	} {
		c, repo, err := client.NewMirror(address, client.Options{})
		if err != nil || c.Host() != want[0] || repo != want[1] {
			t.Errorf("%s: %q, %v", address, repo, err)
		}
	}
	for _, address := range []string{
		"", "http://", "ftp://mirror.example", "https://user:pass@mirror.example", "https://mirror.example/?x=1",
		"https://mirror.example/Team/Model", "https://mirror.example/a#b", "://x",
	} {
		if _, _, err := client.NewMirror(address, client.Options{}); err == nil || !strings.HasPrefix(err.Error(), "mirror ") {
			t.Errorf("%s: %v", address, err)
		}
	}
}

// TestMirrorGetsNoToken: whatever way the registry's token is given, a mirror does not see it.
func TestMirrorGetsNoToken(t *testing.T) {
	const secret = "kiln_secret"
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	b := []byte("weights")
	var mu sync.Mutex
	var seen []string
	mirror := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		seen = append(seen, r.Header.Get("Authorization"))
		mu.Unlock()
		if strings.Contains(r.URL.Path, "challenge") {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		w.Write(b)
	}))
	defer mirror.Close()
	t.Setenv("KILN_TOKEN", secret)
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	for _, o := range []client.Options{{}, {Token: secret}, {TokenFile: file}} {
		c, _, err := client.NewMirror(mirror.URL, o)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		body, err := c.Blob(t.Context(), "m", identity.Sum(b), 0, int64(len(b)), int64(len(b)))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(body); err != nil || string(got) != string(b) {
			t.Errorf("got %q, %v", got, err)
		}
		body.Close()
		if _, err := c.Blob(t.Context(), "challenge", identity.Sum(b), 0, 7, 7); err == nil {
			t.Error("a mirror that asks for a login answered")
		}
	}
	for _, h := range seen {
		if h != "" {
			t.Errorf("the mirror was sent %q", h)
		}
	}
}

// TestMirrorRedirect: a mirror can't send the client to another host.
func TestMirrorRedirect(t *testing.T) {
	b := []byte("weights")
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t.Errorf("asked for %s", r.URL)
	}))
	defer other.Close()
	mirror := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/here") {
			w.Write(b)
			return
		}
		to := other.URL
		if strings.Contains(r.URL.Path, "/same/") {
			to = "/here"
		}
		http.Redirect(w, r, to, http.StatusTemporaryRedirect)
	}))
	defer mirror.Close()
	c, _, err := client.NewMirror(mirror.URL, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Blob(t.Context(), "m", identity.Sum(b), 0, 7, 7); !errors.Is(err, client.ErrRedirected) {
		t.Errorf("got %v", err)
	}
	body, err := c.Blob(t.Context(), "same", identity.Sum(b), 0, 7, 7)
	if err != nil {
		t.Fatal(err)
	}
	body.Close()
}
