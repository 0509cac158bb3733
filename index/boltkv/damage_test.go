package boltkv

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/index"
)

// image returns the bytes of a file with rows of several sizes, branches and free pages.
func image(t testing.TB) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image.db")
	kv := mustOpen(t, path)
	for round := range 4 {
		err := kv.Update(t.Context(), func(x index.Txn) error {
			for i := round; i < 1200; i += 2 {
				if err := x.Put(row(i), bytes.Repeat(row(i), 1+i%7)); err != nil {
					return err
				}
			}
			if err := x.Put([]byte("big"), bytes.Repeat([]byte("big"), 5000)); err != nil {
				return err
			}
			return x.Delete(row(round * 100))
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := kv.Close(); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	m, err := readMeta(bytes.NewReader(data), int64(len(data)))
	if err != nil {
		t.Fatal(err)
	}
	return data[:m.pages*uint64(m.pageSize)]
}

func row(i int) []byte { return fmt.Appendf(nil, "row %06d", i) }

func mustOpen(t testing.TB, path string) *KV {
	t.Helper()
	kv, err := Open(path, Options{Timeout: 1})
	if err != nil {
		t.Fatal(err)
	}
	return kv
}

func write(t testing.TB, data []byte) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "damaged.db")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// contents reads everything.
func contents(t testing.TB, kv *KV) (rows []string, err error) {
	t.Helper()
	err = kv.View(t.Context(), func(x index.Txn) error {
		rows = nil
		for k, v := range x.Range(nil, nil) {
			rows = append(rows, string(k)+"="+string(v))
			if w, err := x.Get(k); err != nil || !bytes.Equal(v, w) {
				return fmt.Errorf("%q: range and get differ: %w", k, err)
			}
		}
		return nil
	})
	return rows, err
}

func noise(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// TestPagesOfNoise: pages 2 to 5 overwritten are found when the file is opened; so is any one page, unless it was free.
func TestPagesOfNoise(t *testing.T) {
	whole := image(t)
	size := os.Getpagesize()
	kv := mustOpen(t, write(t, whole))
	want, err := contents(t, kv)
	if err := errors.Join(err, kv.Close()); err != nil || len(want) < 1000 {
		t.Fatal(len(want), err)
	}
	data := slices.Clone(whole)
	copy(data[2*size:6*size], noise(1, 4*size))
	path := write(t, data)
	if _, err := Open(path, Options{}); !errors.Is(err, index.ErrDamaged) || !strings.Contains(err.Error(), path) {
		t.Errorf("pages 2 to 5: %v", err)
	}
	found := 0
	for page := range len(whole) / size {
		data := slices.Clone(whole)
		copy(data[page*size:], noise(uint64(page), size))
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		kv, err := Open(path, Options{})
		if err != nil {
			if !errors.Is(err, index.ErrDamaged) {
				t.Errorf("page %d: %v", page, err)
			}
			found++
			continue
		}
		got, err := contents(t, kv)
		if err != nil || page > 1 && !slices.EqualFunc(got, want, sameKey) { // a meta page less is one transaction less
			t.Errorf("page %d: not noticed when opened, then %d rows of %d, %v", page, len(got), len(want), err)
		}
		if err := kv.Close(); err != nil {
			t.Errorf("page %d: %v", page, err)
		}
	}
	if found < 20 {
		t.Errorf("noise was found in %d pages only", found)
	}
}

// sameKey compares rows by key: noise inside a long value is for the index to notice, whose values carry checksums.
func sameKey(a, b string) bool {
	a, _, _ = strings.Cut(a, "=")
	b, _, _ = strings.Cut(b, "=")
	return a == b
}

// TestCounts: one bit of the count of a page in use, or of a size or place of one of its elements, is found when the
// file is opened. The rows that would be gone by it are not to be taken for absent.
func TestCounts(t *testing.T) {
	whole := image(t)
	size := os.Getpagesize()
	kv := mustOpen(t, write(t, whole))
	want, err := contents(t, kv)
	if err := errors.Join(err, kv.Close()); err != nil {
		t.Fatal(err)
	}
	path := write(t, whole)
	found, pages := 0, 0
	for page := 2; page < len(whole)/size; page++ {
		kind := order.Uint16(whole[page*size+8:])
		if kind != pageLeaf && kind != pageBranch {
			continue
		}
		pages++
		for bit := range 16 * 8 { // the count, the overflow, and the first element up to its last size
			at := page*size + 10 + bit/8
			data := slices.Clone(whole)
			data[at] ^= 1 << (bit % 8)
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
			kv, err := Open(path, Options{})
			if err != nil {
				found++
				continue
			}
			got, err := contents(t, kv)
			if err := errors.Join(err, kv.Close()); err != nil || !slices.Equal(got, want) {
				t.Errorf("page %d of kind %d, bit %d of byte %d: %d rows of %d, %v", page, kind, bit%8, at-page*size, len(got),
					len(want), err)
			}
		}
	}
	if pages < 20 || found < 64*20 {
		t.Errorf("found %d in %d pages", found, pages)
	}
}

func TestTruncated(t *testing.T) {
	whole := image(t)
	for _, n := range []int{1, 15, 4096, 8192, 12288, 16384, 40000, len(whole) / 2} {
		if _, err := Open(write(t, whole[:n]), Options{}); !errors.Is(err, index.ErrDamaged) {
			t.Errorf("cut to %d bytes: %v", n, err)
		}
	}
}

func TestNotBolt(t *testing.T) {
	for _, data := range [][]byte{[]byte("#!/bin/sh\n"), bytes.Repeat([]byte("text "), 9999), make([]byte, 1<<16)} {
		if _, err := Open(write(t, data), Options{}); !errors.Is(err, index.ErrDamaged) {
			t.Errorf("%.10q…: %v", data, err)
		}
	}
	if _, err := Open(t.TempDir(), Options{}); err == nil || errors.Is(err, index.ErrDamaged) {
		t.Errorf("a folder: %v", err)
	}
	if _, err := Open(filepath.Join(t.TempDir(), "no", "folder"), Options{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no folder: %v", err)
	}
}

// TestFreeAndUsed: a page that is in use and on the freelist would be overwritten some day; bbolt does not look.
func TestFreeAndUsed(t *testing.T) {
	data := image(t)
	m, err := readMeta(bytes.NewReader(data), int64(len(data)))
	if err != nil {
		t.Fatal(err)
	}
	list := data[int64(m.freelist)*int64(m.pageSize):]
	if n := order.Uint16(list[10:]); n == 0 {
		t.Fatal("the file has no free page")
	}
	order.PutUint64(list[pageHeader:], m.root)
	_, err = Open(write(t, data), Options{})
	if !errors.Is(err, index.ErrDamaged) || !strings.Contains(err.Error(), "used twice") {
		t.Errorf("%v", err)
	}
}

// TestDamagedWhileOpen spoils the file under an open KV: no panic and no fault gets out, reads say ErrDamaged or are
// right, a broken writer says so from then on, and the file can be replaced and opened again.
func TestDamagedWhileOpen(t *testing.T) {
	whole := image(t)
	size := os.Getpagesize()
	want, err := contents(t, mustOpen(t, write(t, whole)))
	if err != nil {
		t.Fatal(err)
	}
	spoil := map[string]func(path string) error{
		"noise": func(path string) error {
			return patch(path, int64(2*size), noise(7, len(whole)-2*size))
		},
		"zeros":     func(path string) error { return patch(path, int64(2*size), make([]byte, len(whole)-2*size)) },
		"truncated": func(path string) error { return os.Truncate(path, int64(3*size)) },
		"emptied":   func(path string) error { return os.Truncate(path, 0) },
	}
	for name, spoil := range spoil {
		t.Run(name, func(t *testing.T) {
			path := write(t, whole)
			kv := mustOpen(t, path)
			if err := spoil(path); err != nil {
				t.Fatal(err)
			}
			if got, err := contents(t, kv); !errors.Is(err, index.ErrDamaged) {
				t.Errorf("read %d rows, %v", len(got), err)
			}
			for range 3 {
				err := kv.Update(t.Context(), func(x index.Txn) error { return x.Put(row(5), []byte("new")) })
				if !errors.Is(err, index.ErrDamaged) || !strings.Contains(err.Error(), path) {
					t.Errorf("update: %v", err)
				}
			}
			if err := kv.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
			if err := os.WriteFile(path, whole, 0o600); err != nil {
				t.Fatal(err)
			}
			again := mustOpen(t, path)
			defer again.Close()
			if got, err := contents(t, again); err != nil || !slices.Equal(got, want) {
				t.Errorf("opened again: %d rows, %v", len(got), err)
			}
		})
	}
}

func patch(path string, at int64, data []byte) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteAt(data, at)
	return err
}

// TestCheckedLater: what Open would refuse is found while the file is used, and everything fails from then on.
func TestCheckedLater(t *testing.T) {
	whole := image(t)
	size := os.Getpagesize()
	found := 0
	for page := range len(whole) / size {
		data := slices.Clone(whole)
		copy(data[page*size:], noise(uint64(page), size))
		path := write(t, data)
		first, refused := Open(path, Options{})
		if refused == nil {
			if err := first.Close(); err != nil {
				t.Fatal(err)
			}
		}
		kv, err := Open(path, Options{CheckLater: 1})
		if err != nil {
			if !errors.Is(refused, index.ErrDamaged) || !errors.Is(err, index.ErrDamaged) {
				t.Errorf("page %d: %v, without CheckLater %v", page, err, refused)
			}
			continue
		}
		err = kv.Checked(t.Context())
		if (refused == nil) != (err == nil) {
			t.Errorf("page %d: %v, without CheckLater %v", page, err, refused)
		}
		if err != nil {
			found++
			update := kv.Update(t.Context(), func(x index.Txn) error { return x.Put(row(9), nil) })
			_, view := contents(t, kv)
			for _, err := range []error{err, update, view} {
				if !errors.Is(err, index.ErrDamaged) || !strings.Contains(err.Error(), path) {
					t.Errorf("page %d: %v", page, err)
				}
			}
		}
		if err := kv.Close(); err != nil {
			t.Errorf("page %d: %v", page, err)
		}
	}
	if found < 20 {
		t.Errorf("noise was found later in %d pages only", found)
	}
}

// TestCheckBesideWrites: what is written while the file is checked is not taken for damage, and Close does not wait for
// the end of the check.
func TestCheckBesideWrites(t *testing.T) {
	path := filepath.Join(t.TempDir(), "index.db")
	kv := mustOpen(t, path)
	err := kv.Update(t.Context(), func(x index.Txn) error {
		for i := range 40_000 {
			if err := x.Put(row(i), bytes.Repeat(row(i), 10)); err != nil {
				return err
			}
		}
		return nil
	})
	if err := errors.Join(err, kv.Close()); err != nil {
		t.Fatal(err)
	}
	for round := range 10 {
		kv, err := Open(path, Options{Timeout: 1, CheckLater: 1})
		if err != nil {
			t.Fatal(err)
		}
		checked := make(chan error, 1)
		go func() { checked <- kv.Checked(context.Background()) }()
		for i := 0; len(checked) == 0 && (i == 0 || round%2 == 0); i++ {
			err := kv.Update(t.Context(), func(x index.Txn) error {
				return errors.Join(x.Put(row(i*7919%40_000), bytes.Repeat(row(i), 1+i%9)), x.Delete(row(i*7907%40_000)))
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := kv.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-checked; err != nil && (round%2 == 0 || !errors.Is(err, fs.ErrClosed)) {
			t.Errorf("round %d: %v", round, err)
		}
	}
	if err := mustOpen(t, path).Close(); err != nil {
		t.Error(err)
	}
}

// TestFaultInFunction: a value that is unmapped while the caller's function reads it is damage; a nil pointer of the
// function is its own.
func TestFaultInFunction(t *testing.T) {
	whole := image(t)
	path := write(t, whole)
	kv := mustOpen(t, path)
	defer kv.Close()
	sum := byte(0)
	err := kv.View(t.Context(), func(x index.Txn) error {
		v, err := x.Get([]byte("big"))
		if err != nil {
			return err
		}
		if err := os.Truncate(path, 0); err != nil {
			return err
		}
		for _, b := range v {
			sum += b
		}
		return nil
	})
	if !errors.Is(err, index.ErrDamaged) {
		t.Errorf("%v, sum %d", err, sum)
	}
	other := mustOpen(t, write(t, whole))
	defer other.Close()
	defer func() {
		if r := recover(); r == nil {
			t.Error("the panic of the function was swallowed")
		}
	}()
	var none *struct{ n int }
	other.View(t.Context(), func(index.Txn) error {
		none.n++
		return nil
	})
}

// FuzzOpen: whatever the file holds, Open refuses it or what it holds can be walked and written without a panic.
func FuzzOpen(f *testing.F) {
	whole := image(f)
	f.Add(uint32(0), []byte{})
	f.Add(uint32(2*4096), []byte("noise"))
	f.Add(uint32(3*4096+8), []byte{1, 0, 255, 255})
	f.Add(uint32(3*4096+16), []byte{255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, at uint32, change []byte) {
		data := slices.Clone(whole)
		copy(data[int(at)%len(data):], change)
		kv, err := Open(write(t, data), Options{})
		if err != nil {
			if !errors.Is(err, index.ErrDamaged) {
				t.Error(err)
			}
			return
		}
		if _, err := contents(t, kv); err != nil {
			t.Errorf("opened, then: %v", err)
		}
		if err := kv.Update(t.Context(), func(x index.Txn) error { return x.Put(row(9), nil) }); err != nil {
			t.Errorf("opened, then: %v", err)
		}
		if err := kv.Close(); err != nil {
			t.Error(err)
		}
	})
}
