package fsstore

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

func (st *Store) path(d identity.Digest) string {
	return filepath.Join(shelf(st.dir, d[0]), d.Hex())
}

// describeFile makes the Info of a blob's file. The generation is its inode and the time of its commit: both stay with
// the file for as long as it has the name.
func describeFile(d identity.Digest, fi fs.FileInfo) blobstore.Info {
	var inode uint64
	if sys, ok := fi.Sys().(*syscall.Stat_t); ok {
		inode = sys.Ino
	}
	return blobstore.Info{
		Digest:     d,
		Size:       fi.Size(),
		Created:    fi.ModTime(),
		Generation: fmt.Sprintf("%x-%x", inode, fi.ModTime().UnixNano()),
	}
}

// absent makes the error for a blob that is not shown. An err that is nil or fs.ErrNotExist says no more than that.
func (st *Store) absent(what string, d identity.Digest, err error) error {
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		err = blobstore.ErrNotFound
		if st.isAside(d) {
			err = blobstore.ErrQuarantined
		}
	}
	return fmt.Errorf("%s %s: %w", what, d, err)
}

// Stat implements blobstore.Store.
func (st *Store) Stat(ctx context.Context, d identity.Digest) (blobstore.Info, error) {
	fi, err := st.lstat(d)
	if err != nil {
		return blobstore.Info{}, err
	}
	i := describeFile(d, fi)
	if !fi.Mode().IsRegular() {
		return i, fmt.Errorf("stat blob %s: %w: in place of its file is something else: %s", d, blobstore.ErrCut, fi.Mode())
	}
	return i, st.checkSize("stat blob", i)
}

// sizeNote is what the number of bytes that were stored is kept as with the file of a blob. Files of earlier programs
// have none, nor have those that were copied by a tool that drops it.
const sizeNote = "kiln.size"

// checkSize returns blobstore.ErrCut for a file that has not the size that was stored.
func (st *Store) checkSize(what string, i blobstore.Info) error {
	stored, err := strconv.ParseInt(durable.Note(st.path(i.Digest), sizeNote), 10, 64)
	if err != nil || stored == i.Size {
		return nil
	}
	return fmt.Errorf("%s %s: %w: its file has %d bytes, stored were %d", what, i.Digest, blobstore.ErrCut, i.Size, stored)
}

// stat is Stat for a copy of whatever size.
func (st *Store) stat(d identity.Digest) (blobstore.Info, error) {
	fi, err := st.lstat(d)
	if err != nil {
		return blobstore.Info{}, err
	}
	return describeFile(d, fi), nil
}

func (st *Store) lstat(d identity.Digest) (fs.FileInfo, error) {
	// Hidden is asked last: a commit hides the blob before it names it.
	fi, err := os.Lstat(st.path(d))
	if err != nil || st.names.isHidden(d) {
		return nil, st.absent("stat blob", d, err)
	}
	return fi, nil
}

// Open implements blobstore.Store. The reader ends at the end of the blob also when n goes past it; it is an error if
// off does. Bytes are not checked again. The file stays readable after a Delete.
func (st *Store) Open(ctx context.Context, i blobstore.Info, off, n int64) (io.ReadCloser, error) {
	f, err := durable.OpenRegular(st.path(i.Digest), os.O_RDONLY, 0)
	if errors.Is(err, durable.ErrNotRegular) {
		err = fmt.Errorf("%w: %w", blobstore.ErrCut, err)
	}
	if err != nil {
		return nil, st.absent("open blob", i.Digest, err)
	}
	r, err := st.section(f, i, off, n)
	if err != nil {
		f.Close()
		if errors.Is(err, blobstore.ErrCut) {
			return nil, err
		}
		return nil, st.absent("open blob", i.Digest, err)
	}
	return r, nil
}

func (st *Store) section(f *os.File, i blobstore.Info, off, n int64) (*reader, error) {
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if st.names.isHidden(i.Digest) {
		return nil, fs.ErrNotExist
	}
	now := describeFile(i.Digest, fi)
	if now.Generation != i.Generation {
		return nil, blobstore.ErrNotFound
	}
	if err := st.checkSize("open blob", now); err != nil {
		return nil, err
	}
	if off < 0 || off > fi.Size() {
		return nil, fmt.Errorf("offset %d is outside of its %d bytes", off, fi.Size())
	}
	if _, err := f.Seek(off, io.SeekStart); err != nil {
		return nil, err
	}
	if n < 0 || n > fi.Size()-off {
		n = fi.Size() - off
	}
	return &reader{st, f, io.LimitedReader{R: f, N: n}}, nil
}

// reader reads a range of a blob's file. When an HTTP response is read from it by io.Copy, the response sees an
// *io.LimitedReader over an *os.File, which is what it can send without copying.
type reader struct {
	st   *Store
	file *os.File
	rest io.LimitedReader
}

func (r *reader) Read(b []byte) (int, error) { return r.rest.Read(b) }

func (r *reader) Close() error { return r.file.Close() }

