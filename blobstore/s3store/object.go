package s3store

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/kiln-registry/kiln-registry/identity"
)

// object is a small object, whole.
type object struct {
	body     []byte
	etag     string
	modified time.Time // by the server's clock, to the second
	age      time.Duration
}

// condition is what must hold for an object to be put. The zero condition always does.
type condition struct {
	absent bool
	etag   string // of what is there
}

func (c *conn) key(parts ...string) string {
	if c.Prefix != "" {
		parts = append([]string{c.Prefix}, parts...)
	}
	return strings.Join(parts, "/")
}

// get reads an object of at most limit bytes. errAbsent.
func (c *conn) get(ctx context.Context, key string, limit int64) (o object, err error) {
	for tries := 0; ; tries++ {
		o, err = c.getOnce(ctx, key, limit)
		// The client tries again what fails before the answer begins; this is for answers that break off.
		if err == nil || !errors.Is(err, errBroken) || tries+1 >= attempts {
			return o, err
		}
		if err := pause(ctx, tries); err != nil {
			return o, err
		}
	}
}

var errBroken = errors.New("the answer broke off")

func (c *conn) getOnce(ctx context.Context, key string, limit int64) (o object, err error) {
	body, info, header, err := c.GetObject(ctx, c.Bucket, key, minio.GetObjectOptions{})
	if err != nil {
		return o, c.explain(getObject, key, err)
	}
	defer body.Close()
	if info.Size > limit {
		return o, fmt.Errorf("%s/%s has %d bytes: not an object of this program", c, key, info.Size)
	}
	o = object{body: make([]byte, info.Size), etag: info.ETag, modified: info.LastModified}
	if now, err := http.ParseTime(header.Get("Date")); err == nil {
		o.age = now.Sub(o.modified)
	}
	if _, err := io.ReadFull(body, o.body); err != nil {
		return o, errors.Join(errBroken, c.explain(getObject, key, err))
	}
	return o, nil
}

// put writes an object, whole, and returns its ETag. The server checks the bytes. errConflict if the condition does not
// hold, or may no longer hold because of an earlier try of the same request.
func (c *conn) put(ctx context.Context, key string, body []byte, only condition) (etag string, err error) {
	o := minio.PutObjectOptions{ServerSideEncryption: c.sse}
	switch {
	case only.absent:
		o.SetMatchETagExcept("*")
	case only.etag != "":
		o.SetMatchETag(only.etag)
	}
	u, err := c.putBytes(ctx, key, body, identity.Sum(body), o)
	return u.ETag, err
}

// putBytes writes an object of which the SHA-256 is known. The server checks it, or doesn't know how to.
func (c *conn) putBytes(
	ctx context.Context, key string, body []byte, sum identity.Digest, o minio.PutObjectOptions,
) (minio.UploadInfo, error) {
	o.DisableContentSha256 = true // or the client would hash the body again, piece by piece
	o.UserMetadata = map[string]string{"x-amz-checksum-sha256": base64.StdEncoding.EncodeToString(sum[:])}
	u, err := c.PutObject(ctx, c.Bucket, key, bytes.NewReader(body), int64(len(body)), "", sum.Hex(), o)
	return u, c.explain(putObject, key, err)
}

// remove deletes an object. It is no error if there is none.
func (c *conn) remove(ctx context.Context, key string) error {
	err := c.explain(delObject, key, c.RemoveObject(ctx, c.Bucket, key, minio.RemoveObjectOptions{}))
	if errors.Is(err, errAbsent) {
		return nil
	}
	return err
}

// head describes an object, with its checksums where the server keeps any. errAbsent.
func (c *conn) head(ctx context.Context, key string) (minio.ObjectInfo, error) {
	i, err := c.StatObject(ctx, c.Bucket, key, minio.StatObjectOptions{Checksum: true})
	return i, c.explain(getObject, key, err)
}

// list yields the objects whose keys begin with prefix and come after another key, in ascending order.
func (c *conn) list(ctx context.Context, prefix, after string, limit int) func(func(minio.ObjectInfo, error) bool) {
	return func(yield func(minio.ObjectInfo, error) bool) {
		o := minio.ListObjectsOptions{Prefix: prefix, StartAfter: after, Recursive: true, MaxKeys: limit}
		for i := range c.ListObjectsIter(ctx, c.Bucket, o) {
			if !yield(i, c.explain(listBucket, prefix, i.Err)) || i.Err != nil {
				return
			}
		}
	}
}

func (c *conn) abortMultipart(ctx context.Context, key, multipart string) error {
	err := c.explain(abortUpload, key, c.AbortMultipartUpload(ctx, c.Bucket, key, multipart))
	if errors.Is(err, errNoUpload) || errors.Is(err, errAbsent) {
		return nil
	}
	return err
}
