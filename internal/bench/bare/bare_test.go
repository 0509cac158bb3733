package bare

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

// TestBare checks that the yardstick does the work which it stands for.
func TestBare(t *testing.T) {
	dir := t.TempDir()
	body := bytes.Repeat([]byte("kiln"), rig.Piece/3)
	if err := take(dir, bytes.NewReader(body), identity.Sum(body).Hex()); err != nil {
		t.Fatal(err)
	}
	if err := take(dir, bytes.NewReader(body[1:]), identity.Sum(body).Hex()); err == nil {
		t.Error("bytes that do not match were taken")
	}
	kept, err := os.ReadFile(filepath.Join(dir, "blob"))
	if err != nil || sha256.Sum256(kept) != sha256.Sum256(body) {
		t.Errorf("kept %d bytes, %v", len(kept), err)
	}
	s := httptest.NewServer(handler(dir))
	defer s.Close()
	res, err := rig.NewClient().Do(t.Context(), "GET", s.URL+"/blob", nil, 0, http.StatusOK)
	if err != nil || res.ContentLength != int64(len(body)) {
		t.Errorf("a chunked answer is not sent by sendfile: %+v, %v", res, err)
	}
}

// TestFiles: what is written is what was sent, and what is hashed is what was written.
func TestFiles(t *testing.T) {
	dir := t.TempDir()
	s := httptest.NewServer(handler(dir))
	defer s.Close()
	const size = rig.Piece + 1000
	for i, sync := range []string{"no", "yes"} {
		url := fmt.Sprintf("%s/file/written-%d?sync=%s", s.URL, i, sync)
		if _, err := rig.NewClient().Do(t.Context(), "PUT", url, rig.Stream(7, size), size, http.StatusCreated); err != nil {
			t.Fatal(err)
		}
	}
	if err := write(t.Context(), []string{dir, "1", fmt.Sprint(size), "yes"}, io.Discard); err != nil {
		t.Fatal(err)
	}
	if err := get(t.Context(), []string{s.URL + "/file/written-0", s.URL + "/file/written-1"}, io.Discard); err != nil {
		t.Error(err)
	}
	if err := get(t.Context(), []string{s.URL + "/file/absent"}, io.Discard); err == nil {
		t.Error("a file that is not there was fetched")
	}
	var out strings.Builder
	paths := []string{filepath.Join(dir, "written-0"), filepath.Join(dir, "written-1")}
	if err := sum(t.Context(), paths, &out); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("%s  %s/written-0\n%s  %s/written-1\n", rig.DigestOf(0, size).Hex(), dir,
		rig.DigestOf(7, size).Hex(), dir)
	if out.String() != want {
		t.Errorf("got\n%swant\n%s", &out, want)
	}
}

// TestHub: the answers that a client builds its cache from.
func TestHub(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte("{}"), 0o666); err != nil {
		t.Fatal(err)
	}
	h, err := hubHandler(dir)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(h)
	defer s.Close()
	answer := func(method, path string) (*http.Response, []byte) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, s.URL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return res, body
	}
	var tree []hubFile
	_, body := answer("GET", "/api/models/"+HubModel+"/tree/"+commit+"?recursive=true")
	if err := json.Unmarshal(body, &tree); err != nil || len(tree) != 1 || tree[0].Size != 2 {
		t.Fatalf("%s: %v", body, err)
	}
	res, _ := answer("HEAD", "/"+HubModel+"/resolve/"+commit+"/config.json")
	sum := identity.Sum([]byte("{}")).Hex()
	if res.ContentLength != 2 || res.Header.Get("Etag") != `"`+sum+`"` || res.Header.Get("X-Repo-Commit") != commit {
		t.Errorf("%v", res.Header)
	}
	if res, body := answer("GET", "/"+HubModel+"/resolve/main/config.json"); string(body) != "{}" {
		t.Errorf("%s: %q", res.Status, body)
	}
	if res, _ := answer("GET", "/"+HubModel+"/resolve/main/absent"); res.Header.Get("X-Error-Code") != "EntryNotFound" {
		t.Errorf("%s: %v", res.Status, res.Header)
	}
}
