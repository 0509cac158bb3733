package fsstore

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// The two files of an upload, and one that becomes the midstates of its blob.
const (
	uploadData     = ".data"
	uploadState    = ".state"
	uploadSegments = ".segments"
)

func (st *Store) uploadPath(id, ext string) string { return filepath.Join(st.dir, uploadsName, id+ext) }

// validID says whether id can be one of ours. It is what keeps a request from naming other files.
func validID(id string) bool {
	return len(id) == 32 && strings.Trim(id, "0123456789abcdef") == ""
}

func newID() string {
	var random [16]byte
	rand.Read(random[:])
	return hex.EncodeToString(random[:])
}

// Create implements blobstore.Store. An announced size that is more than what is free is ErrNoSpace before the bytes
// come, but no space is taken for it: whoever announces much and sends nothing keeps
// nobody else out. The upload itself becomes durable with its first Append.
func (st *Store) Create(ctx context.Context, hint identity.Digest, size int64) (blobstore.Upload, error) {
	id, err := st.create(hint, size)
	if err != nil {
		return nil, fmt.Errorf("create upload: %w", full(err))
	}
	return &upload{st: st, id: id}, nil
}

func (st *Store) create(hint identity.Digest, size int64) (id string, err error) {
	if err := st.change(); err != nil {
		return "", err
	}
	free, err := durable.Free(st.dir)
	if err != nil {
		return "", err
	}
	if size > free {
		return "", fmt.Errorf("%w: %d bytes to come, %d bytes free", blobstore.ErrNoSpace, size, free)
	}
	first := slot{Announced: max(size, -1), Hint: hint}
	copy(first.Boot[:], st.boot)
	if err := first.setHash(identity.NewHash()); err != nil {
		return "", err
	}
	id = newID()
	if err = createState(st.disk, st.uploadPath(id, uploadState), &first); err == nil {
		err = st.createData(id)
	}
	if err != nil {
		st.drop(id)
		return "", err
	}
	return id, nil
}

