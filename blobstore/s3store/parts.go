package s3store

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net/http"
	"strconv"

	"github.com/minio/minio-go/v7"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
)

// The limits of S3: an object of at most 5 TiB in at most 10,000 parts of at least 5 MiB each but the last
// (docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html).
const (
	maxObject = 5 << 40
	maxParts  = 10_000
	partMin   = 16 << 20 // the smallest part that is sent, but the last
)

// partSize returns how large part n is, counted from 0, of an upload that was announced with a size. Parts of one upload
// are equal then and 9,000 suffice. Where nothing was announced (a negative size) they grow after the first 2,000, so
// that 10,000 reach the largest object.
func partSize(n int, announced, smallest int64) int64 {
	const step = 160 << 10
	if announced < 0 {
		return smallest + max(0, int64(n)-2000)*step
	}
	const unit = 1 << 20
	return max(smallest, (announced/9000+unit)/unit*unit)
}

// partSize returns how large the part is that is being filled.
func (s *session) partSize() int64 { return partSize(s.n, s.cur.Announced, s.st.partMin) }

// send stores a part, which ends at size where the hash state is h, and now and then saves the state.
func (s *session) send(ctx context.Context, b []byte, crc uint32, size int64, h []byte) error {
	if err := s.multipart(ctx); err != nil {
		return err
	}
	p, err := s.sendPart(ctx, b, crc)
	if err != nil {
		return err
	}
	s.cur.Parts = append(s.cur.Parts, p)
	s.cur.Parted, s.cur.Size, s.cur.Tails, s.cur.Hash = size, size, nil, h
	if s.cur.Size-s.saved.Size < s.st.saveEvery {
		return nil
	}
	return s.saveState(ctx)
}

// multipart begins a multipart upload, unless there is one, and notes it in the state.
func (s *session) multipart(ctx context.Context) error {
	if err := s.st.change(ctx); err != nil {
		return err
	}
	if s.cur.Multipart != "" {
		return nil
	}
	s.cur.Unnamed = s.cur.Target.IsZero()
	id, err := s.st.NewMultipartUpload(ctx, s.st.Bucket, s.copyKey(), minio.PutObjectOptions{
		ServerSideEncryption: s.st.sse,
		UserMetadata:         map[string]string{"X-Amz-Checksum-Algorithm": "CRC32C"},
	})
	if err != nil {
		return s.st.explain(putObject, s.copyKey(), err)
	}
	s.cur.Multipart = id
	return s.saveState(ctx)
}

// sendPart stores the next part and returns how the server calls it. The server checks its CRC-32C.
func (s *session) sendPart(ctx context.Context, b []byte, crc uint32) (p part, err error) {
	n := len(s.cur.Parts) + 1
	if n > maxParts {
		return p, fmt.Errorf("%w: more than %d parts", blobstore.ErrNoSpace, maxParts)
	}
	sum := encodeCRC(crc)
	for tries := 0; ; tries++ {
		o := minio.PutObjectPartOptions{
			CustomHeader: http.Header{"X-Amz-Checksum-Crc32c": {sum}}, DisableContentSha256: true,
		}
		stored, err := s.st.PutObjectPart(ctx, s.st.Bucket, s.copyKey(), s.cur.Multipart, n, bytes.NewReader(b),
			int64(len(b)), o)
		damaged := isBadDigest(err)
		switch {
		case err != nil && !damaged:
			return p, s.st.explain(putObject, s.copyKey(), err)
		case err == nil && (stored.ChecksumCRC32C == "" || stored.ChecksumCRC32C == sum):
			return part{stored.ETag, crc}, nil
		case tries+1 >= attempts && damaged:
			return p, s.st.explain(putObject, s.copyKey(), err)
		case tries+1 >= attempts:
			return p, fmt.Errorf("part %d of %s: %w: CRC-32C %s, sent was %s",
				n, s.copyKey(), errLie, stored.ChecksumCRC32C, sum)
		}
		if err := pause(ctx, tries); err != nil {
			return p, err
		}
	}
}

// errLie: a server confirms other bytes than it was sent.
var errLie = fmt.Errorf("%w: the server did not store what was sent", blobstore.ErrUnavailable)

// isBadDigest says whether a server found that bytes were changed on their way.
func isBadDigest(err error) bool {
	var e minio.ErrorResponse
	return errors.As(err, &e) && (e.Code == "BadDigest" || e.Code == "XAmzContentSHA256Mismatch" ||
		e.Code == "InvalidDigest" || e.Code == "XAmzContentChecksumMismatch")
}

func encodeCRC(crc uint32) string {
	return base64.StdEncoding.EncodeToString(binary.BigEndian.AppendUint32(nil, crc))
}