// WriteTo implements io.WriterTo.
func (r *reader) WriteTo(w io.Writer) (int64, error) {
	if rf, ok := w.(io.ReaderFrom); ok {
		return rf.ReadFrom(&r.rest)
	}
	piece := r.st.pieces.get()
	defer r.st.pieces.put(piece)
	return io.CopyBuffer(w, &r.rest, piece[:])
}

// Delete implements blobstore.Store. It also removes a copy that was set aside.
func (st *Store) Delete(ctx context.Context, i blobstore.Info) error {
	defer st.names.lock(i.Digest)()
	err := st.change()
	if err == nil {
		err = st.delete(ctx, i)
	}
	if err != nil {
		return fmt.Errorf("delete blob %s, generation %s: %w", i.Digest, i.Generation, err)
	}
	return nil
}

func (st *Store) delete(ctx context.Context, i blobstore.Info) error {
	now, err := st.stat(i.Digest)
	aside := errors.Is(err, blobstore.ErrQuarantined)
	if aside {
		now, err = st.statAside(i.Digest)
	}
	if err == nil && now.Generation != i.Generation {
		err = blobstore.ErrNotFound
	}
	if err != nil {
		return err
	}
	if err := st.dropSegments(i.Digest); err != nil {
		return err
	}
	if aside {
		return st.dropAside(i.Digest)
	}
	if err := st.clear(st.path(i.Digest)); err != nil {
		return err
	}
	return st.syncShelf(i.Digest)
}

func (st *Store) syncShelf(d identity.Digest) error {
	return st.shelves[d[0]].syncs.Do(func() error { return st.disk.SyncDir(shelf(st.dir, d[0])) })
}

// List implements blobstore.Store. It holds no lock and no open folder while the caller works; a blob that comes or goes
// meanwhile may be yielded or not.
func (st *Store) List(ctx context.Context, after identity.Digest) iter.Seq2[blobstore.Info, error] {
	return func(yield func(blobstore.Info, error) bool) {
		last := ""
		if !after.IsZero() {
			last = after.Hex()
		}
		for first := int(after[0]); first < 256; {
			found, err := st.page(ctx, byte(first), last)
			if err != nil {
				yield(blobstore.Info{}, fmt.Errorf("list blobs: %w", err))
				return
			}
			if !st.yieldPage(ctx, found, yield) {
				return
			}
			if len(found) < page {
				first++
			} else {
				last = found[page-1]
			}
		}
	}
}

func (st *Store) yieldPage(ctx context.Context, hexes []string, yield func(blobstore.Info, error) bool) bool {
	for _, name := range hexes {
		d, err := identity.ParseDigest(hashName + ":" + name)
		if err != nil {
			continue // not a blob
		}
		i, err := st.stat(d)
		if errors.Is(err, blobstore.ErrNotFound) {
			continue
		}
		if !yield(i, err) || err != nil {
			return false
		}
	}
	return true
}

