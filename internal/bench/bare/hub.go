package bare

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// HubModel is the name under which hub serves its folder.
const HubModel = "bench/model"

// hub serves the files of a folder as a model hub does: what huggingface_hub's snapshot_download asks for, and nothing
// else. Every file is sent by sendfile. Arguments: folder, address.
func hub(ctx context.Context, args []string, _ io.Writer) error {
	if len(args) != 2 {
		return errors.New("hub: want a folder and an address")
	}
	h, err := hubHandler(args[0])
	if err != nil {
		return err
	}
	return serve(ctx, args[1], h)
}

// hubFile is an entry of a tree. The client names its copy of a file by OID.
type hubFile struct {
	Type string `json:"type"`
	Path string `json:"path"`
	Size int64  `json:"size"`
	OID  string `json:"oid"`
	LFS  hubLFS `json:"lfs"`
}

type hubLFS struct {
	OID     string `json:"oid"`
	SHA256  string `json:"sha256"`
	Size    int64  `json:"size"`
	Pointer int64  `json:"pointerSize"`
}

// commit is the only revision, whatever is asked for. Its form is that of git.
const commit = "6b696c6e6b696c6e6b696c6e6b696c6e6b696c6e"

func hubHandler(dir string) (http.Handler, error) {
	tree, err := hubTree(dir)
	if err != nil {
		return nil, err
	}
	etags, siblings := map[string]string{}, []map[string]any{}
	for _, f := range tree {
		etags[f.Path] = strconv.Quote(f.LFS.OID)
		siblings = append(siblings, map[string]any{"rfilename": f.Path, "size": f.Size, "lfs": f.LFS})
	}
	info := map[string]any{
		"id": HubModel, "sha": commit, "private": false, "gated": false, "disabled": false, "tags": []string{},
		"siblings": siblings,
	}
	answer := func(v any) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			json.NewEncoder(w).Encode(v) // a client that goes away is its own matter
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /ready", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /api/models/"+HubModel, answer(info))
	mux.HandleFunc("GET /api/models/"+HubModel+"/revision/{rev}", answer(info))
	mux.HandleFunc("GET /api/models/"+HubModel+"/tree/{rev}", answer(tree))
	mux.HandleFunc("GET /"+HubModel+"/resolve/{rev}/{path...}", func(w http.ResponseWriter, r *http.Request) {
		name := r.PathValue("path")
		w.Header().Set("X-Repo-Commit", commit)
		etag, ok := etags[name]
		if !ok {
			w.Header().Set("X-Error-Code", "EntryNotFound")
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Etag", etag)
		w.Header().Set("Content-Type", "application/octet-stream")
		http.ServeFile(w, r, filepath.Join(dir, name))
	})
	return mux, nil
}

// hubTree lists the files of a folder that has no other folders.
func hubTree(dir string) (tree []hubFile, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() || strings.HasPrefix(e.Name(), ".") {
			continue
		}
		f, err := os.Open(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		h := sha256.New()
		size, err := io.Copy(h, f)
		f.Close()
		if err != nil {
			return nil, err
		}
		sum := fmt.Sprintf("%x", h.Sum(nil))
		tree = append(tree, hubFile{"file", e.Name(), size, sum[:40], hubLFS{sum, sum, size, 0}})
	}
	return tree, nil
}
