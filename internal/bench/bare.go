package main

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

// serveBare is the yardstick of the registry and index tables: handlers that do what a blob or a page cost at least, and
// nothing else.
// Pages are the files page-* that the folder has at the start, from memory. Arguments: folder, address.
func serveBare(ctx context.Context, args []string) error {
	if len(args) != 2 {
		return errors.New("bare: want a folder and an address")
	}
	s := &http.Server{Addr: args[1], Handler: bareHandler(args[0])}
	go func() { <-ctx.Done(); s.Close() }()
	if err := s.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func bareHandler(dir string) http.Handler {
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
	mux.HandleFunc("GET /blob", func(w http.ResponseWriter, r *http.Request) {
		f, err := os.Open(filepath.Join(dir, "blob"))
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

// take writes body to dir/blob, hashing it, and makes it durable.
func take(dir string, body io.Reader, want string) error {
	f, err := os.CreateTemp(dir, "put-")
	if err != nil {
		return err
	}
	defer f.Close()
	h, buf := sha256.New(), make([]byte, rig.Piece)
	for {
		n, err := io.ReadFull(body, buf)
		h.Write(buf[:n])
		if _, err := f.Write(buf[:n]); err != nil {
			return err
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		} else if err != nil {
			return err
		}
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
