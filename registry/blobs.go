package registry

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/ranges"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// StatBlob describes a blob of a repository. ErrBlobUnknown if the repository does not hold it, whoever else does.
func (r *Registry) StatBlob(
	ctx context.Context,
	c access.Caller,
	repo string,
	d identity.Digest,
) (blobstore.Info, error) {
	if err := c.Check(access.Pull, repo); err != nil {
		return blobstore.Info{}, err
	}
	return r.statBlob(ctx, repo, d)
}

// HeadBlob is StatBlob for clients that ask which blobs they need not push. If the caller may push, the blob stays in
// the repository as if it had been pushed just now, or nearly so, and one that can't be read is unknown.
func (r *Registry) HeadBlob(
	ctx context.Context,
	c access.Caller,
	repo string,
	d identity.Digest,
) (blobstore.Info, error) {
	if err := c.Check(access.Pull, repo); err != nil || r.readOnly || !c.May(access.Push, repo) {
		return r.StatBlob(ctx, c, repo, d)
	}
	defer r.locks.Hold(d)()
	i, err := r.usableBlob(ctx, repo, d)
	if err != nil {
		return i, err
	}
	until, err := r.ix.LinkedUntil(ctx, repo, d)
	if err != nil || until.Sub(r.now()) >= r.lease-min(r.lease/2, leaseRenewed) {
		return i, err
	}
	return i, r.link(ctx, repo, i)
}

// statBlob is StatBlob for those who were checked.
func (r *Registry) statBlob(ctx context.Context, repo string, d identity.Digest) (blobstore.Info, error) {
	visible, err := r.ix.Visible(ctx, repo, d, r.now())
	if err != nil {
		return blobstore.Info{}, err
	}
	if !visible {
		return blobstore.Info{}, api.Errorf(api.CodeBlobUnknown, "blob %s is unknown to repository %s", d, repo)
	}
	i, err := r.store.Stat(ctx, d)
	if err == nil && i.Size == 0 && d != identity.Sum(nil) {
		err = fmt.Errorf("stat blob %s: %w: it is empty", d, blobstore.ErrCut)
	}
	r.suspect(d, err)
	return i, err
}

// usableBlob is statBlob for those who rely on the bytes. One that is known to be unreadable, or damaged, is
// errUnusable, so that whoever pushes sends it again.
func (r *Registry) usableBlob(ctx context.Context, repo string, d identity.Digest) (blobstore.Info, error) {
	i, err := r.statBlob(ctx, repo, d)
	if err != nil {
		return i, err
	}
	bad, err := r.scrubber.Unusable(ctx, d)
	if err == nil && bad {
		err = fmt.Errorf("blob %s: %w", d, errUnusable)
	}
	return i, err
}

var (
	// errUnusable: a blob that is there was found unreadable or damaged.
	errUnusable = errors.New("its bytes can't be read")
	// errUnreadable: the store has failed to read a blob right now.
	errUnreadable = errors.New("the store failed to read it")
)

// unreadable is the error of reading a blob. It is an errUnreadable.
type unreadable struct {
	digest identity.Digest
	err    error
}

func (u unreadable) Error() string { return fmt.Sprintf("read blob %s: %v", u.digest, u.err) }

func (u unreadable) Unwrap() []error { return []error{errUnreadable, u.err} }

// reading makes err, of reading a blob, an unreadable one if it is the disk, or the system, that fails.
func reading(d identity.Digest, err error) error {
	for _, is := range []error{syscall.EIO, syscall.EACCES, syscall.EPERM, syscall.EBADMSG, syscall.EUCLEAN} {
		if errors.Is(err, is) {
			return unreadable{d, err}
		}
	}
	return err
}

// cantRead refuses a manifest for a blob that can't be read. The next push finds that the registry does not have it.
func cantRead(blob api.Missing) error {
	return api.Errorf(api.CodeManifestBlobUnknown, "blob %s%s can't be read here: push it again", blob.Digest,
		quoted(blob.Name)).With(blob)
}