func (st *Store) createData(id string) error {
	f, err := st.disk.OpenFile(st.uploadPath(id, uploadData), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

// drop removes the files of an upload, the one that makes it an upload first.
func (st *Store) drop(id string) error {
	return errors.Join(st.disk.Remove(st.uploadPath(id, uploadData)), st.disk.Remove(st.uploadPath(id, uploadState)))
}

// Resume implements blobstore.Store. After the death of the process the upload goes on with every byte that it had
// received: those after the last saved state are still in the system's cache, are hashed now and made durable. Where the
// disk refuses that, the upload is as its last saved state says. After another start of the machine they are dropped, as
// nothing says that they reached the disk.
func (st *Store) Resume(ctx context.Context, id string) (blobstore.Upload, error) {
	u := &upload{st: st, id: id}
	size, err := st.restore(ctx, id)
	if errors.Is(err, blobstore.ErrUploadBusy) { // in order, then, and open in this process
		return u, nil
	}
	u.size.Store(size)
	if err != nil {
		return nil, fmt.Errorf("resume upload %.80q: %w", id, err)
	}
	return u, nil
}

// restore brings an upload into order, as far as that is possible, and returns its size.
func (st *Store) restore(ctx context.Context, id string) (size int64, err error) {
	if st.reading {
		return st.look(id)
	}
	s, err := st.open(ctx, id)
	switch {
	case err == nil:
		defer s.close()
		return s.size, nil
	case ctx.Err() != nil, errors.Is(err, blobstore.ErrUploadUnknown), errors.Is(err, blobstore.ErrUploadBusy):
		return 0, err
	}
	if size, gone := st.look(id); gone == nil {
		return size, nil
	}
	return 0, err
}

// look returns how much of an upload is there, or blobstore.ErrUploadUnknown, and leaves it as it is.
func (st *Store) look(id string) (size int64, err error) {
	if !validID(id) {
		return 0, blobstore.ErrUploadUnknown
	}
	fi, err := os.Lstat(st.uploadPath(id, uploadData))
	if err != nil {
		if r, ok := st.receipt(id); ok {
			return r.size, nil
		}
		return 0, fmt.Errorf("%w: %w", blobstore.ErrUploadUnknown, err)
	}
	sl, err := st.lookSlot(id, fi.Size())
	switch {
	case err != nil:
		return 0, fmt.Errorf("%w: %w", blobstore.ErrUploadUnknown, err)
	case !st.sameBoot(sl):
		return sl.Covered, nil
	}
	return fi.Size(), nil
}

// lookSlot returns the current slot of an upload with so much data.
func (st *Store) lookSlot(id string, size int64) (*slot, error) {
	f, err := st.disk.OpenFile(st.uploadPath(id, uploadState), os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	slots, err := readSlots(f)
	if err != nil {
		return nil, err
	}
	at, _, err := choose(slots, size)
	if err != nil {
		return nil, err
	}
	return slots[at], nil
}

// receipt returns what an upload without a data file became, while the blob is there.
func (st *Store) receipt(id string) (r receipt, ok bool) {
	if r, ok = st.anyReceipt(id); !ok {
		return r, false
	}
	fi, err := os.Lstat(st.path(r.digest))
	return r, err == nil && fi.Size() == r.size
}

// anyReceipt returns what an upload without a data file became.
func (st *Store) anyReceipt(id string) (r receipt, ok bool) {
	f, err := durable.OpenRegular(st.uploadPath(id, uploadState), os.O_RDONLY, 0)
	if err != nil {
		return r, false
	}
	defer f.Close()
	b := make([]byte, statesAt)
	if _, err := f.ReadAt(b, 0); err != nil {
		return r, false
	}
	return readReceipt(b)
}

// Uploads implements blobstore.Uploads.
func (st *Store) Uploads(ctx context.Context) iter.Seq2[blobstore.UploadInfo, error] {
	return func(yield func(blobstore.UploadInfo, error) bool) {
		err := st.eachUploadFile(ctx, func(id, ext string) error {
			describe := st.describeUpload
			if ext == uploadState {
				describe = st.describeReceipt
			} else if ext != uploadData {
				return nil
			}
			i, err := describe(id)
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			} else if err != nil {
				return err
			}
			if !yield(i, nil) {
				return errStop
			}
			return nil
		})
		if err != nil && err != errStop {
			yield(blobstore.UploadInfo{}, fmt.Errorf("list uploads: %w", err))
		}
	}
}

var errStop = errors.New("stop")

func (st *Store) describeUpload(id string) (i blobstore.UploadInfo, err error) {
	fi, err := os.Lstat(st.uploadPath(id, uploadData))
	if err != nil {
		return i, err
	}
	i = blobstore.UploadInfo{ID: id, Size: fi.Size(), Touched: fi.ModTime()}
	f, err := st.disk.OpenFile(st.uploadPath(id, uploadState), os.O_RDONLY, 0)
	if errors.Is(err, durable.ErrNotRegular) {
		return i, nil // listed, so that a purge drops it
	}
	if err != nil {
		return i, err
	}
	defer f.Close()
	slots, err := readSlots(f)
	for _, sl := range slots {
		if sl != nil {
			i.Hint = sl.Hint
		}
	}
	if errors.Is(err, blobstore.ErrDamaged) {
		err = nil // it is listed all the same: whoever resumes it is told
	}
	return i, err
}

// describeReceipt returns fs.ErrNotExist for an upload that has not ended.
func (st *Store) describeReceipt(id string) (i blobstore.UploadInfo, err error) {
	if _, err := os.Lstat(st.uploadPath(id, uploadData)); err == nil {
		return i, fs.ErrNotExist
	}
	fi, err := os.Lstat(st.uploadPath(id, uploadState))
	if err != nil {
		return i, err
	}
	r, ok := st.anyReceipt(id)
	if !ok {
		return i, fs.ErrNotExist
	}
	return blobstore.UploadInfo{ID: id, Size: r.size, Touched: fi.ModTime(), Blob: r.digest}, nil
}

func (st *Store) eachUploadFile(ctx context.Context, fn func(id, ext string) error) error {
	return eachName(ctx, filepath.Join(st.dir, uploadsName), func(name string) error {
		id, ext := strings.TrimSuffix(name, filepath.Ext(name)), filepath.Ext(name)
		if !validID(id) || ext != uploadData && ext != uploadState && ext != uploadSegments {
			return nil
		}
		return fn(id, ext)
	})
}

// take makes id busy until give.
func (st *Store) take(id string) error {
	if !validID(id) {
		return blobstore.ErrUploadUnknown
	}
	if st.closed.Load() {
		return os.ErrClosed
	}
	if err := st.change(); err != nil {
		return err
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.busy[id] {
		return blobstore.ErrUploadBusy
	}
	st.busy[id] = true
	return nil
}

func (st *Store) give(id string) {
	st.mu.Lock()
	defer st.mu.Unlock()
	delete(st.busy, id)
}

// upload is a handle: what an upload is stands in its two files, so handles of one id need not know of each other.
type upload struct {
	st   *Store
	id   string
	size atomic.Int64 // when last seen
}

func (u *upload) ID() string { return u.id }

// Size returns the bytes received, also while an Append runs. Of an upload that is gone it is what was last seen.
func (u *upload) Size() int64 {
	if fi, err := os.Lstat(u.st.uploadPath(u.id, uploadData)); err == nil {
		u.size.Store(fi.Size())
	} else if r, ok := u.st.receipt(u.id); ok {
		u.size.Store(r.size)
	}
	return u.size.Load()
}

// Append implements blobstore.Upload. It gives up when ctx ends, between two reads of r, and keeps what it has.
func (u *upload) Append(ctx context.Context, off int64, r io.Reader) (int64, error) {
	s, err := u.st.open(ctx, u.id)
	if err != nil {
		return 0, fmt.Errorf("append to upload %s: %w", u.id, err)
	}
	defer s.close()
	if err = s.begins(off); err == nil && s.ended != nil {
		err = blobstore.AtEnd(r, s.ended.digest)
	}
	if err != nil || s.ended != nil {
		return 0, fail("append to", u.id, err)
	}
	err = s.keep(s.receive(ctx, r))
	u.size.Store(s.size)
	return s.size - off, fail("append to", u.id, err)
}

// fail says of an error what was being done.
func fail(what, id string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s upload %s: %w", what, id, full(err))
}

// Commit implements blobstore.Upload. An announced digest or size that does not come true is a mismatch.
func (u *upload) Commit(ctx context.Context, want identity.Digest) (blobstore.Info, error) {
	i, err := u.commit(ctx, want)
	return i, fail("commit", u.id, err)
}

func (u *upload) commit(ctx context.Context, want identity.Digest) (blobstore.Info, error) {
	s, err := u.st.open(ctx, u.id)
	if err != nil {
		return blobstore.Info{}, err
	}
	defer s.close()
	u.size.Store(s.size)
	return u.end(ctx, s, want)
}

// Finish implements blobstore.Upload. The bytes of r are synced once, and no state is saved for the last of them.
func (u *upload) Finish(ctx context.Context, off int64, r io.Reader, want identity.Digest) (blobstore.Info, error) {
	i, err := u.finish(ctx, off, r, want)
	return i, fail("finish", u.id, err)
}

func (u *upload) finish(ctx context.Context, off int64, r io.Reader, want identity.Digest) (blobstore.Info, error) {
	s, err := u.st.open(ctx, u.id)
	if err != nil {
		return blobstore.Info{}, err
	}
	defer s.close()
	if err := s.begins(off); err != nil {
		return blobstore.Info{}, err
	}
	if s.ended != nil {
		if err := blobstore.AtEnd(r, s.ended.digest); err != nil {
			return blobstore.Info{}, err
		}
		return u.again(ctx, s, want)
	}
	err = s.receive(ctx, r)
	if errors.Is(err, blobstore.ErrSizeMismatch) {
		return blobstore.Info{}, errors.Join(err, u.st.drop(u.id))
	}
	if err != nil || s.failed != nil {
		err = s.keep(err)
		u.size.Store(s.size)
		return blobstore.Info{}, err
	}
	u.size.Store(s.size)
	return u.end(ctx, s, want)
}

// again is the end of an upload that has ended already.
func (u *upload) again(ctx context.Context, s *session, want identity.Digest) (blobstore.Info, error) {
	if got := s.ended.digest; got != want {
		err := fmt.Errorf("%w: received %s, asked for %s", blobstore.ErrDigestMismatch, got, want)
		return blobstore.Info{}, errors.Join(err, u.st.drop(u.id))
	}
	i, err := u.st.reveal(ctx, want)
	if errors.Is(err, blobstore.ErrNotFound) {
		err = errors.Join(blobstore.ErrUploadUnknown, u.st.drop(u.id))
	}
	return i, err
}

// end makes an upload that has all its bytes a blob.
func (u *upload) end(ctx context.Context, s *session, want identity.Digest) (blobstore.Info, error) {
	if s.ended != nil {
		return u.again(ctx, s, want)
	}
	if err := s.check(want); err != nil {
		return blobstore.Info{}, errors.Join(err, u.st.drop(u.id))
	}
	err := u.st.makeShelf(want) // now: on a full disk what was received can still be given back
	if err == nil {
		err = s.seal(want)
	}
	if noSpace(err) {
		err = errors.Join(err, s.back())
	}
	if err != nil {
		u.size.Store(s.size)
		return blobstore.Info{}, err
	}
	return u.st.publish(ctx, s, want)
}

// Abort implements blobstore.Upload.
func (u *upload) Abort(ctx context.Context) error {
	u.Size()
	err := u.st.take(u.id)
	if err == nil {
		defer u.st.give(u.id)
		err = u.st.drop(u.id)
	}
	return fail("abort", u.id, err)
}