// store makes the bytes of the upload, which hash to want, an object and returns once the server has confirmed them.
func (s *session) store(ctx context.Context, want identity.Digest) error {
	s.cur.Target = want
	if err := s.saveState(ctx); err != nil { // so that whoever drops the upload knows where the object is
		return err
	}
	if s.cur.Multipart == "" {
		return s.storeSmall(ctx, want)
	}
	err := s.complete(ctx, want)
	if err != nil && s.confirm(ctx, want) == nil {
		return nil // an earlier try had completed it
	}
	return err
}

// storeSmall stores what is less than a part, in one request that the server checks by the blob's own digest.
func (s *session) storeSmall(ctx context.Context, want identity.Digest) error {
	if err := s.st.change(ctx); err != nil {
		return err
	}
	for tries := 0; ; tries++ {
		u, err := s.st.putBytes(ctx, s.copyKey(), s.buf, want, minio.PutObjectOptions{ServerSideEncryption: s.st.sse})
		switch {
		case err != nil && !isBadDigest(err):
			return err
		case err == nil && u.ChecksumSHA256 == "":
			return s.readBack(ctx, want)
		case err == nil && u.ChecksumSHA256 == base64.StdEncoding.EncodeToString(want[:]):
			return nil
		case tries+1 >= attempts && err == nil:
			return fmt.Errorf("%s: %w", s.copyKey(), errLie)
		case tries+1 >= attempts:
			return err
		}
		if err := pause(ctx, tries); err != nil {
			return err
		}
	}
}

// complete sends the last part and makes an object of all of them.
func (s *session) complete(ctx context.Context, want identity.Digest) error {
	parts := s.cur.Parts
	if len(s.buf) > 0 {
		p, err := s.sendPart(ctx, s.buf, s.crc)
		if err != nil {
			return err
		}
		parts = append(parts[:len(parts):len(parts)], p)
	}
	list := make([]minio.CompletePart, len(parts))
	for i, p := range parts {
		list[i] = minio.CompletePart{PartNumber: i + 1, ETag: p.ETag, ChecksumCRC32C: encodeCRC(p.CRC)}
	}
	u, err := s.st.CompleteMultipartUpload(ctx, s.st.Bucket, s.copyKey(), s.cur.Multipart, list, minio.PutObjectOptions{})
	if err != nil {
		return s.st.explain(putObject, s.copyKey(), err)
	}
	if u.ChecksumCRC32C == s.checksum() {
		return nil
	}
	return s.confirm(ctx, want)
}

// checksum is what a server says of an object in parts: the CRC-32C of the parts' CRC-32C, and their number.
func (s *session) checksum() string {
	n, sums := len(s.cur.Parts), make([]byte, 0, 4*len(s.cur.Parts)+4)
	for _, p := range s.cur.Parts {
		sums = binary.BigEndian.AppendUint32(sums, p.CRC)
	}
	if len(s.buf) > 0 {
		sums = binary.BigEndian.AppendUint32(sums, s.crc)
		n++
	}
	return encodeCRC(crc32.Checksum(sums, castagnoli)) + "-" + strconv.Itoa(n)
}

// confirm checks that the object is there and is what was sent, by the checksum that the server keeps or by reading it.
func (s *session) confirm(ctx context.Context, want identity.Digest) error {
	i, err := s.st.head(ctx, s.copyKey())
	if errors.Is(err, errAbsent) {
		return errParts
	} else if err != nil {
		return err
	}
	switch {
	case i.Size != s.size.Load():
		return fmt.Errorf("%w: %s has %d bytes, sent were %d", errParts, s.copyKey(), i.Size, s.size.Load())
	case i.ChecksumCRC32C == s.checksum():
		return nil
	case i.ChecksumCRC32C != "":
		return fmt.Errorf("%w: it keeps CRC-32C %s, sent was %s", errParts, i.ChecksumCRC32C, s.checksum())
	}
	return s.readBack(ctx, want)
}

// readBack hashes the stored object: for servers that do not confirm what they stored.
func (s *session) readBack(ctx context.Context, want identity.Digest) error {
	r, err := s.st.openRange(ctx, blobstore.Info{Digest: want, Size: s.size.Load(), Generation: s.copyName()}, 0, -1)
	if err != nil {
		return err
	}
	defer r.Close()
	h := identity.NewHash()
	if _, err := io.Copy(h, r); err != nil {
		return err
	}
	if got := identity.DigestOf(h); got != want {
		return fmt.Errorf("%w: %s reads as %s", errParts, s.copyKey(), got)
	}
	return nil
}