// suspect has the scrubber look at a blob that a repository should hold, if err, of reading it, says that it is missing
// or damaged, or can't be read and was not known to be so.
func (r *Registry) suspect(d identity.Digest, err error) {
	absent := errors.Is(err, blobstore.ErrNotFound) && !errors.Is(err, blobstore.ErrQuarantined)
	suspect := absent || errors.Is(err, blobstore.ErrDamaged)
	if errors.Is(err, errUnreadable) {
		bad, err := r.scrubber.Unusable(context.Background(), d)
		suspect = err == nil && !bad
	}
	if suspect {
		r.scrubber.Suspect(d)
	}
}

// DeleteBlob takes a blob out of a repository. Its bytes stay for as long as another repository holds it.
// ErrBlobUnknown; ErrBlobReferred while a manifest of the repository refers to it.
func (r *Registry) DeleteBlob(ctx context.Context, c access.Caller, repo string, d identity.Digest) error {
	if err := c.Check(access.Delete, repo); err != nil {
		return err
	}
	return r.decide(ctx, func() (release func()) { return func() {} }, func() error {
		if _, err := r.statBlob(ctx, repo, d); err != nil {
			return err
		}
		return r.ix.Apply(ctx, index.UnlinkBlob{Repo: repo, Digest: d})
	})
}

// Mount makes a blob that another repository holds visible in repo, without moving a byte. from names the other one;
// empty means any that the caller may pull from. It is ErrBlobUnknown where there is none, or none that the caller may
// pull from.
func (r *Registry) Mount(
	ctx context.Context,
	c access.Caller,
	repo, from string,
	d identity.Digest,
) (blobstore.Info, error) {
	if err := c.Check(access.Push, repo); err != nil {
		return blobstore.Info{}, err
	}
	defer r.locks.Hold(d)()
	if from == "" {
		var err error
		if from, err = r.holder(ctx, c, d); err != nil {
			return blobstore.Info{}, err
		}
	}
	if from == "" || !c.Sees(from) {
		return blobstore.Info{}, api.Errorf(api.CodeBlobUnknown, "no repository to mount blob %s from", d)
	}
	i, err := r.usableBlob(ctx, from, d)
	if err != nil {
		return i, err
	}
	return i, r.link(ctx, repo, i)
}

// holder returns a repository that holds a blob and that the caller may pull from; empty: there is none.
func (r *Registry) holder(ctx context.Context, c access.Caller, d identity.Digest) (string, error) {
	for repo, err := range r.ix.Holders(ctx, d, r.now()) {
		if err != nil {
			return "", err
		}
		if c.Sees(repo) {
			return repo, nil
		}
	}
	return "", nil
}

// Midstates returns those of a blob, in the form kiln.sha256-midstates.v1, to whoever may pull it from any repository.
// ErrBlobUnknown, as for a blob that is not there. ErrMidstatesUnknown: it has one segment, or the store has not
// recorded any; damaged ones count as none, and have the scrubber read the blob.
func (r *Registry) Midstates(ctx context.Context, c access.Caller, d identity.Digest) ([]byte, error) {
	repo, err := r.holder(ctx, c, d)
	if err != nil {
		return nil, err
	}
	if repo == "" {
		return nil, api.Errorf(api.CodeBlobUnknown, "no repository that you may pull from holds blob %s", d)
	}
	i, err := r.statBlob(ctx, repo, d)
	if err != nil {
		return nil, err
	}
	unknown := api.Errorf(api.CodeMidstatesUnknown, "no midstates of blob %s are recorded here", d)
	sg, ok := r.store.(blobstore.Segments)
	if !ok {
		return nil, unknown
	}
	form, err := sg.Segments(ctx, i)
	if !errors.Is(err, blobstore.ErrNotFound) {
		return form, err
	}
	if errors.Is(err, blobstore.ErrDamaged) && !r.readOnly {
		r.log.Warn("midstates damaged", "digest", d.String(), "error", err)
		r.scrubber.Suspect(d)
	}
	return nil, unknown
}

func (r *Registry) getMidstates(w *response, q *request) error {
	d, err := api.ParseDigest(q.param("digest"))
	if err != nil {
		return err
	}
	form, err := r.Midstates(q.Context(), q.caller, d)
	if err != nil {
		return err
	}
	return w.bytes(q, http.StatusOK, api.MediaTypeMidstates, form)
}

