// Package bare holds the yardsticks of bench: programs that do what a blob, a page or a file cost at least, and nothing
// else. Each runs as a process of its own, so that its processor time is known.
package bare

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"

	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

// Commands are the programs by name. A server runs until ctx is done.
func Commands() map[string]func(ctx context.Context, args []string, out io.Writer) error {
	return map[string]func(context.Context, []string, io.Writer) error{
		"bare": blobs, "hub": hub, "get": get, "write": write, "sum": sum,
	}
}

// blobs serves what handler has. Arguments: folder, address.
func blobs(ctx context.Context, args []string, _ io.Writer) error {
	if len(args) != 2 {
		return errors.New("bare: want a folder and an address")
	}
	return serve(ctx, args[1], handler(args[0]))
}

func serve(ctx context.Context, addr string, h http.Handler) error {
	s := &http.Server{Addr: addr, Handler: h}
	go func() { <-ctx.Done(); s.Close() }()
	if err := s.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// handler serves the blob of the last PUT, which it hashes and makes durable, and the files page-* that the folder has
// at the start, from memory. PUT /file/NAME writes a file and does no more, but for ?sync=yes, which makes it durable.
func handler(dir string) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /ready", func(http.ResponseWriter, *http.Request) {})
	pages := map[string][]byte{}
	files, _ := filepath.Glob(filepath.Join(dir, "page-*")) // the pattern is a good one
	for _, path := range files {
		pages[filepath.Base(path)], _ = os.ReadFile(path) // what can't be read is not found below
	}
	mux.HandleFunc("GET /pages/{name}", func(w http.ResponseWriter, r *http.Request) {
		page, ok := pages[r.PathValue("name")]
		if !ok {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", strconv.Itoa(len(page)))
		w.Write(page) // a client that goes away is its own matter
	})
	mux.HandleFunc("GET /blob", func(w http.ResponseWriter, r *http.Request) { send(w, filepath.Join(dir, "blob")) })
	mux.HandleFunc("GET /file/{name}", func(w http.ResponseWriter, r *http.Request) {
		send(w, filepath.Join(dir, filepath.Base(r.PathValue("name"))))
	})
	mux.HandleFunc("PUT /file/{name}", func(w http.ResponseWriter, r *http.Request) {
		path := filepath.Join(dir, filepath.Base(r.PathValue("name")))
		if err := keep(path, r.Body, r.URL.Query().Get("sync") == "yes"); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.WriteHeader(http.StatusCreated)
	})
	mux.HandleFunc("PUT /blob", func(w http.ResponseWriter, r *http.Request) {
		if err := take(dir, r.Body, r.URL.Query().Get("sha256")); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.WriteHeader(http.StatusCreated)
	})
	return mux
}

// send answers with a file, by sendfile.
func send(w http.ResponseWriter, path string) {
	f, err := os.Open(path)
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	defer f.Close()
	i, err := f.Stat()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Length", strconv.FormatInt(i.Size(), 10)) // else it is chunked, and not sent by sendfile
	io.Copy(w, f)                                                     // a client that goes away is its own matter
}

// keep writes body to a new file.
func keep(path string, body io.Reader, sync bool) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := pieces(body, func(p []byte) error { _, err := f.Write(p); return err }); err != nil {
		return err
	}
	if sync {
		return f.Sync()
	}
	return nil
}

// pieces reads body to its end in full pieces, as the product does it.
func pieces(body io.Reader, use func([]byte) error) error {
	for buf := make([]byte, rig.Piece); ; {
		n, err := io.ReadFull(body, buf)
		if err := use(buf[:n]); err != nil {
			return err
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// take writes body to dir/blob, hashing it, and makes it durable.
func take(dir string, body io.Reader, want string) error {
	f, err := os.CreateTemp(dir, "put-")
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	err = pieces(body, func(p []byte) error {
		h.Write(p)
		_, err := f.Write(p)
		return err
	})
	if err != nil {
		return err
	}
	if hex.EncodeToString(h.Sum(nil)) != want {
		return errors.New("the bytes do not match their digest")
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), filepath.Join(dir, "blob")); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
