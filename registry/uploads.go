package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/classify"
	"github.com/kiln-registry/kiln-registry/registry/ranges"
)

// CreateUpload opens an upload in a repository. d and size are what the client says about the bytes to come: zero and
// negative where it says nothing. The upload can be gone on with after the end of this process, by the same caller.
// ErrStoreFull.
func (r *Registry) CreateUpload(
	ctx context.Context,
	c access.Caller,
	repo string,
	d identity.Digest,
	size int64,
) (id string, err error) {
	if err := c.Check(access.Push, repo); err != nil {
		return "", err
	}
	s, err := r.store.Create(ctx, d, size)
	if err != nil {
		return "", err
	}
	r.writes.RLock()
	defer r.writes.RUnlock()
	err = r.ix.Apply(ctx, index.PutUpload{Upload: index.Upload{
		ID: s.ID(), Repo: repo, Caller: c.Name, Digest: d, Size: size, Expires: r.now().Add(uploadTTL),
	}})
	if err != nil {
		return "", errors.Join(err, s.Abort(context.WithoutCancel(ctx)))
	}
	r.handles.Store(s.ID(), &handle{Upload: s})
	return s.ID(), nil
}

// handle is an upload that this process has open, with how its bytes begin once they came to this process.
type handle struct {
	blobstore.Upload
	head atomic.Pointer[classify.Head]
}

// watched is the body of a chunk. The first one of an upload shows how the blob begins: keep that once it is stored.
func (h *handle) watched(ch Chunk) (body io.Reader, keep func() *classify.Head) {
	if ch.Offset != 0 {
		return ch.Body, h.head.Load
	}
	head := new(classify.Head)
	return head.Watch(ch.Body), func() *classify.Head {
		h.head.Store(head)
		return head
	}
}

// upload finds an open upload. One of another repository or caller is as unknown as one that never was.
func (r *Registry) upload(
	ctx context.Context,
	c access.Caller,
	repo, id string,
) (*handle, index.Upload, error) {
	unknown := api.Errorf(api.CodeBlobUploadUnknown, "upload is unknown to repository %s, or has ended", repo)
	if err := c.Check(access.Push, repo); err != nil {
		return nil, index.Upload{}, err
	}
	u, err := r.ix.Upload(ctx, id)
	switch {
	case errors.Is(err, index.ErrNotFound):
		return nil, u, unknown
	case err != nil:
		return nil, u, err
	case u.Repo != repo || u.Caller != c.Name || !u.Expires.After(r.now()):
		return nil, u, unknown
	}
	s, err := r.resume(ctx, id)
	if errors.Is(err, blobstore.ErrUploadUnknown) {
		return nil, u, unknown
	}
	return s, u, err
}

// resume returns the store's handle of an upload. Only the first use of an upload in this process has the store open
// it: while it does, the upload is busy, and asking for its state must not get in the way of an append.
func (r *Registry) resume(ctx context.Context, id string) (*handle, error) {
	if h, ok := r.handles.Load(id); ok {
		return h.(*handle), nil
	}
	s, err := r.store.Resume(ctx, id)
	if err != nil {
		return nil, err
	}
	h := &handle{Upload: s}
	r.handles.Store(id, h)
	return h, nil
}

// StatUpload returns how many bytes of an upload the registry holds. ErrBlobUploadUnknown.
func (r *Registry) StatUpload(ctx context.Context, c access.Caller, repo, id string) (int64, error) {
	s, _, err := r.upload(ctx, c, repo, id)
	if err != nil {
		return 0, err
	}
	return s.Size(), nil
}

// Chunk is a piece of an upload.
type Chunk struct {
	Offset int64     // where it belongs; negative: at the end of what is there
	Size   int64     // bytes; negative: not known
	Body   io.Reader // read to its end
}

// AppendUpload adds a chunk to an upload and returns how many bytes the registry holds then, which are durable. What
// came before a body that breaks off is kept too. ErrBlobUploadUnknown, ErrUploadBusy; ErrRangeInvalid if the chunk
// does not start where the upload ends; ErrSizeInvalid if it goes past the announced size; ErrStoreFull, after which
// the upload is as it was before the call: it can be gone on with when there is room again.
func (r *Registry) AppendUpload(ctx context.Context, c access.Caller, repo, id string, ch Chunk) (int64, error) {
	s, u, err := r.upload(ctx, c, repo, id)
	if err != nil {
		return 0, err
	}
	if err := ch.place(s.Size(), u.Size); err != nil {
		return s.Size(), err
	}
	body, keep := s.watched(ch)
	n, err := s.Append(ctx, ch.Offset, body)
	if err == nil {
		keep()
	}
	r.doubt(id, err)
	return ch.Offset + n, err
}