// link makes a stored blob visible in a repository until a manifest refers to it. The caller holds its digest, since
// before it saw that the blob is stored.
func (r *Registry) link(ctx context.Context, repo string, i blobstore.Info, more ...index.Op) error {
	r.scrubber.Arrived(ctx, i.Digest)
	lease := index.LinkBlob{Repo: repo, Digest: i.Digest, Size: i.Size, Until: r.now().Add(r.lease)}
	r.writes.RLock()
	defer r.writes.RUnlock()
	note, err := r.noteLease(ctx)
	if err != nil {
		return err
	}
	if err := r.ix.Apply(ctx, append(append(more, lease), note...)...); err != nil {
		return err
	}
	r.leaseNoted.Store(r.resets.Load() + 1)
	return nil
}

// closedRecently is for how long a client that closes an upload again is told that it is closed.
const closedRecently = time.Hour

// closedBefore is what closing an upload as the blob d comes to that is unknown, as unknown says: the blob, if the
// repository got it within the last hour. So a client that missed the answer may ask again. Nothing else is kept of an
// upload that was closed; one that is there, but is not the caller's, stays unknown.
func (r *Registry) closedBefore(
	ctx context.Context, repo, id string, ch Chunk, d identity.Digest, unknown error,
) (i blobstore.Info, err error) {
	if !errors.Is(asAPI(unknown), api.ErrBlobUploadUnknown) {
		return i, unknown
	}
	if _, err := r.ix.Upload(ctx, id); !errors.Is(err, index.ErrNotFound) {
		return i, cmp.Or(err, unknown)
	}
	until, err := r.ix.LinkedUntil(ctx, repo, d)
	if err != nil {
		return i, err
	}
	if now := r.now(); !until.After(now) || until.Sub(now) < r.lease-min(r.lease, closedRecently) {
		return i, unknown
	}
	if i, err = r.statBlob(ctx, repo, d); err != nil {
		return i, unknown
	}
	_, err = io.Copy(io.Discard, ch.Body) // many clients look for an answer only once they have sent the body
	return i, err
}

// leaseNote keeps how long leases are, in the index: nothing else says when one began.
const leaseNote = "lease"

// leaseLength is the shortest length that leases of now may have.
type leaseLength struct {
	Length time.Duration `json:"length"`
	Until  time.Time     `json:"until,omitzero"` // when the last one of this length ends; zero: they are still given
}

// next is what l becomes when leases of a length are given from now on. A zero l: there were none before.
func (l leaseLength) next(length time.Duration, now time.Time) leaseLength {
	switch {
	case l.Length == 0, length <= l.Length, !l.Until.IsZero() && now.After(l.Until):
		return leaseLength{Length: length}
	case l.Until.IsZero():
		l.Until = now.Add(l.Length)
	}
	return l
}

// noteLease returns the op that belongs to the first lease since this process or its index began. It is for those who
// hold writes.
func (r *Registry) noteLease(ctx context.Context) ([]index.Op, error) {
	if r.leaseNoted.Load() == r.resets.Load()+1 {
		return nil, nil
	}
	was, err := r.shortestLease(ctx)
	if err != nil {
		return nil, err
	}
	b, err := json.Marshal(was.next(r.lease, r.now()))
	return []index.Op{index.Note{Name: leaseNote, Value: b}}, err
}

func (r *Registry) shortestLease(ctx context.Context) (l leaseLength, err error) {
	b, err := r.ix.Note(ctx, leaseNote)
	if err != nil || b == nil {
		return l, err
	}
	if err := json.Unmarshal(b, &l); err != nil {
		return l, fmt.Errorf("%w: note %s: %w", index.ErrDamaged, leaseNote, err)
	}
	return l, nil
}

