package boltkv

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/kiln-registry/kiln-registry/index"
)

// Compact writes what a file holds to a new one, as CopyTo does, which it opens again and compares with it. The new file
// is durable on return, and gone after an error; the first one stays as it is. ErrInUse, ErrDamaged, fs.ErrNotExist if
// there is none, and fs.ErrExist if there is a new one.
func Compact(ctx context.Context, path, to string) (err error) {
	if _, err := os.Stat(path); err != nil { // Open would make it
		return err
	}
	from, err := Open(path, Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, from.Close()) }()
	if err := from.CopyTo(ctx, to); err != nil {
		return fmt.Errorf("copy %s: %w", path, err)
	}
	if err := from.same(ctx, to); err != nil {
		return errors.Join(fmt.Errorf("compare %s with its copy: %w", path, err), os.Remove(to))
	}
	return nil
}

// same opens a copy, which checks its form, and compares what it holds.
func (kv *KV) same(ctx context.Context, path string) (err error) {
	to, err := Open(path, Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	want, err := kv.sum(ctx)
	if err != nil {
		return err
	}
	switch got, err := to.sum(ctx); {
	case err != nil:
		return err
	case got != want:
		return fmt.Errorf("%w: %s has other rows", index.ErrDamaged, path)
	}
	return nil
}

// sum is a hash of all rows.
func (kv *KV) sum(ctx context.Context) (sum [sha256.Size]byte, err error) {
	h := sha256.New()
	err = kv.View(ctx, func(t index.Txn) error {
		var head []byte
		for k, v := range t.Range(nil, nil) {
			head = binary.AppendUvarint(binary.AppendUvarint(head[:0], uint64(len(k))), uint64(len(v)))
			h.Write(head)
			h.Write(k)
			h.Write(v)
			if err := ctx.Err(); err != nil {
				return err
			}
		}
		return nil
	})
	return [sha256.Size]byte(h.Sum(nil)), err
}

// CopyTo writes what the KV holds now to a new file, with pages that are full and none that is free: what is written
// meanwhile is not in it. The file is durable on return, and gone after an error. fs.ErrExist if there is one.
func (kv *KV) CopyTo(ctx context.Context, path string) (err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(path)
		}
	}()
	if err := f.Close(); err != nil {
		return err
	}
	to, err := Open(path, Options{})
	if err != nil {
		return err
	}
	err = kv.View(ctx, func(from index.Txn) error {
		return index.Load(ctx, to, func(put func(key, value []byte) error) error {
			for k, v := range from.Range(nil, nil) {
				if err := put(k, v); err != nil {
					return err
				}
			}
			return nil
		})
	})
	return errors.Join(err, to.Close(), syncDir(filepath.Dir(path)))
}
