package rig

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"testing/iotest"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/testregistry"
)

// TestStream checks that a stream is the same bytes however it is read, and others for another number.
func TestStream(t *testing.T) {
	const size = 3*Piece + 17
	whole, err := io.ReadAll(Stream(1, size))
	if err != nil || len(whole) != size {
		t.Fatalf("%d bytes, %v", len(whole), err)
	}
	halved, err := io.ReadAll(iotest.HalfReader(Stream(1, size)))
	if err != nil || !bytes.Equal(whole, halved) {
		t.Errorf("small reads give other bytes: %v", err)
	}
	if DigestOf(1, size) != identity.Sum(whole) || DigestOf(2, size) == DigestOf(1, size) {
		t.Error("digestOf does not name the bytes")
	}
}

// TestDo checks that an unexpected status is an error that carries the answer.
func TestDo(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, "full", http.StatusInsufficientStorage)
	}))
	defer s.Close()
	_, err := NewClient().Do(t.Context(), "GET", s.URL, nil, 0, http.StatusOK)
	if want := "GET " + s.URL + ": 507 Insufficient Storage: full"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestAnonymous(t *testing.T) {
	before := Anonymous(os.Getpid())
	ballast := make([]byte, 64<<20)
	for i := 0; i < len(ballast); i += 4096 {
		ballast[i] = 1
	}
	if after := Anonymous(os.Getpid()); before <= 0 || after < before+60 {
		t.Errorf("%.1f MiB, then %.1f after 64 more", before, after)
	}
	if ballast[0] != 1 {
		t.Fatal("ballast must outlive the reading")
	}
}

// TestPushes: each way to push brings the blob that it says.
func TestPushes(t *testing.T) {
	s := httptest.NewServer(testregistry.New(t))
	defer s.Close()
	ctx, c, size := t.Context(), NewClient(), int64(3*Piece)
	ways := []func(identity.Digest, io.Reader) error{
		func(d identity.Digest, r io.Reader) error { return c.Push(ctx, s.URL, "a", d, r, size) },
		func(d identity.Digest, r io.Reader) error { return c.PushWhole(ctx, s.URL, "a", d, r, size) },
		func(d identity.Digest, r io.Reader) error {
			took, err := c.PushChunks(ctx, s.URL, "a", d, r, size, 3)
			if err == nil && took <= 0 {
				t.Error("the last PUT took no time")
			}
			return err
		},
	}
	for i, push := range ways {
		d := DigestOf(uint64(i), size)
		if err := push(d, Stream(uint64(i), size)); err != nil {
			t.Errorf("way %d: %v", i, err)
		}
		res, err := c.Do(ctx, "HEAD", s.URL+api.PathBlob("a", d), nil, 0, http.StatusOK)
		if err != nil || res.ContentLength != size {
			t.Errorf("way %d: %+v, %v", i, res, err)
		}
	}
}
