package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"testing/iotest"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

// TestStream checks that a stream is the same bytes however it is read, and others for another number.
func TestStream(t *testing.T) {
	const size = 3*rig.Piece + 17
	whole, err := io.ReadAll(rig.Stream(1, size))
	if err != nil || len(whole) != size {
		t.Fatalf("%d bytes, %v", len(whole), err)
	}
	halved, err := io.ReadAll(iotest.HalfReader(rig.Stream(1, size)))
	if err != nil || !bytes.Equal(whole, halved) {
		t.Errorf("small reads give other bytes: %v", err)
	}
	if rig.DigestOf(1, size) != identity.Sum(whole) || rig.DigestOf(2, size) == rig.DigestOf(1, size) {
		t.Error("digestOf does not name the bytes")
	}
}

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
	s := httptest.NewServer(bareHandler(dir))
	defer s.Close()
	res, err := rig.NewClient().Do(context.Background(), "GET", s.URL+"/blob", nil, 0, http.StatusOK)
	if err != nil || res.ContentLength != int64(len(body)) {
		t.Errorf("a chunked answer is not sent by sendfile: %+v, %v", res, err)
	}
}

// TestDo checks that an unexpected status is an error that carries the answer.
func TestDo(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, "full", http.StatusInsufficientStorage)
	}))
	defer s.Close()
	_, err := rig.NewClient().Do(context.Background(), "GET", s.URL, nil, 0, http.StatusOK)
	if want := "GET " + s.URL + ": 507 Insufficient Storage: full"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestAnonymous(t *testing.T) {
	before := rig.Anonymous(os.Getpid())
	ballast := make([]byte, 64<<20)
	for i := 0; i < len(ballast); i += 4096 {
		ballast[i] = 1
	}
	if after := rig.Anonymous(os.Getpid()); before <= 0 || after < before+60 {
		t.Errorf("%.1f MiB, then %.1f after 64 more", before, after)
	}
	if ballast[0] != 1 {
		t.Fatal("ballast must outlive the reading")
	}
}