// uses is upkeep.Collector.Uses. A blob is in use while a link to it may serve. Where the terms give a shorter lease than was promised, a blob stays in use in a
// repository to which an upload is open, unless they are to be forced.
func (r *Registry) uses(ctx context.Context, d identity.Digest, now time.Time, t upkeep.Terms) (bool, error) {
	if r.links.Serve(d) {
		return true, nil
	}
	if t.Lease <= 0 {
		return r.ix.Uses(ctx, d, now)
	}
	given, err := r.shortestLease(ctx)
	if err != nil {
		return false, err
	}
	then := now.Add(max(given.Length-t.Lease, 0)) // a lease that ends before was given more than t.Lease ago
	if t.Force {
		return r.ix.Uses(ctx, d, then)
	}
	for repo, err := range r.ix.Holders(ctx, d, now) {
		if err != nil {
			return false, err
		}
		visible, err := r.ix.Visible(ctx, repo, d, then)
		if err == nil && !visible {
			visible, err = r.pushedTo(ctx, repo, now)
		}
		if err != nil || visible {
			return visible, err
		}
	}
	return false, nil
}

// pushedTo says whether an upload is open to a repository.
func (r *Registry) pushedTo(ctx context.Context, repo string, now time.Time) (bool, error) {
	for u, err := range r.ix.ExpiredUploads(ctx, now.Add(2*uploadTTL)) { // none stays longer
		if err != nil {
			return false, err
		}
		if u.Repo == repo && u.Expires.After(now) {
			return true, nil
		}
	}
	return false, nil
}

func (r *Registry) getBlob(w *response, q *request) error {
	repo, d, err := q.repoDigest()
	if err != nil {
		return err
	}
	stat := r.StatBlob
	if q.Method == http.MethodHead {
		stat = r.HeadBlob
	}
	i, err := stat(q.Context(), q.caller, repo, d)
	if err != nil {
		return err
	}
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("X-Content-Type-Options", "nosniff")
	if w.unchanged(q, d) {
		return nil
	}
	h.Set("Accept-Ranges", "bytes")
	off, n, status := int64(0), i.Size, http.StatusOK
	if spec := q.rangeOf(d); spec != "" && q.Method == http.MethodGet {
		part, ok, err := ranges.Parse(spec, i.Size)
		if err != nil {
			h.Set("Content-Range", fmt.Sprintf("bytes */%d", i.Size))
			return err
		}
		if ok {
			off, n, status = part.Off, part.N, http.StatusPartialContent
			h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", off, off+n-1, i.Size))
		}
	}
	if r.sendOn(w, q, i, n == i.Size) {
		return nil
	}
	h.Set("Content-Length", strconv.FormatInt(n, 10))
	if q.Method == http.MethodHead {
		w.WriteHeader(status)
		return nil
	}
	return r.sendBlob(w, q, i, off, n, status)
}

// sendOn answers with a link to the bytes of a blob, if the caller is to get one. What is to be verified on its way out
// does not go past the registry, and a copy that is known to be bad is not shown to anybody.
func (r *Registry) sendOn(w *response, q *request, i blobstore.Info, whole bool) bool {
	if !r.links.Wanted(q.Request, i) || r.verify && whole {
		return false
	}
	if bad, err := r.scrubber.Unusable(q.Context(), i.Digest); bad || err != nil {
		return false
	}
	link, err := r.links.Link(q.Context(), i)
	if err != nil {
		r.suspect(i.Digest, err)
		return false
	}
	r.links.Answer(w, link)
	return true
}

// held lets manifests be classified by what the store holds.
type held struct{ blobstore.Store }

// Open implements classify.Blobs.
func (h held) Open(ctx context.Context, d identity.Digest, off, n int64) (io.ReadCloser, error) {
	i, err := h.Stat(ctx, d)
	if err != nil {
		return nil, err
	}
	body, err := openAgain(ctx, h.Store, i, off, n)
	if err != nil {
		return nil, reading(d, err)
	}
	return told{body, d}, nil
}

// told is a reader of a blob whose errors say which one can't be read.
type told struct {
	io.ReadCloser
	digest identity.Digest
}

func (t told) Read(b []byte) (int, error) {
	n, err := t.ReadCloser.Read(b)
	return n, reading(t.digest, err)
}

// openAgain opens a part of a blob. Whoever pushes it again may have put another copy in the place of i meanwhile: then
// that one is opened.
func openAgain(ctx context.Context, st blobstore.Store, i blobstore.Info, off, n int64) (io.ReadCloser, error) {
	r, err := st.Open(ctx, i, off, n)
	if !errors.Is(err, blobstore.ErrNotFound) {
		return r, err
	}
	now, statErr := st.Stat(ctx, i.Digest)
	if statErr != nil || now.Size != i.Size || now.Generation == i.Generation {
		return nil, err
	}
	return st.Open(ctx, now, off, n)
}

