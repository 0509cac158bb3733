package bucket

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"iter"
	"net/http"
	"strconv"
	"time"

	"github.com/minio/minio-go/v7"
)

// The limits of S3: an object of at most 5 TiB in at most 10,000 parts of at least 5 MiB each but the last
// (docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html).
const (
	MaxObject = 5 << 40
	MaxParts  = 10_000
)

// Part is a stored part of a multipart upload.
type Part struct {
	ETag string `json:"etag"`
	CRC  uint32 `json:"crc32c"`
}

// Multipart is a multipart upload that is neither completed nor aborted.
type Multipart struct {
	Key       string
	ID        string
	Initiated time.Time
}

// Begin begins a multipart upload.
func (b *Bucket) Begin(ctx context.Context, key string) (id string, err error) {
	err = b.persist(ctx, func() (err error) {
		inner, cancel := b.bounded(ctx, 0)
		defer cancel()
		id, err = b.core.NewMultipartUpload(inner, b.Bucket, key, minio.PutObjectOptions{
			ServerSideEncryption: b.sse,
			UserMetadata:         map[string]string{"X-Amz-Checksum-Algorithm": "CRC32C"},
		})
		if err == nil && id == "" {
			err = errors.New("the server gave no name of the upload")
		}
		return b.explain(ctx, putObject, key, err)
	})
	return id, err
}

// PutPart stores a part, counted from 1, whose CRC-32C is known. The server checks it. ErrNoUpload; ErrChanged if the
// server says that it stored something else.
func (b *Bucket) PutPart(
	ctx context.Context, key, id string, n int, body []byte, crc uint32,
) (p Part, err error) {
	sum := encodeCRC(crc)
	o := minio.PutObjectPartOptions{
		CustomHeader: http.Header{"X-Amz-Checksum-Crc32c": {sum}}, DisableContentSha256: true,
	}
	err = b.persist(ctx, func() error {
		stored, err := b.core.PutObjectPart(ctx, b.Bucket, key, id, n, bytes.NewReader(body), int64(len(body)), o)
		if err == nil && stored.ChecksumCRC32C != "" && stored.ChecksumCRC32C != sum {
			return fmt.Errorf("part %d of %s: %w: it says CRC-32C %s, sent was %s",
				n, key, ErrChanged, stored.ChecksumCRC32C, sum)
		}
		p = Part{stored.ETag, crc}
		return b.explain(ctx, putObject, key, err)
	})
	return p, err
}

// Complete makes an object of the parts, which the server checks again, and returns what the server says of it: what
// Checksum says of the parts, or nothing. ErrNoUpload, also if an earlier try has made it; ErrParts.
func (b *Bucket) Complete(ctx context.Context, key, id string, parts []Part) (checksum string, err error) {
	list := make([]minio.CompletePart, len(parts))
	for i, p := range parts {
		list[i] = minio.CompletePart{PartNumber: i + 1, ETag: p.ETag, ChecksumCRC32C: encodeCRC(p.CRC)}
	}
	err = b.persist(ctx, func() error {
		u, err := b.patient.CompleteMultipartUpload(ctx, b.Bucket, key, id, list, minio.PutObjectOptions{})
		checksum = u.ChecksumCRC32C
		return b.explain(ctx, putObject, key, err)
	})
	return checksum, err
}

// Checksum is what a server says of an object in parts: the CRC-32C of the parts' CRC-32C, and their number.
func Checksum(parts []Part) string {
	sums := make([]byte, 0, 4*len(parts))
	for _, p := range parts {
		sums = binary.BigEndian.AppendUint32(sums, p.CRC)
	}
	return encodeCRC(crc32.Checksum(sums, crc32.MakeTable(crc32.Castagnoli))) + "-" + strconv.Itoa(len(parts))
}

func encodeCRC(crc uint32) string {
	return base64.StdEncoding.EncodeToString(binary.BigEndian.AppendUint32(nil, crc))
}

// Abort drops a multipart upload. It is no error if there is none.
func (b *Bucket) Abort(ctx context.Context, key, id string) error {
	err := b.persist(ctx, func() error {
		inner, cancel := b.bounded(ctx, 0)
		defer cancel()
		return b.explain(ctx, abortUpload, key, b.core.AbortMultipartUpload(inner, b.Bucket, key, id))
	})
	if errors.Is(err, ErrNoUpload) || errors.Is(err, ErrAbsent) {
		return nil
	}
	return err
}

// Multiparts yields the multipart uploads of keys that begin with prefix.
func (b *Bucket) Multiparts(ctx context.Context, prefix string) iter.Seq2[Multipart, error] {
	return func(yield func(Multipart, error) bool) {
		key, id := "", ""
		for more := true; more; {
			var page minio.ListMultipartUploadsResult
			err := b.persist(ctx, func() (err error) {
				page, err = b.core.ListMultipartUploads(ctx, b.Bucket, prefix, key, id, "", 1000)
				return b.explain(ctx, listUploads, prefix, err)
			})
			if err != nil {
				yield(Multipart{}, err)
				return
			}
			for _, u := range page.Uploads {
				if !yield(Multipart{u.Key, u.UploadID, u.Initiated}, nil) {
					return
				}
			}
			key, id = page.NextKeyMarker, page.NextUploadIDMarker
			more = page.IsTruncated && len(page.Uploads) > 0
		}
	}
}
