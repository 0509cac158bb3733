package registry_test

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/registry"
)

// slowStore does not say what it has before it is told to stop.
type slowStore struct {
	blobstore.Store
	asked chan struct{}
}

func (s slowStore) Stat(ctx context.Context, _ identity.Digest) (blobstore.Info, error) {
	close(s.asked)
	<-ctx.Done()
	return blobstore.Info{}, ctx.Err()
}

// A client that goes away while the store works is no failure of the registry.
func TestClientGoesAwayDuringACallOfTheStore(t *testing.T) {
	s := newServer(t)
	d := s.blob("a", []byte("x"))
	asked, seen := make(chan struct{}), make(chan registry.Served, 1)
	s.restart(func(c *registry.Config) {
		c.Store, c.Observe = slowStore{c.Store, asked}, func(did registry.Served) { seen <- did }
	})
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, "GET", s.url(api.PathBlob("a", d)), nil)
	if err != nil {
		t.Fatal(err)
	}
	left := make(chan error, 1)
	go func() {
		res, err := wire.Do(req)
		if err == nil {
			res.Body.Close()
		}
		left <- err
	}()
	<-asked
	cancel()
	<-left
	did := <-seen
	if did.Status != 499 || !errors.Is(did.Err, registry.ErrClientGone) {
		t.Errorf("%+v", did)
	}
	s.stop()
	if line := lineWith(s.log.String(), "status=499"); !strings.Contains(line, "level=INFO") ||
		!strings.Contains(line, "client is gone") {
		t.Errorf("%q in:\n%s", line, s.log)
	}
}

func lineWith(text, part string) string {
	for line := range strings.Lines(text) {
		if strings.Contains(line, part) {
			return line
		}
	}
	return ""
}

// A client that takes no more of a blob is no failure either.
func TestClientGoesAwayDuringABlob(t *testing.T) {
	s := newServer(t)
	d := s.blob("a", bytes.Repeat([]byte("x"), 32<<20))
	seen := make(chan registry.Served, 1)
	s.restart(func(c *registry.Config) { c.Observe = func(did registry.Served) { seen <- did } })
	res, err := wire.Get(s.url(api.PathBlob("a", d)))
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close() // which closes the connection, as most of the body is still to come
	if did := <-seen; did.Status != 200 || !errors.Is(did.Err, registry.ErrClientGone) {
		t.Errorf("%+v", did)
	}
	s.stop()
	if strings.Contains(s.log.String(), "level=ERROR") {
		t.Errorf("%s", s.log)
	}
}

// A blob that VerifyReads cuts off is an error in the log, which says of which blob and where.
func TestCutOffIsLogged(t *testing.T) {
	s := newServer(t)
	d := s.blob("a", bytes.Repeat([]byte("0123456789abcdef"), 20_000))
	s.damage(d, 1000)
	s.restart(func(c *registry.Config) { c.VerifyReads = true })
	res, err := wire.Get(s.url(api.PathBlob("a", d)))
	if err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	if _, err := got.ReadFrom(res.Body); err == nil {
		t.Error("a damaged blob came to its end")
	}
	res.Body.Close()
	s.stop()
	line := lineWith(s.log.String(), "level=ERROR")
	for _, part := range []string{"msg=request", d.String(), "cut off after 262144 of 320000 bytes", "status=200"} {
		if !strings.Contains(line, part) {
			t.Errorf("no %q in %q", part, line)
		}
	}
}