// sendBlob answers with a part of a blob that the caller was just found to see.
func (r *Registry) sendBlob(w *response, q *request, i blobstore.Info, off, n int64, status int) error {
	body, err := openAgain(q.Context(), r.store, i, off, n)
	if err != nil {
		err = reading(i.Digest, err)
		r.suspect(i.Digest, err)
		return err
	}
	defer body.Close()
	if r.verify && n == i.Size {
		err := reading(i.Digest, r.sendVerified(w, i, body, status))
		r.suspect(i.Digest, err)
		return err
	}
	w.WriteHeader(status)
	sent, err := io.Copy(w, body)
	if err == nil && sent != n {
		err = fmt.Errorf("%w: blob %s: store gave %d bytes of %d", blobstore.ErrDamaged, i.Digest, sent, n)
	}
	err = reading(i.Digest, err)
	r.suspect(i.Digest, err)
	if bad, _ := r.scrubber.Unusable(q.Context(), i.Digest); err == nil && bad && n == i.Size { // it may be a good one again
		r.scrubber.Suspect(i.Digest)
	}
	return err
}

// verifiedPiece is how much of a blob is read at a time that is hashed on its way out, and how much of it waits for the
// verdict.
const verifiedPiece = 256 << 10

// sendVerified answers with a whole blob and hashes it on the way. The last piece goes out when the blob is found to be
// what its digest says: of one that is damaged the client gets less than was announced, and the scrubber is told. A
// blob of one piece is found out before the answer begins.
func (r *Registry) sendVerified(w *response, i blobstore.Info, body io.Reader, status int) error {
	h, rest := identity.NewHash(), i.Size
	piece := make([]byte, min(rest, verifiedPiece))
	for rest > 0 {
		n, err := io.ReadFull(body, piece[:min(rest, verifiedPiece)])
		if err != nil {
			if err == io.EOF || err == io.ErrUnexpectedEOF {
				r.scrubber.Suspect(i.Digest)
			}
			return fmt.Errorf("blob %s: %d bytes before its end: %w", i.Digest, rest-int64(n), err)
		}
		h.Write(piece[:n])
		if rest -= int64(n); rest == 0 && identity.DigestOf(h) != i.Digest {
			r.scrubber.Suspect(i.Digest)
			return fmt.Errorf("%w: blob %s: cut off after %d of %d bytes, which are not those of its digest",
				blobstore.ErrDamaged, i.Digest, i.Size-int64(n), i.Size)
		}
		if w.status == 0 {
			w.WriteHeader(status)
		}
		if _, err := w.Write(piece[:n]); err != nil {
			return err
		}
	}
	if w.status == 0 { // it is the empty blob
		w.WriteHeader(status)
	}
	return nil
}

func (r *Registry) deleteBlob(w *response, q *request) error {
	repo, d, err := q.repoDigest()
	if err != nil {
		return err
	}
	if err := r.DeleteBlob(q.Context(), q.caller, repo, d); err != nil {
		return err
	}
	w.WriteHeader(http.StatusAccepted)
	return nil
}

// unchanged sets the headers that name the content, and answers 304 if the client says that it has it.
func (w *response) unchanged(q *request, d identity.Digest) bool {
	h := w.Header()
	h.Set(api.HeaderContentDigest, d.String())
	h.Set("ETag", etag(d))
	for _, tag := range strings.Split(q.Header.Get("If-None-Match"), ",") {
		if tag = strings.TrimPrefix(strings.TrimSpace(tag), "W/"); tag == etag(d) || tag == "*" {
			w.WriteHeader(http.StatusNotModified)
			return true
		}
	}
	return false
}

func etag(d identity.Digest) string { return `"` + d.String() + `"` }

// rangeOf returns the Range header, or nothing where an If-Range says that it is for other content.
func (q *request) rangeOf(d identity.Digest) string {
	if cond := q.Header.Get("If-Range"); cond != "" && cond != etag(d) {
		return ""
	}
	return q.Header.Get("Range")
}
