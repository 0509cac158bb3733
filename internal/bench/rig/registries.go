package rig

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Kiln runs the kiln-registry at path bin on a new store in a new folder below dir.
func Kiln(ctx context.Context, bin, dir string) (*Server, error) {
	return fresh(dir, func(store string) (*Server, error) { return KilnOn(ctx, bin, filepath.Join(store, "data")) })
}

// KilnOn runs the kiln-registry at path bin on a store, which is made if it is not there and stays.
func KilnOn(ctx context.Context, bin, store string) (*Server, error) {
	return Start(ctx, "/readyz", bin, func(addr string) []string {
		return []string{"serve", "--addr", addr, "--store", store, "--init"}
	})
}

// distribution is what a registry of the distribution project is told: a folder, and that it may delete. All else is
// its default.
const distribution = `version: 0.1
storage:
  delete: {enabled: true}
  cache: {blobdescriptor: inmemory}
  filesystem: {rootdirectory: %q}
http: {addr: %q}
`

// Distribution runs the distribution registry at path bin on a new folder below dir.
func Distribution(ctx context.Context, bin, dir string) (*Server, error) {
	return fresh(dir, func(store string) (*Server, error) {
		config := filepath.Join(store, "config.yml")
		var failed error
		s, err := Start(ctx, "/v2/", bin, func(addr string) []string {
			text := fmt.Appendf(nil, distribution, filepath.Join(store, "data"), addr)
			failed = os.WriteFile(config, text, 0o666)
			return []string{"serve", config}
		})
		if failed != nil {
			return nil, failed
		}
		return s, err
	})
}

// fresh runs a server on a new folder below dir, which goes with it.
func fresh(dir string, run func(store string) (*Server, error)) (*Server, error) {
	store, err := os.MkdirTemp(dir, "store-")
	if err != nil {
		return nil, err
	}
	s, err := run(store)
	if err != nil {
		os.RemoveAll(store)
		return nil, err
	}
	s.Dir = store
	return s, nil
}

// VersionOf returns what the distribution registry at path bin says that it is.
func VersionOf(ctx context.Context, bin string) (string, error) {
	out, err := exec.CommandContext(ctx, bin, "--version").Output()
	fields := strings.Fields(string(out))
	if err != nil || len(fields) == 0 {
		return "", fmt.Errorf("%s --version: %q, %w", bin, out, err)
	}
	return fields[len(fields)-1], nil
}