// page returns the first names of a shelf after last, in ascending order.
func (st *Store) page(ctx context.Context, first byte, last string) ([]string, error) {
	var names smallest
	err := eachName(ctx, shelf(st.dir, first), func(name string) error {
		if name > last && len(name) == hex.EncodedLen(len(identity.Digest{})) {
			names.add(name)
		}
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	names.trim()
	return names, err
}

// eachName calls fn with the names in a folder, in no order, and holds few of them at a time.
func eachName(ctx context.Context, dir string, fn func(name string) error) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	for {
		names, err := f.Readdirnames(1024)
		for _, name := range names {
			if err := fn(name); err != nil {
				return err
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case ctx.Err() != nil:
			return ctx.Err()
		}
	}
}

// publish gives the bytes of an upload, which are synced, the name of their digest. It is durable and visible on return.
func (st *Store) publish(ctx context.Context, s *session, d identity.Digest) (blobstore.Info, error) {
	defer st.names.lock(d)()
	fi, err := os.Lstat(st.path(d))
	// A name that is not durable yet is hidden, unless one of its kind has been there all along. A file of another size
	// can't have these bytes.
	if err != nil || fi.Size() != s.size || !fi.Mode().IsRegular() {
		st.names.hide(d, true)
	}
	if err := st.name(s, d); err != nil {
		if _, gone := os.Lstat(st.path(d)); gone != nil {
			st.names.hide(d, false)
		}
		return blobstore.Info{}, err
	}
	if err := st.syncShelf(d); err != nil {
		return blobstore.Info{}, err
	}
	st.names.hide(d, false)
	// The blob stands: it has no midstates then, and what it replaces is removed by the next Open.
	_ = st.keepSegments(s, d)
	_ = st.dropAside(d)
	return st.Stat(ctx, d)
}

// reveal describes a blob that was published before, also if its name could not be made durable then, which is tried
// again.
func (st *Store) reveal(ctx context.Context, d identity.Digest) (blobstore.Info, error) {
	defer st.names.lock(d)()
	if st.names.isHidden(d) {
		if err := st.syncShelf(d); err != nil {
			return blobstore.Info{}, err
		}
		st.names.hide(d, false)
		_ = st.dropAside(d)
	}
	return st.Stat(ctx, d)
}

// name replaces the file that has the name of d, if there is one.
func (st *Store) name(s *session, d identity.Digest) error {
	if err := st.makeShelf(d); err != nil {
		return err
	}
	now := time.Now()
	if err := os.Chtimes(s.data.Name(), now, now); err != nil {
		return err
	}
	s.data.SetNote(sizeNote, strconv.FormatInt(s.size, 10))
	if err := s.data.Chmod(0o444); err != nil {
		return err
	}
	return st.replace(s.data.Name(), st.path(d))
}

// replace gives a file a name, in place of what has it.
func (st *Store) replace(file, path string) error {
	if fi, err := os.Lstat(path); err == nil && fi.IsDir() {
		if err := st.clear(path); err != nil {
			return err
		}
	}
	return st.disk.Rename(file, path)
}

// clear removes what is at path. A folder, which no program of this kind has made, is kept in the quarantine, under a
// name that means nothing.
func (st *Store) clear(path string) error {
	if fi, err := os.Lstat(path); err == nil && fi.IsDir() {
		return st.disk.Rename(path, filepath.Join(st.dir, quarantineName, filepath.Base(path)+".folder-"+newID()))
	}
	return st.disk.Remove(path)
}

func (st *Store) makeShelf(d identity.Digest) error {
	s := &st.shelves[d[0]]
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.made {
		return nil
	}
	err := st.disk.Mkdir(0o755, shelf(st.dir, d[0]))
	s.made = err == nil
	return err
}

func (st *Store) segmentsPath(d identity.Digest) string {
	return filepath.Join(st.dir, segmentsName, hashName, fmt.Sprintf("%02x", d[0]), d.Hex())
}

// Segments implements blobstore.Segments. A blob has none if it was stored by a program that knew nothing of midstates,
// or if the process or the machine failed in the moment of its commit.
func (st *Store) Segments(ctx context.Context, i blobstore.Info) ([]byte, error) {
	now, err := st.shown(ctx, i)
	if err == nil {
		var form []byte
		if form, err = st.readSegments(now); err == nil {
			return form, nil
		}
	}
	return nil, fmt.Errorf("midstates of blob %s, generation %s: %w", i.Digest, i.Generation, err)
}

// shown describes the copy that i names. blobstore.ErrNotFound also if another one is shown.
func (st *Store) shown(ctx context.Context, i blobstore.Info) (blobstore.Info, error) {
	now, err := st.Stat(ctx, i.Digest)
	if err == nil && now.Generation != i.Generation {
		err = blobstore.ErrNotFound
	}
	return now, err
}

// readSegments returns the midstates of a copy that is shown. Those of a push are not synced: after a power failure they
// can be torn.
func (st *Store) readSegments(i blobstore.Info) ([]byte, error) {
	path := st.segmentsPath(i.Digest)
	fi, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, blobstore.ErrNotFound
	case err == nil && fi.Size() > int64(lanes.MaxBytes):
		return nil, fmt.Errorf("%w: they have %d bytes", blobstore.ErrMidstatesDamaged, fi.Size())
	}
	form, err := durable.ReadRegular(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", blobstore.ErrMidstatesDamaged, err)
	}
	return form, blobstore.FitMidstates(form, i, st.segment)
}

// KeepSegments implements blobstore.Segments.
func (st *Store) KeepSegments(ctx context.Context, i blobstore.Info, form []byte) error {
	defer st.names.lock(i.Digest)()
	err := st.change()
	if err == nil {
		i, err = st.shown(ctx, i)
	}
	if err == nil {
		err = blobstore.FitMidstates(form, i, st.segment)
	}
	if err == nil {
		err = st.putSegments(newID(), i.Digest, form, true)
	}
	if err != nil {
		return fmt.Errorf("keep midstates of blob %s: %w", i.Digest, full(err))
	}
	return nil
}

// keepSegments makes the midstates of an upload whose blob d stands those of d, if it has any. Every copy of d has the
// same ones. They are not synced. The caller holds the lock of d.
func (st *Store) keepSegments(s *session, d identity.Digest) error {
	form, err := s.midstates(d)
	if err != nil || form == nil {
		return err
	}
	return st.putSegments(s.id, d, form, false)
}

// putSegments makes form the midstates of d, by way of a file that is named by an upload's id. The caller holds the lock
// of d.
func (st *Store) putSegments(id string, d identity.Digest, form []byte, sync bool) error {
	path := st.segmentsPath(d)
	if err := st.disk.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	temp := st.uploadPath(id, uploadSegments)
	f, err := st.disk.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return err
	}
	_, err = f.Write(form)
	if err == nil && sync {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = st.replace(temp, path)
	}
	if err != nil {
		return errors.Join(err, st.disk.Remove(temp))
	}
	if sync {
		return st.disk.SyncDir(filepath.Dir(path))
	}
	return nil
}

// dropSegments removes the midstates of d durably. The caller holds the lock of d.
func (st *Store) dropSegments(d identity.Digest) error {
	path := st.segmentsPath(d)
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := st.clear(path); err != nil {
		return err
	}
	return st.disk.SyncDir(filepath.Dir(path))
}
