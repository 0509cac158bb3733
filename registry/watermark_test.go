package registry

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
)

func TestWatermark(t *testing.T) {
	var w watermark
	w.start(10)
	a := w.begin() // after 10
	if got := w.reach(a, 20); got != 20 {
		t.Error("alone:", got)
	}
	w.end(a, true)
	b, c := w.begin(), w.begin() // both after 20
	if got := w.reach(c, 40); got != 20 {
		t.Error("one that came after 20 is not in the index yet:", got)
	}
	w.end(c, true)
	d := w.begin() // after 40
	if got := w.reach(b, 30); got != 40 {
		t.Error("everything up to 40 is in the index:", got)
	}
	w.end(b, true)
	if got := w.reach(d, 50); got != 50 {
		t.Error(got)
	}
	w.end(d, false) // kept, and not in the index
	for at := blobstore.Position(60); at < 100; at += 10 {
		e := w.begin()
		if got := w.reach(e, at); got != 40 {
			t.Error("went past a ref that the index may lack:", got)
		}
		w.end(e, true)
	}
}

// sink is a ResponseWriter whose connection would send files itself.
type sink struct {
	http.ResponseWriter
	sources []io.Reader
	sent    int64
}

func (s *sink) ReadFrom(r io.Reader) (int64, error) {
	s.sources = append(s.sources, r)
	n, err := io.Copy(io.Discard, r)
	s.sent += n
	return n, err
}

// The connection must see a limited reader over the file itself, or it can't let the kernel send it.
func TestFilesReachTheConnection(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const size = 3*window + 5
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	s := &sink{ResponseWriter: httptest.NewRecorder()}
	var sent atomic.Int64
	w := &response{ResponseWriter: s, control: http.NewResponseController(s), idle: time.Second, sent: &sent}
	n, err := w.ReadFrom(&io.LimitedReader{R: f, N: size})
	if n != size || err != nil || s.sent != size || w.n != size || sent.Load() != size || len(s.sources) != 4 {
		t.Fatal(n, err, s.sent, len(s.sources))
	}
	for _, src := range s.sources {
		if l, ok := src.(*io.LimitedReader); !ok || l.R != io.Reader(f) {
			t.Fatalf("%T", src)
		}
	}
	if n, err := w.ReadFrom(strings.NewReader("other")); n != 5 || err != nil {
		t.Fatal(n, err)
	}
}

func TestOutcomesKeepOwnCodes(t *testing.T) {
	for _, o := range outcomes {
		if e := asAPI(fmt.Errorf("deep: %w", o.err)); e.Code != o.code || e.Status() < 400 {
			t.Errorf("%v: %+v", o.err, e)
		}
	}
	for _, err := range []error{blobstore.ErrUnavailable, blobstore.ErrInUse} {
		if e := asAPI(fmt.Errorf("deep: %w", err)); e.Status() != 503 {
			t.Errorf("%v: %+v", err, e)
		}
	}
	if e := asAPI(errors.New("path /secret")); e.Status() != 500 || strings.Contains(e.Message, "secret") {
		t.Errorf("%+v", e)
	}
}
