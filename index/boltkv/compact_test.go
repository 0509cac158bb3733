package boltkv

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/kiln-registry/kiln-registry/index"
)

// TestCompact: a compact copy has the same rows in fewer bytes, and after an error there is none.
func TestCompact(t *testing.T) {
	path := write(t, image(t))
	kv := mustOpen(t, path)
	want, err := contents(t, kv)
	if err != nil || len(want) == 0 {
		t.Fatal(err)
	}
	to := filepath.Join(t.TempDir(), "compact.db")
	if err := kv.Close(); err != nil {
		t.Fatal(err)
	}
	if err := Compact(t.Context(), path, to); err != nil {
		t.Fatal(err)
	}
	copied := mustOpen(t, to)
	if got, err := contents(t, copied); err != nil || !slices.Equal(got, want) {
		t.Errorf("%d rows, want %d: %v", len(got), len(want), err)
	}
	if err := Compact(t.Context(), path, to); !errors.Is(err, fs.ErrExist) {
		t.Errorf("over a file: %v", err)
	}
	if err := Compact(t.Context(), to, to+".2"); !errors.Is(err, index.ErrInUse) {
		t.Errorf("of a file in use: %v", err)
	}
	if err := Compact(t.Context(), path+".none", to+".2"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of no file: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Compact(ctx, path, to+".2"); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	damaged := write(t, image(t)[:3*os.Getpagesize()])
	if err := Compact(t.Context(), damaged, to+".2"); !errors.Is(err, index.ErrDamaged) {
		t.Errorf("of a damaged file: %v", err)
	}
	for _, name := range []string{to + ".2", path + ".none"} {
		if _, err := os.Lstat(name); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestSame: a copy that lacks a row, or has another value, is told.
func TestSame(t *testing.T) {
	for what, change := range map[string]func(x index.Txn) error{
		"a row less":    func(x index.Txn) error { return x.Delete(row(1)) },
		"another value": func(x index.Txn) error { return x.Put(row(1), []byte("other")) },
		"a row more":    func(x index.Txn) error { return x.Put([]byte("more"), nil) },
	} {
		path := write(t, image(t))
		kv := mustOpen(t, path)
		to := filepath.Join(t.TempDir(), "copy.db")
		if err := kv.CopyTo(t.Context(), to); err != nil {
			t.Fatal(err)
		}
		if err := kv.same(t.Context(), to); err != nil {
			t.Errorf("%s, before it: %v", what, err)
		}
		copied := mustOpen(t, to)
		if err := errors.Join(copied.Update(t.Context(), change), copied.Close()); err != nil {
			t.Fatal(err)
		}
		if err := kv.same(t.Context(), to); !errors.Is(err, index.ErrDamaged) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
