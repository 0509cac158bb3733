package identity

import (
	"encoding"
	"hash"

	sha256 "github.com/minio/sha256-simd"
)

// Hash is a streaming SHA-256 whose state can be saved and restored. The saved state is the standard library's
// format, so a state saved by one is continued by the other. It is not safe for concurrent use.
type Hash interface {
	hash.Hash
	encoding.BinaryMarshaler
	encoding.BinaryUnmarshaler
}

// NewHash returns a SHA-256 at its start. It is the one place of this project that chooses the SHA-256 of a single
// stream: sha256-simd's plain digest, which is the standard library's where the processor has no SHA instructions.
func NewHash() Hash { return sha256.New().(Hash) }

// Sum returns the SHA-256 of b.
func Sum(b []byte) Digest {
	h := NewHash()
	h.Write(b)
	return DigestOf(h)
}

// DigestOf returns the SHA-256 of everything written to h so far and leaves h as it was.
func DigestOf(h Hash) (d Digest) {
	h.Sum(d[:0])
	return d
}
