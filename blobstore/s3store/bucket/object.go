package bucket

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/kiln-registry/kiln-registry/identity"
)

// Object is an object, whole.
type Object struct {
	Body     []byte
	ETag     string
	Modified time.Time     // by the server's clock, to the second
	Age      time.Duration // by the server's clock
}

// Entry describes an object.
type Entry struct {
	Key      string
	Size     int64
	Modified time.Time // by the server's clock, to the second
	CRC32C   string    // as Complete returns it; empty where the server keeps none, and in a listing
}

// Condition is what must hold for an object to be put. The zero Condition always does.
type Condition struct {
	Absent bool
	ETag   string // of what is there
}

// Key puts the parts of a key together, below the prefix.
func (b *Bucket) Key(parts ...string) string {
	if b.Prefix != "" {
		parts = append([]string{b.Prefix}, parts...)
	}
	return strings.Join(parts, "/")
}

// Get reads an object of at most limit bytes. sound, if set, says whether they are what was put: if not, the object is
// asked for again, and at last returned with sound's error. ErrAbsent.
func (b *Bucket) Get(ctx context.Context, key string, limit int64, sound func([]byte) error) (o Object, err error) {
	for tries := 1; ; tries++ {
		err = b.persist(ctx, func() (err error) {
			o, err = b.getOnce(ctx, key, limit)
			return err
		})
		if err != nil || sound == nil {
			return o, err
		}
		if err = sound(o.Body); err == nil || tries >= soundAttempts {
			return o, err
		}
		if err := b.Pause(ctx, tries); err != nil {
			return o, err
		}
	}
}

// soundAttempts is how often an object is read that is not what was put. It may have changed on its way, or for good.
const soundAttempts = 3

func (b *Bucket) getOnce(ctx context.Context, key string, limit int64) (o Object, err error) {
	inner, cancel := b.bounded(ctx, int(limit))
	defer cancel()
	body, info, header, err := b.core.GetObject(inner, b.Bucket, key, minio.GetObjectOptions{})
	if err != nil {
		return o, b.explain(ctx, getObject, key, err)
	}
	defer body.Close()
	o = Object{ETag: info.ETag, Modified: info.LastModified}
	if now, err := http.ParseTime(header.Get("Date")); err == nil {
		o.Age = max(0, now.Sub(o.Modified)) // servers may be late to note that a second has passed
	}
	if info.Size < 0 { // the server doesn't say
		o.Body, err = io.ReadAll(io.LimitReader(body, limit+1))
		info.Size = int64(len(o.Body))
	} else if info.Size <= limit {
		o.Body = make([]byte, info.Size)
		_, err = io.ReadFull(body, o.Body)
	}
	if info.Size > limit {
		return o, fmt.Errorf("%s has %d bytes: at most %d were expected", key, info.Size, limit)
	}
	return o, b.explain(ctx, getObject, key, err)
}

// Range begins to read n bytes, at least one, of an object from off, and returns how many there are: as many, or fewer
// if the object ends before. What it reads may break off. ErrAbsent.
func (b *Bucket) Range(ctx context.Context, key string, off, n int64) (r io.ReadCloser, size int64, err error) {
	var o minio.GetObjectOptions
	if err := o.SetRange(off, off+n-1); err != nil {
		return nil, 0, err
	}
	inner, cancel := context.WithCancel(ctx)
	waiting := time.AfterFunc(b.limit, cancel) // for the answer to begin
	r, info, _, err := b.core.GetObject(inner, b.Bucket, key, o)
	if !waiting.Stop() && ctx.Err() == nil { // it was about to begin, perhaps
		if err == nil {
			r.Close()
		}
		return nil, 0, b.unanswered(errSilent)
	}
	if err != nil {
		cancel()
		return nil, 0, b.explain(ctx, getObject, key, err)
	}
	return ranged{r, cancel}, info.Size, nil
}

// ranged is the body of an answer that Range returns.
type ranged struct {
	io.ReadCloser
	cancel context.CancelFunc
}

func (r ranged) Close() error {
	defer r.cancel()
	return r.ReadCloser.Close()
}

// errSilent: the server takes requests, and does not answer.
var errSilent = errors.New("the server does not answer")

