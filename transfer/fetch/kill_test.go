package fetch_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
	"github.com/kiln-registry/kiln-registry/transfer/fetch"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// killEnv tells a child process what it shall fetch: HOST DIGEST SIZE FOLDER, and the damaged form that is there.
const killEnv = "KILN_TEST_FETCH_TO_KILL"

func TestMain(m *testing.M) {
	tests := testlanes.Use(m)
	if order := os.Getenv(killEnv); order != "" {
		fmt.Fprintln(os.Stderr, child(order))
		os.Exit(1)
	}
	goleak.VerifyTestMain(tests)
}

func child(order string) error {
	var host, digest, dir, damaged string
	var size int64
	if n, err := fmt.Sscan(order, &host, &digest, &size, &dir, &damaged); err != nil && n < 4 {
		return err
	}
	d, err := identity.ParseDigest(digest)
	if err != nil {
		return err
	}
	c, err := client.New(host, client.Options{})
	if err != nil {
		return err
	}
	a, err := staging.Open(context.Background(), dir, staging.Options{})
	if err != nil {
		return err
	}
	f := staging.File{Name: "f0", Size: size, Digest: d}
	if err := a.Begin(staging.Record{Files: []staging.File{f}}); err != nil {
		return err
	}
	o := fetch.Options{Jobs: 2, Watch: &notes{}}
	files := []fetch.File{{File: f, Damaged: damaged}}
	_, err = fetch.Files(context.Background(), a, fetch.Source{Client: c, Repo: "m"}, files, o)
	return err
}

// TestKill: of what a process that was killed had received, only segments that were open come again, and of those at
// most what was not noted.
func TestKill(t *testing.T) {
	b := random(8*seg, 1)
	p := newPlace(t, b)
	dir := target(t)
	const enough = 72 * mib
	killed(t, p, b, dir, "", enough)
	if _, err := os.Lstat(dir); err == nil {
		t.Error("there is something at the target")
	}
	done, notes, err := get(t, dir, p.source(client.Options{}), fetch.Options{}, nil, b)
	if err != nil || done.Received+done.Resumed != int64(len(b)) || p.bytes() != done.Received {
		t.Errorf("%+v, %d bytes sent of %d, %v\n%s", done, p.bytes(), len(b), err, notes)
	}
	const onTheWay = 12 * mib // in the buffers of two connections
	if least := int64(enough - onTheWay - 2*seg); done.Resumed < least {
		t.Errorf("resumed at %d, want at least %d", done.Resumed, least)
	}
}

// killed has a process fetch b into a folder, and kills it when a place sent enough bytes. Then the place sends all.
func killed(t *testing.T, p *place, b []byte, dir, damaged string, enough int64) {
	t.Helper()
	reached := make(chan struct{})
	var once sync.Once
	p.onBlob(func(w http.ResponseWriter, r *http.Request, b []byte) bool {
		serve(&held{w, r, p, enough, func() { once.Do(func() { close(reached) }) }}, r, b)
		return true
	})
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %d %s %s",
		killEnv, p.host, identity.Sum(b), len(b), dir, damaged))
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	<-reached
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the child ended well")
	}
	p.busy.Wait() // nothing that was for the child is counted any more
	p.onBlob(nil)
}

// held lets no more bytes of a place through than limit, then says so and waits for the client to go.
type held struct {
	http.ResponseWriter
	r     *http.Request
	p     *place
	limit int64
	then  func()
}

func (h *held) Unwrap() http.ResponseWriter { return h.ResponseWriter }

func (h *held) Write(b []byte) (int, error) {
	if h.p.bytes() >= h.limit {
		h.then()
		<-h.r.Context().Done()
		panic(http.ErrAbortHandler)
	}
	return h.ResponseWriter.Write(b)
}
