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

// Get reads an object of at most limit bytes. ErrAbsent.
func (b *Bucket) Get(ctx context.Context, key string, limit int64) (o Object, err error) {
	for tries := 0; ; tries++ {
		o, err = b.getOnce(ctx, key, limit)
		// The client tries again what fails before the answer begins; this is for answers that break off.
		if err == nil || !errors.Is(err, errBroken) || tries+1 >= Attempts {
			return o, err
		}
		if err := Pause(ctx, tries); err != nil {
			return o, err
		}
	}
}

var errBroken = errors.New("the answer broke off")

func (b *Bucket) getOnce(ctx context.Context, key string, limit int64) (o Object, err error) {
	body, info, header, err := b.core.GetObject(ctx, b.Bucket, key, minio.GetObjectOptions{})
	if err != nil {
		return o, b.explain(getObject, key, err)
	}
	defer body.Close()
	if info.Size > limit {
		return o, fmt.Errorf("%s has %d bytes: at most %d were expected", key, info.Size, limit)
	}
	o = Object{Body: make([]byte, info.Size), ETag: info.ETag, Modified: info.LastModified}
	if now, err := http.ParseTime(header.Get("Date")); err == nil {
		o.Age = now.Sub(o.Modified)
	}
	if _, err := io.ReadFull(body, o.Body); err != nil {
		return o, errors.Join(errBroken, b.explain(getObject, key, err))
	}
	return o, nil
}

// Range begins to read n bytes, at least one, of an object from off, and returns how many there are: as many, or fewer
// if the object ends before. What it reads may break off. ErrAbsent.
func (b *Bucket) Range(ctx context.Context, key string, off, n int64) (r io.ReadCloser, size int64, err error) {
	var o minio.GetObjectOptions
	if err := o.SetRange(off, off+n-1); err != nil {
		return nil, 0, err
	}
	r, info, _, err := b.core.GetObject(ctx, b.Bucket, key, o)
	return r, info.Size, b.explain(getObject, key, err)
}

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
	for tries := 0; ; tries++ {
		u, err := b.put(ctx, key, body, sum, minio.PutObjectOptions{})
		switch said := encode(sum); {
		case err == nil && u.ChecksumSHA256 == "":
			return false, nil
		case err == nil && u.ChecksumSHA256 == said:
			return true, nil
		case err == nil:
			err = fmt.Errorf("%s: %w: it says SHA-256 %s, sent was %s", key, ErrChanged, u.ChecksumSHA256, said)
		}
		if !errors.Is(err, ErrChanged) || tries+1 >= Attempts {
			return false, err
		}
		if err := Pause(ctx, tries); err != nil {
			return false, err
		}
	}
}

func encode(sum identity.Digest) string { return base64.StdEncoding.EncodeToString(sum[:]) }

func (b *Bucket) put(
	ctx context.Context, key string, body []byte, sum identity.Digest, o minio.PutObjectOptions,
) (minio.UploadInfo, error) {
	o.ServerSideEncryption = b.sse
	o.DisableContentSha256 = true // or the client would hash the body again, piece by piece
	o.UserMetadata = map[string]string{"x-amz-checksum-sha256": encode(sum)}
	u, err := b.core.PutObject(ctx, b.Bucket, key, bytes.NewReader(body), int64(len(body)), "", sum.Hex(), o)
	return u, b.explain(putObject, key, err)
}

// Remove deletes an object. It is no error if there is none.
func (b *Bucket) Remove(ctx context.Context, key string) error {
	err := b.explain(delObject, key, b.core.RemoveObject(ctx, b.Bucket, key, minio.RemoveObjectOptions{}))
	if errors.Is(err, ErrAbsent) {
		return nil
	}
	return err
}

// Head describes an object. ErrAbsent.
func (b *Bucket) Head(ctx context.Context, key string) (Entry, error) {
	i, err := b.core.StatObject(ctx, b.Bucket, key, minio.StatObjectOptions{Checksum: true})
	return Entry{key, i.Size, i.LastModified, i.ChecksumCRC32C}, b.explain(getObject, key, err)
}

// List yields the objects whose keys begin with prefix and come after another key, in ascending order. A page of the
// server's listing has limit objects, or as many as it likes for 0.
func (b *Bucket) List(ctx context.Context, prefix, after string, limit int) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		o := minio.ListObjectsOptions{Prefix: prefix, StartAfter: after, Recursive: true, MaxKeys: limit}
		for i := range b.core.ListObjectsIter(ctx, b.Bucket, o) {
			e := Entry{Key: i.Key, Size: i.Size, Modified: i.LastModified}
			if !yield(e, b.explain(listBucket, prefix, i.Err)) || i.Err != nil {
				return
			}
		}
	}
}