// Put writes an object, whole, and returns its ETag. The server checks the bytes. ErrConflict if the condition does not
// hold, or no longer holds because of an earlier try of the same request.
func (b *Bucket) Put(ctx context.Context, key string, body []byte, only Condition) (etag string, err error) {
	o := minio.PutObjectOptions{}
	switch {
	case only.Absent:
		o.SetMatchETagExcept("*")
	case only.ETag != "":
		o.SetMatchETag(only.ETag)
	}
	u, err := b.put(ctx, key, body, identity.Sum(body), o)
	return u.ETag, err
}

// PutVerified writes an object, whole, whose SHA-256 is known, and says whether the server confirms that it stored it.
// ErrChanged if it did not.
func (b *Bucket) PutVerified(
	ctx context.Context, key string, body []byte, sum identity.Digest,
) (confirmed bool, err error) {
	u, err := b.put(ctx, key, body, sum, minio.PutObjectOptions{})
	return u.ChecksumSHA256 != "", err
}

func encode(sum identity.Digest) string { return base64.StdEncoding.EncodeToString(sum[:]) }

func (b *Bucket) put(
	ctx context.Context, key string, body []byte, sum identity.Digest, o minio.PutObjectOptions,
) (u minio.UploadInfo, err error) {
	o.ServerSideEncryption = b.sse
	o.DisableContentSha256 = true // or the client would hash the body again, piece by piece
	o.UserMetadata = map[string]string{"x-amz-checksum-sha256": encode(sum)}
	err = b.persist(ctx, func() (err error) {
		inner, cancel := b.bounded(ctx, len(body))
		defer cancel()
		u, err = b.core.PutObject(inner, b.Bucket, key, bytes.NewReader(body), int64(len(body)), "", sum.Hex(), o)
		if err == nil && u.ChecksumSHA256 != "" && u.ChecksumSHA256 != encode(sum) {
			return fmt.Errorf("%s: %w: it says SHA-256 %s, sent was %s", key, ErrChanged, u.ChecksumSHA256, encode(sum))
		}
		return b.explain(ctx, putObject, key, err)
	})
	return u, err
}

// Remove deletes an object. It is no error if there is none.
func (b *Bucket) Remove(ctx context.Context, key string) error {
	inner, cancel := b.bounded(ctx, 0)
	defer cancel()
	err := b.explain(ctx, delObject, key, b.core.RemoveObject(inner, b.Bucket, key, minio.RemoveObjectOptions{}))
	if errors.Is(err, ErrAbsent) {
		return nil
	}
	return err
}

// Head describes an object. ErrAbsent.
func (b *Bucket) Head(ctx context.Context, key string) (Entry, error) {
	inner, cancel := b.bounded(ctx, 0)
	defer cancel()
	i, err := b.core.StatObject(inner, b.Bucket, key, minio.StatObjectOptions{Checksum: true})
	return Entry{key, i.Size, i.LastModified, i.ChecksumCRC32C}, b.explain(ctx, getObject, key, err)
}

// List yields the objects whose keys begin with prefix and come after another key, in ascending order. A page of the
// server's listing has limit objects, or as many as it likes for 0. A listing that breaks off is gone on with.
func (b *Bucket) List(ctx context.Context, prefix, after string, limit int) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		for tries := 1; ; tries++ {
			err := b.list(ctx, prefix, after, limit, func(e Entry) bool {
				after, tries = e.Key, 1
				return yield(e, nil)
			})
			if errors.Is(err, errBroken) && tries < Attempts {
				err = b.Pause(ctx, tries)
				if err == nil {
					continue
				}
			}
			if err != nil {
				yield(Entry{}, err)
			}
			return
		}
	}
}

// list calls yield until it returns false.
func (b *Bucket) list(ctx context.Context, prefix, after string, limit int, yield func(Entry) bool) error {
	o := minio.ListObjectsOptions{Prefix: prefix, StartAfter: after, Recursive: true, MaxKeys: limit}
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	waiting := time.AfterFunc(b.limit, cancel) // for the next page
	defer waiting.Stop()
	for i := range b.core.ListObjectsIter(inner, b.Bucket, o) {
		if i.Err != nil && ctx.Err() == nil && inner.Err() != nil {
			return b.unanswered(errSilent)
		} else if i.Err != nil {
			return b.explain(ctx, listBucket, prefix, i.Err)
		}
		waiting.Stop()
		if !yield(Entry{Key: i.Key, Size: i.Size, Modified: i.LastModified}) {
			return nil
		}
		waiting.Reset(b.limit)
	}
	if ctx.Err() == nil && inner.Err() != nil {
		return b.unanswered(errSilent)
	}
	return ctx.Err() // or a listing that was given up would pass for a short one
}
