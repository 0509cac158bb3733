package metrics

import (
	"context"
	"errors"
	"io"
	"iter"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
)

// The operations of a store that are told apart. opRead is a blob that broke off on its way to a client.
const (
	opStat     = "stat"
	opOpen     = "open"
	opRead     = "read"
	opCreate   = "create"
	opResume   = "resume"
	opAppend   = "append"
	opCommit   = "commit"
	opAbort    = "abort"
	opDelete   = "delete"
	opList     = "list"
	opPutRefs  = "put_refs"
	opReadRefs = "read_refs"
	opUploads  = "list_uploads"
	opSetAside = "set_aside"
	opAside    = "list_aside"
	opSweep    = "sweep"
	opSegments = "segments"
	opKeep     = "keep_segments"
	opLink     = "link"
)

var ops = []string{
	opStat, opOpen, opRead, opCreate, opResume, opAppend, opCommit, opAbort, opDelete, opList, opPutRefs, opReadRefs,
	opUploads, opSetAside, opAside, opSweep, opSegments, opKeep,
	opLink,
}

// answers are errors of a store that say something about what was asked, and not that the store failed.
var answers = []error{
	blobstore.ErrNotFound, blobstore.ErrUploadUnknown, blobstore.ErrUploadBusy, blobstore.ErrOffset,
	blobstore.ErrDigestMismatch, blobstore.ErrSizeMismatch,
}

// Store counts the operations of a store that fail. What it returns has the optional parts that st has.
func (m *Metrics) Store(st blobstore.Engine) blobstore.Engine {
	c := counted{st, m}
	aside, hasAside := st.(blobstore.Quarantine)
	segments, hasSegments := st.(blobstore.Segments)
	sweep, hasSweep := st.(blobstore.Sweeper)
	losses, hasLosses := st.(blobstore.Losses)
	links, hasLinks := st.(blobstore.Linker)
	switch {
	case hasLosses && hasAside && hasSegments && !hasSweep && !hasLinks: // a folder
		return struct {
			counted
			countedAside
			countedSegments
			blobstore.Losses
		}{c, countedAside{aside, m}, countedSegments{segments, m}, losses}
	case hasLosses && hasAside && hasSegments && hasSweep && hasLinks: // a bucket
		return struct {
			counted
			countedAside
			countedSegments
			countedSweep
			countedLinks
			blobstore.Losses
		}{
			c, countedAside{aside, m}, countedSegments{segments, m}, countedSweep{sweep, m}, countedLinks{links, m}, losses,
		}
	case !hasLosses && !hasAside && !hasSweep && !hasSegments && !hasLinks:
		return c
	}
	return st // of a kind that is not known here: better not counted than without a part
}

// count counts err, unless it is an answer or the caller gave up.
func (m *Metrics) count(ctx context.Context, op string, err error) {
	if err == nil || ctx.Err() != nil {
		return
	}
	for _, a := range answers {
		if errors.Is(err, a) {
			return
		}
	}
	m.store.WithLabelValues(op).Inc()
}

// listed counts the errors of a listing.
func listed[T any](m *Metrics, ctx context.Context, op string, all iter.Seq2[T, error]) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for v, err := range all {
			m.count(ctx, op, err)
			if !yield(v, err) {
				return
			}
		}
	}
}

type counted struct {
	blobstore.Engine
	m *Metrics
}

func (c counted) Stat(ctx context.Context, d identity.Digest) (blobstore.Info, error) {
	i, err := c.Engine.Stat(ctx, d)
	c.m.count(ctx, opStat, err)
	return i, err
}

// Open gives the reader of the store as it is, which a connection may send by itself.
func (c counted) Open(ctx context.Context, i blobstore.Info, off, n int64) (io.ReadCloser, error) {
	r, err := c.Engine.Open(ctx, i, off, n)
	c.m.count(ctx, opOpen, err)
	return r, err
}

func (c counted) Create(ctx context.Context, hint identity.Digest, size int64) (blobstore.Upload, error) {
	u, err := c.Engine.Create(ctx, hint, size)
	c.m.count(ctx, opCreate, err)
	if err != nil {
		return nil, err
	}
	return countedUpload{u, c.m}, nil
}