// doubt lets the next use of an upload ask the store for it again: after most failures nobody knows whether it is still
// there.
func (r *Registry) doubt(id string, err error) {
	if err != nil && !errors.Is(err, blobstore.ErrUploadBusy) && !errors.Is(err, blobstore.ErrOffset) {
		r.handles.Delete(id)
	}
}

// place checks that the chunk goes on where the upload, which was announced with a size or a negative number, ends.
func (ch *Chunk) place(at, announced int64) error {
	if ch.Offset < 0 {
		ch.Offset = at
	}
	switch {
	case ch.Offset != at:
		return api.Errorf(api.CodeRangeInvalid, "chunk starts at byte %d, but the upload has %d bytes", ch.Offset, at)
	case announced >= 0 && ch.Size > announced-at:
		return api.Errorf(api.CodeSizeInvalid, "chunk of %d bytes at byte %d of an upload announced with %d bytes",
			ch.Size, at, announced)
	}
	return nil
}

// FinishUpload adds the last chunk, which may be empty, closes the upload as the blob d and makes it visible in the
// repository. It is durable on return. The bytes are verified, and on ErrDigestInvalid and ErrSizeInvalid nothing of
// the upload is kept. A body that breaks off is no end: the upload stays, with as many bytes as are returned. So it does
// when this process ends before the blob is visible: then it has all its bytes, and is closed with an empty chunk. If it
// ends later, before the client hears of it, or the client misses the answer, closing the upload again finds the blob.
// The errors are those of AppendUpload.
func (r *Registry) FinishUpload(
	ctx context.Context,
	c access.Caller,
	repo, id string,
	ch Chunk,
	d identity.Digest,
) (i blobstore.Info, kept int64, err error) {
	s, u, err := r.upload(ctx, c, repo, id)
	if err != nil {
		i, err = r.closedBefore(ctx, repo, id, ch, d, err)
		return i, 0, err
	}
	if err := ch.place(s.Size(), u.Size); err != nil {
		return i, s.Size(), err
	}
	ctx = context.WithoutCancel(ctx) // a client that waits no longer finds the blob when it asks again
	watched, keep := s.watched(ch)
	body := &holding{r: watched, left: ch.Size, hold: func() func() { return r.locks.Hold(d) }}
	defer body.end()
	i, err = s.Finish(ctx, ch.Offset, body, d)
	r.doubt(id, err)
	if err == nil {
		r.heads.Note(d, i.Size, keep())
	}
	return i, s.Size(), r.finished(ctx, s, repo, d, i, err)
}

// holding is the last chunk of an upload. It holds the digest from before its last byte is handed over until end: the
// store may find then that it has the blob already, and that one must not be collected before it is linked. While the
// client sends, nothing is held.
type holding struct {
	r       io.Reader
	left    int64 // bytes to come; negative: not known
	hold    func() (release func())
	release func()
}

func (h *holding) Read(b []byte) (int, error) {
	n, err := h.r.Read(b)
	if h.left > 0 {
		h.left = max(h.left-int64(n), 0)
	}
	if h.release == nil && (err != nil || h.left == 0) {
		h.release = h.hold()
	}
	return n, err
}

func (h *holding) end() {
	if h.release != nil {
		h.release()
	}
}

// finished records how the store closed an upload.
func (r *Registry) finished(
	ctx context.Context, s blobstore.Upload, repo string, d identity.Digest, i blobstore.Info, err error,
) error {
	switch {
	case errors.Is(err, blobstore.ErrDigestMismatch):
		err = api.Errorf(api.CodeDigestInvalid, "what was uploaded is not %s: digest mismatch", d)
		return errors.Join(err, r.forget(ctx, s.ID()))
	case errors.Is(err, blobstore.ErrSizeMismatch):
		err = api.Errorf(api.CodeSizeInvalid, "what was uploaded is not of the announced size")
		return errors.Join(err, r.forget(ctx, s.ID()))
	case err != nil:
		return err
	}
	r.aside.arrived(i.Digest)
	if err := r.link(ctx, repo, i, index.DeleteUpload{ID: s.ID()}); err != nil {
		return err
	}
	r.handles.Delete(s.ID())
	if err := s.Abort(ctx); err != nil { // of the receipt: nobody asks for it any more
		r.log.Warn("receipt of an upload not dropped; a purge will", "id", s.ID(), "error", err)
	}
	return nil
}

