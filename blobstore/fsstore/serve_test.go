package fsstore

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
)

// sink is a response that remembers what it was given to read from.
type sink struct {
	bytes.Buffer
	from io.Reader
}

func (s *sink) ReadFrom(r io.Reader) (int64, error) {
	s.from = r
	return io.Copy(&s.Buffer, struct{ io.Reader }{r})
}

// TestResponseSeesTheFile: what net/http needs to use sendfile is an *io.LimitedReader over an *os.File.
func TestResponseSeesTheFile(t *testing.T) {
	st, _ := openFaulty(t)
	b := pattern(300_000, "sendfile")
	i := push(t, st, b)
	r, err := st.Open(t.Context(), i, 1000, 200_000)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var s sink
	if n, err := io.Copy(&s, r); n != 200_000 || err != nil || !bytes.Equal(s.Bytes(), b[1000:201_000]) {
		t.Errorf("copied %d, %v", n, err)
	}
	limited, ok := s.from.(*io.LimitedReader)
	if !ok {
		t.Fatalf("the response reads from a %T", s.from)
	}
	if _, ok := limited.R.(*os.File); !ok {
		t.Errorf("the response reads from a %T", limited.R)
	}
}

// TestServe: a range of a blob through a real server.
func TestServe(t *testing.T) {
	st, _ := openFaulty(t)
	b := pattern(3<<20, "served")
	i := push(t, st, b)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := st.Open(r.Context(), i, 5, 2<<20)
		if err != nil {
			t.Error(err)
			return
		}
		defer body.Close()
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Content-Length", "2097152")
		if _, err := io.Copy(w, body); err != nil {
			t.Error(err)
		}
	}))
	defer srv.Close()
	resp, err := http.Get(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil || !bytes.Equal(got, b[5:5+2<<20]) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}
