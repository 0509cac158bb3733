package home

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/registry"
)

func TestNotReplayed(t *testing.T) {
	at := Home{Place: Place{Name: "d", Folder: "d"}, State: "d"}
	for _, c := range []struct {
		err  error
		hint string
	}{
		{api.Errorf(api.CodeUnavailable, "x"), "reindex"},
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, "reindex"},
		{fmt.Errorf("read: %w", syscall.EIO), "check the disk"},
		{fmt.Errorf("x: %w", blobstore.ErrNoSpace), "free some space"},
		{blobstore.ErrDamaged, "backup"},
	} {
		var out bytes.Buffer
		if code := cli.Report(&out, at.NotReplayed(c.err)); code != cli.CodeDisk ||
			!strings.Contains(out.String(), c.hint) || strings.Contains(out.String(), "address") {
			t.Errorf("%v: %d: %s", c.err, code, &out)
		}
	}
	if err := at.NotReplayed(context.Canceled); cli.Code(err) != cli.CodeTryAgain {
		t.Error(err)
	}
}

// TestCopy: an answer that was cut off, or did not come to its end, is an error.
func TestCopy(t *testing.T) {
	const lines = "{}\n{}\n"
	for name, c := range map[string]struct {
		end  func(w http.ResponseWriter)
		code int
		text string
	}{
		"whole":   {func(w http.ResponseWriter) { w.Header().Set(registry.EndTrailer, registry.EndWhole) }, 0, ""},
		"cut":     {func(http.ResponseWriter) { panic(http.ErrAbortHandler) }, 75, "did not answer to the end"},
		"no end":  {func(http.ResponseWriter) {}, 75, "did not answer to the end"},
		"renewed": {func(w http.ResponseWriter) { w.Header().Set(registry.EndTrailer, "503 x is made") }, 75, "x is made"},
		"damaged": {func(w http.ResponseWriter) { w.Header().Set(registry.EndTrailer, "500 x is bad") }, 7, "x is bad"},
	} {
		dir := t.TempDir()
		h := Home{Place: Place{Name: dir, Folder: dir}, State: dir}
		l, err := net.Listen("unix", h.File(SocketFile))
		if err != nil {
			t.Fatal(err)
		}
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Trailer", registry.EndTrailer)
			_, err := io.WriteString(w, lines)
			if err = errors.Join(err, http.NewResponseController(w).Flush()); err != nil {
				t.Error(err)
			}
			c.end(w)
		}))
		server.Listener.Close()
		server.Listener = l
		server.Start()
		resp, err := h.Ask(t.Context(), "GET", "/export")
		if err != nil {
			t.Fatal(err)
		}
		var got, said bytes.Buffer
		code := cli.Report(&said, h.Copy(&got, resp))
		if code != c.code || got.String() != lines || !strings.Contains(said.String(), c.text) ||
			strings.Count(said.String(), "error:") != min(c.code, 1) {
			t.Errorf("%s: %d: %s%s", name, code, &got, &said)
		}
		resp.Body.Close()
		server.Close()
	}
}