// CancelUpload drops an upload and its bytes. ErrBlobUploadUnknown.
func (r *Registry) CancelUpload(ctx context.Context, c access.Caller, repo, id string) error {
	s, _, err := r.upload(ctx, c, repo, id)
	if err != nil {
		return err
	}
	return r.drop(context.WithoutCancel(ctx), s.ID())
}

// drop ends an upload, whoever it belongs to.
func (r *Registry) drop(ctx context.Context, id string) error {
	s, err := r.resume(ctx, id)
	if err == nil {
		err = s.Abort(ctx)
		r.doubt(id, err)
	}
	if err != nil && !errors.Is(err, blobstore.ErrUploadUnknown) {
		return err
	}
	return r.forget(ctx, id)
}

func (r *Registry) forget(ctx context.Context, id string) error {
	r.handles.Delete(id)
	r.writes.RLock()
	defer r.writes.RUnlock()
	return r.ix.Apply(ctx, index.DeleteUpload{ID: id})
}

func (r *Registry) postUpload(w *response, q *request) error {
	repo, err := q.repo()
	if err != nil {
		return err
	}
	query := q.URL.Query()
	if query.Has("mount") {
		if done, err := r.postMount(w, q, repo); done || err != nil {
			return err
		}
	}
	a, err := announced(q)
	if err != nil {
		return err
	}
	id, err := r.CreateUpload(q.Context(), q.caller, repo, a.digest, a.size)
	if err != nil {
		return err
	}
	if !a.whole {
		return w.uploaded(repo, id, 0, http.StatusAccepted)
	}
	if err := r.finish(w, q, repo, id, a.digest); err != nil {
		return errors.Join(err, r.drop(context.WithoutCancel(q.Context()), id))
	}
	return nil
}