func (c counted) Resume(ctx context.Context, id string) (blobstore.Upload, error) {
	u, err := c.Engine.Resume(ctx, id)
	c.m.count(ctx, opResume, err)
	if err != nil {
		return nil, err
	}
	return countedUpload{u, c.m}, nil
}

func (c counted) Delete(ctx context.Context, i blobstore.Info) error {
	err := c.Engine.Delete(ctx, i)
	c.m.count(ctx, opDelete, err)
	return err
}

func (c counted) List(ctx context.Context, after identity.Digest) iter.Seq2[blobstore.Info, error] {
	return listed(c.m, ctx, opList, c.Engine.List(ctx, after))
}

func (c counted) Uploads(ctx context.Context) iter.Seq2[blobstore.UploadInfo, error] {
	return listed(c.m, ctx, opUploads, c.Engine.Uploads(ctx))
}

func (c counted) Put(ctx context.Context, refs ...blobstore.Ref) (blobstore.Position, error) {
	at, err := c.Engine.Put(ctx, refs...)
	c.m.count(ctx, opPutRefs, err)
	return at, err
}

func (c counted) Since(ctx context.Context, after blobstore.Position) iter.Seq2[blobstore.PlacedRef, error] {
	return listed(c.m, ctx, opReadRefs, c.Engine.Since(ctx, after))
}

type countedUpload struct {
	blobstore.Upload
	m *Metrics
}

// source notes whether it failed: that is no failure of the store.
type source struct {
	r      io.Reader
	failed bool
}

func (s *source) Read(b []byte) (int, error) {
	n, err := s.r.Read(b)
	s.failed = s.failed || err != nil && err != io.EOF
	return n, err
}

func (u countedUpload) Append(ctx context.Context, off int64, r io.Reader) (int64, error) {
	from := &source{r: r}
	n, err := u.Upload.Append(ctx, off, from)
	if !from.failed {
		u.m.count(ctx, opAppend, err)
	}
	return n, err
}

func (u countedUpload) Commit(ctx context.Context, want identity.Digest) (blobstore.Info, error) {
	i, err := u.Upload.Commit(ctx, want)
	u.m.count(ctx, opCommit, err)
	return i, err
}

func (u countedUpload) Finish(
	ctx context.Context, off int64, r io.Reader, want identity.Digest,
) (blobstore.Info, error) {
	from := &source{r: r}
	i, err := u.Upload.Finish(ctx, off, from, want)
	if !from.failed {
		u.m.count(ctx, opCommit, err)
	}
	return i, err
}

func (u countedUpload) Abort(ctx context.Context) error {
	err := u.Upload.Abort(ctx)
	u.m.count(ctx, opAbort, err)
	return err
}

type countedAside struct {
	blobstore.Quarantine
	m *Metrics
}

func (c countedAside) SetAside(ctx context.Context, i blobstore.Info, why string) error {
	err := c.Quarantine.SetAside(ctx, i, why)
	c.m.count(ctx, opSetAside, err)
	return err
}

func (c countedAside) Aside(ctx context.Context) iter.Seq2[blobstore.AsideInfo, error] {
	return listed(c.m, ctx, opAside, c.Quarantine.Aside(ctx))
}

type countedSweep struct {
	blobstore.Sweeper
	m *Metrics
}

func (c countedSweep) Sweep(ctx context.Context, before time.Time) (int, error) {
	n, err := c.Sweeper.Sweep(ctx, before)
	c.m.count(ctx, opSweep, err)
	return n, err
}

type countedSegments struct {
	of blobstore.Segments
	m  *Metrics
}

func (c countedSegments) Segments(ctx context.Context, i blobstore.Info) ([]byte, error) {
	b, err := c.of.Segments(ctx, i)
	c.m.count(ctx, opSegments, err)
	return b, err
}

func (c countedSegments) KeepSegments(ctx context.Context, i blobstore.Info, form []byte) error {
	err := c.of.KeepSegments(ctx, i, form)
	c.m.count(ctx, opKeep, err)
	return err
}

type countedLinks struct {
	of blobstore.Linker
	m  *Metrics
}

func (c countedLinks) Link(ctx context.Context, i blobstore.Info, ttl time.Duration) (blobstore.Link, error) {
	l, err := c.of.Link(ctx, i, ttl)
	c.m.count(ctx, opLink, err)
	return l, err
}
