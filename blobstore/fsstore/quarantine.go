package fsstore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// A blob is in quarantine when its file is there and the blob itself is not shown. The file keeps its inode and its
// time, so that it keeps its generation. The note beside it is for people, and may be missing.

// What the names of files in the quarantine end with, after the digest.
const (
	asideData = ""
	asideNote = ".json"
	asideTemp = ".tmp" // stands for what a killed process left of a note
)

// note is what HEX.json holds.
type note struct {
	Why   string    `json:"why"`
	Since time.Time `json:"since"`
}

func (st *Store) asidePath(d identity.Digest) string {
	return filepath.Join(st.dir, quarantineName, d.Hex())
}

func (st *Store) isAside(d identity.Digest) bool {
	_, err := os.Lstat(st.asidePath(d))
	return err == nil
}

// statAside describes what is set aside of d.
func (st *Store) statAside(d identity.Digest) (blobstore.Info, error) {
	fi, err := os.Lstat(st.asidePath(d))
	if err != nil {
		return blobstore.Info{}, err
	}
	return describeFile(d, fi), nil
}

// SetAside implements blobstore.Quarantine. The blob is hidden first, which needs no space: on an error it may be
// hidden already, and why and since when may not be written down.
func (st *Store) SetAside(ctx context.Context, i blobstore.Info, why string) error {
	defer st.names.lock(i.Digest)()
	err := st.change()
	if err == nil {
		err = st.setAside(ctx, i, why)
	}
	if err != nil {
		return fmt.Errorf("set aside blob %s, generation %s: %w", i.Digest, i.Generation, full(err))
	}
	return nil
}

func (st *Store) setAside(ctx context.Context, i blobstore.Info, why string) error {
	now, err := st.stat(i.Digest)
	if err == nil && now.Generation != i.Generation {
		err = blobstore.ErrNotFound
	}
	if err != nil {
		return err
	}
	if cut := st.checkSize("set aside blob", now); cut != nil && st.mendSize(ctx, now) {
		return blobstore.ErrIntact
	}
	b, err := json.Marshal(note{why, time.Now().UTC()})
	if err != nil {
		return err
	}
	path := st.asidePath(i.Digest)
	if err := st.disk.Rename(st.path(i.Digest), path); err != nil {
		return err
	}
	// The new name is made durable before the old one goes.
	if err := st.disk.SyncDir(filepath.Dir(path)); err != nil {
		return err
	}
	if err := st.syncShelf(i.Digest); err != nil {
		return err
	}
	return st.disk.WriteFile(path+asideNote, append(b, '\n'), 0o644)
}

// mendSize reads the file of a blob that has not the size that its note gives, and corrects the note if the bytes are
// those of the digest. It says whether it did.
func (st *Store) mendSize(ctx context.Context, i blobstore.Info) bool {
	f, err := st.disk.OpenFile(st.path(i.Digest), os.O_RDONLY, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	piece := st.pieces.get()
	defer st.pieces.put(piece)
	h, n := identity.NewHash(), int64(0)
	for err == nil && ctx.Err() == nil {
		var m int
		m, err = f.Read(piece[:])
		h.Write(piece[:m])
		n += int64(m)
	}
	if err != io.EOF || identity.DigestOf(h) != i.Digest {
		return false
	}
	// Who doesn't own the system must be able to write the file to change its notes.
	if f.Chmod(0o644) == nil {
		f.SetNote(sizeNote, strconv.FormatInt(n, 10))
	}
	return f.Chmod(0o444) == nil && st.checkSize("set aside blob", blobstore.Info{Digest: i.Digest, Size: n}) == nil
}

// Aside implements blobstore.Quarantine.
func (st *Store) Aside(ctx context.Context) iter.Seq2[blobstore.AsideInfo, error] {
	return func(yield func(blobstore.AsideInfo, error) bool) {
		err := st.eachAside(ctx, func(d identity.Digest, ext, _ string) error {
			if ext != asideData {
				return nil
			}
			if _, err := st.Stat(ctx, d); !errors.Is(err, blobstore.ErrQuarantined) {
				return nil
			}
			a, err := st.describeAside(d)
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			} else if err != nil {
				return err
			}
			if !yield(a, nil) {
				return errStop
			}
			return nil
		})
		if err != nil && err != errStop {
			yield(blobstore.AsideInfo{}, fmt.Errorf("list quarantine: %w", err))
		}
	}
}

// eachAside calls fn for every file of the quarantine that is one of ours.
func (st *Store) eachAside(ctx context.Context, fn func(d identity.Digest, ext, name string) error) error {
	err := eachName(ctx, filepath.Join(st.dir, quarantineName), func(name string) error {
		hex, ext := name, asideData
		if begin, _, ok := strings.Cut(name, asideNote+".tmp-"); ok {
			hex, ext = strings.TrimPrefix(begin, "."), asideTemp
		} else if begin, ok := strings.CutSuffix(name, asideNote); ok {
			hex, ext = begin, asideNote
		}
		d, err := identity.ParseDigest(hashName + ":" + hex)
		if err != nil {
			return nil
		}
		return fn(d, ext, name)
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (st *Store) describeAside(d identity.Digest) (a blobstore.AsideInfo, err error) {
	path := st.asidePath(d)
	fi, err := os.Lstat(path)
	if err != nil {
		return a, err
	}
	a.Info = describeFile(d, fi)
	var n note
	if b, err := durable.ReadRegular(path + asideNote); err == nil && json.Unmarshal(b, &n) == nil {
		a.Why, a.Since = n.Why, n.Since
		return a, nil
	}
	a.Why, a.Since = "the reason was not written down", fi.ModTime()
	if sys, ok := fi.Sys().(*syscall.Stat_t); ok {
		a.Since = time.Unix(sys.Ctim.Unix()) // of the rename
	}
	return a, nil
}

// dropAside removes what is set aside of d, if anything, durably. The caller holds the lock of d.
func (st *Store) dropAside(d identity.Digest) error {
	if !st.isAside(d) {
		return nil
	}
	path := st.asidePath(d)
	if err := st.disk.Remove(path + asideNote); err != nil {
		return err
	}
	if err := st.clear(path); err != nil {
		return err
	}
	return st.disk.SyncDir(filepath.Dir(path))
}

// sweepAside removes what a killed process left of a blob that was healed or deleted, and makes the rest durable. It
// makes the folder, as setting aside must not need space for it.
func (st *Store) sweepAside() error {
	dir := filepath.Join(st.dir, quarantineName)
	if err := st.disk.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	err := st.eachAside(context.Background(), func(d identity.Digest, ext, name string) error {
		_, gone := os.Lstat(st.path(d))
		if ext == asideTemp || gone == nil || !st.isAside(d) {
			return st.clear(filepath.Join(dir, name))
		}
		return nil
	})
	if err != nil {
		return err
	}
	return st.disk.SyncDir(dir)
}