// postMount answers with a mounted blob, or says that there was none to mount.
func (r *Registry) postMount(w *response, q *request, repo string) (done bool, err error) {
	query := q.URL.Query()
	d, err := api.ParseDigest(query.Get("mount"))
	if err != nil {
		return false, err
	}
	i, err := r.Mount(q.Context(), q.caller, repo, query.Get("from"), d)
	if errors.Is(asAPI(err), api.ErrBlobUnknown) && err != nil {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	w.created(api.PathBlob(repo, i.Digest), i.Digest)
	return true, nil
}

// announcement is what a POST says about the bytes to come.
type announcement struct {
	digest identity.Digest // zero: nothing
	size   int64           // negative: nothing
	whole  bool            // the body of the POST is the blob
}

func announced(q *request) (a announcement, err error) {
	a.size = -1
	said := q.Header.Get(api.HeaderExpectDigest)
	if query := q.URL.Query(); query.Has("digest") {
		said = query.Get("digest")
		a.whole = true
	}
	if said != "" || a.whole {
		if a.digest, err = api.ParseDigest(said); err != nil {
			return a, err
		}
	}
	if s := q.Header.Get(api.HeaderExpectSize); s != "" {
		n, err := strconv.ParseUint(s, 10, 63)
		if err != nil {
			return a, api.Errorf(api.CodeSizeInvalid, "%s: %.40q is not a number of bytes", api.HeaderExpectSize, s)
		}
		a.size = int64(n)
	}
	if a.whole {
		a.size = q.ContentLength // -1 if it is not known
	}
	// A POST that names a digest and sends nothing opens an upload, unless nothing is what the digest stands for.
	a.whole = a.whole && (q.ContentLength != 0 || a.digest == identity.Sum(nil))
	if !a.whole && a.size == 0 && q.URL.Query().Has("digest") {
		a.size = -1
	}
	return a, nil
}

func (r *Registry) getUpload(w *response, q *request) error {
	repo, err := q.repo()
	if err != nil {
		return err
	}
	id := q.param("id")
	n, err := r.StatUpload(q.Context(), q.caller, repo, id)
	if err != nil {
		return err
	}
	return w.uploaded(repo, id, n, http.StatusNoContent)
}

func (r *Registry) patchUpload(w *response, q *request) error {
	repo, err := q.repo()
	if err != nil {
		return err
	}
	id := q.param("id")
	ch, err := chunkOf(q)
	if err != nil {
		return err
	}
	n, err := r.AppendUpload(q.Context(), q.caller, repo, id, ch)
	if err != nil {
		return w.notAppended(q, repo, id, n, err)
	}
	return w.uploaded(repo, id, n, http.StatusAccepted)
}

func (r *Registry) putUpload(w *response, q *request) error {
	repo, err := q.repo()
	if err != nil {
		return err
	}
	d, err := api.ParseDigest(q.URL.Query().Get("digest"))
	if err != nil {
		return err
	}
	return r.finish(w, q, repo, q.param("id"), d)
}

// finish takes the last bytes of an upload from the body, if there are any, and closes it.
func (r *Registry) finish(w *response, q *request, repo, id string, d identity.Digest) error {
	ch, err := chunkOf(q)
	if err != nil {
		return err
	}
	i, n, err := r.FinishUpload(q.Context(), q.caller, repo, id, ch, d)
	if err != nil {
		return w.notAppended(q, repo, id, n, err)
	}
	w.created(api.PathBlob(repo, i.Digest), i.Digest)
	return nil
}

func (r *Registry) deleteUpload(w *response, q *request) error {
	repo, err := q.repo()
	if err != nil {
		return err
	}
	if err := r.CancelUpload(q.Context(), q.caller, repo, q.param("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// chunkOf returns the body as a chunk, placed by a Content-Range of the form that registries use: first-last.
func chunkOf(q *request) (Chunk, error) {
	ch := Chunk{Offset: -1, Size: q.ContentLength, Body: q.body}
	spec := q.Header.Get("Content-Range")
	if spec == "" {
		return ch, nil
	}
	spec = strings.TrimPrefix(strings.TrimPrefix(spec, "bytes="), "bytes ")
	spec, _, _ = strings.Cut(spec, "/")
	first, last, _ := strings.Cut(spec, "-")
	from, hasFrom, okFrom := ranges.Pos(first)
	to, hasTo, okTo := ranges.Pos(last)
	if !hasFrom || !hasTo || !okFrom || !okTo || to < from || to == math.MaxInt64 {
		return ch, api.Errorf(
			api.CodeBlobUploadInvalid,
			"Content-Range %.80q: want first-last",
			q.Header.Get("Content-Range"),
		)
	}
	if size := to - from + 1; ch.Size >= 0 && ch.Size != size {
		return ch, api.Errorf(
			api.CodeSizeInvalid,
			"Content-Range %s is %d bytes, but Content-Length says %d",
			spec,
			size,
			ch.Size,
		)
	}
	ch.Offset, ch.Size = from, to-from+1
	ch.Body = &exactReader{r: q.body, left: ch.Size}
	return ch, nil
}

// exactReader refuses a body of another length than its Content-Range says.
type exactReader struct {
	r    io.Reader
	left int64 // bytes to come
}

func (e *exactReader) Read(b []byte) (int, error) {
	if e.left == 0 {
		var more [1]byte
		if n, err := io.ReadFull(e.r, more[:]); n == 0 {
			return 0, err
		}
		return 0, api.Errorf(api.CodeSizeInvalid, "the body is longer than its Content-Range says")
	}
	n, err := e.r.Read(b[:min(int64(len(b)), e.left)])
	if e.left -= int64(n); err == io.EOF && e.left > 0 {
		err = api.Errorf(api.CodeSizeInvalid, "the body is %d bytes shorter than its Content-Range says", e.left)
	}
	return n, err
}

// uploaded answers with the state of an upload.
func (w *response) uploaded(repo, id string, n int64, status int) error {
	w.place(repo, id, n)
	w.WriteHeader(status)
	return nil
}

// place sets the headers that say where an upload is. Clients read the Range of an upload without bytes as 0-0.
func (w *response) place(repo, id string, n int64) {
	h := w.Header()
	h.Set("Location", api.PathUpload(repo, id))
	h.Set("Range", fmt.Sprintf("0-%d", max(n-1, 0)))
	h.Set(api.HeaderUploadUUID, id)
}

// notAppended returns what to answer when a chunk was not taken whole: a chunk out of order is told where to go on, and
// a body that broke off is the client's failure.
func (w *response) notAppended(q *request, repo, id string, n int64, err error) error {
	switch {
	case q.body.Err != nil:
		return api.Errorf(api.CodeBlobUploadInvalid, "body broke off, %d bytes of the upload are kept: %v", n, q.body.Err)
	case errors.Is(asAPI(err), api.ErrRangeInvalid):
		w.place(repo, id, n)
	}
	return err
}

// created answers that something is durable, and where.
func (w *response) created(location string, d identity.Digest) {
	w.Header().Set("Location", location)
	w.Header().Set(api.HeaderContentDigest, d.String())
	w.WriteHeader(http.StatusCreated)
}
