// Package identity names base-model weights by their bytes: the SHA-256 of one shard file, and the aggregate of a
// set of shards (kiln.base-model-content.v1), which does not depend on file names, paths or order.
//
// The package is pure: it reads no file, opens no connection and asks for no time. Values are safe for concurrent use.
package identity

import (
	"bytes"
	"encoding/hex"
	"fmt"
)

// prefix starts the text form of every digest of this package.
const prefix = "sha256:"

// textLen is the length of the text form, in bytes.
const textLen = len(prefix) + 64

// Digest is the SHA-256 of one blob. Its text form is "sha256:" and 64 lowercase hex digits. The zero Digest means
// "not known" wherever a digest is optional.
type Digest [32]byte

// Aggregate is the identity of a base model: the hash of its shard multiset under kiln.base-model-content.v1. It has
// its own type so that it can't be passed where a blob is meant. The zero Aggregate means "none".
type Aggregate [32]byte

// ParseDigest reads the text form "sha256:" + 64 lowercase hex digits and refuses every other spelling.
func ParseDigest(s string) (Digest, error) {
	b, err := parse(s)
	return Digest(b), err
}

// ParseAggregate reads the text form "sha256:" + 64 lowercase hex digits and refuses every other spelling.
func ParseAggregate(s string) (Aggregate, error) {
	b, err := parse(s)
	return Aggregate(b), err
}

// DigestOfText is ParseDigest for a text that is not a string yet.
func DigestOfText(b []byte) (Digest, error) {
	d, err := parse(b)
	return Digest(d), err
}

func parse[text string | []byte](s text) (b [32]byte, err error) {
	if len(s) != textLen || string(s[:len(prefix)]) != prefix {
		return b, fmt.Errorf("digest %.80q: want %q and 64 lowercase hex digits", s, prefix)
	}
	for i := range b {
		high, low := nibbles[s[len(prefix)+2*i]], nibbles[s[len(prefix)+2*i+1]]
		if high|low > 15 {
			return [32]byte{}, notHex(string(s))
		}
		b[i] = high<<4 | low
	}
	return b, nil
}

// nibbles are the values of the lowercase hex digits; 255 for what is none.
var nibbles = func() (of [256]byte) {
	for i := range of {
		of[i] = 255
	}
	for i, c := range []byte("0123456789abcdef") {
		of[c] = byte(i)
	}
	return of
}()

// notHex says which byte of a digest's text is the first that is no hex digit.
func notHex(s string) error {
	for _, c := range []byte(s[len(prefix):]) {
		if nibbles[c] > 15 {
			return fmt.Errorf("digest %q: %q is no lowercase hex digit", s, c)
		}
	}
	return nil
}

// String returns the text form.
func (d Digest) String() string { return prefix + hex.EncodeToString(d[:]) }

// Hex returns the 64 hex digits without the prefix.
func (d Digest) Hex() string { return hex.EncodeToString(d[:]) }

// IsZero says whether d is the zero Digest.
func (d Digest) IsZero() bool { return d == Digest{} }

// Compare orders digests by their bytes, unsigned.
func (d Digest) Compare(o Digest) int { return bytes.Compare(d[:], o[:]) }

// MarshalText gives the text form; the zero Digest gives an empty text.
func (d Digest) MarshalText() ([]byte, error) {
	if d.IsZero() {
		return nil, nil
	}
	return []byte(d.String()), nil
}

// UnmarshalText reads the text form; an empty text gives the zero Digest.
func (d *Digest) UnmarshalText(b []byte) (err error) {
	*d = Digest{}
	if len(b) > 0 {
		*d, err = ParseDigest(string(b))
	}
	return err
}

// String returns the text form.
func (a Aggregate) String() string { return prefix + hex.EncodeToString(a[:]) }

// Hex returns the 64 hex digits without the prefix.
func (a Aggregate) Hex() string { return hex.EncodeToString(a[:]) }

// IsZero says whether a is the zero Aggregate.
func (a Aggregate) IsZero() bool { return a == Aggregate{} }

// MarshalText gives the text form; the zero Aggregate gives an empty text.
func (a Aggregate) MarshalText() ([]byte, error) { return Digest(a).MarshalText() }

// UnmarshalText reads the text form; an empty text gives the zero Aggregate.
func (a *Aggregate) UnmarshalText(b []byte) error { return (*Digest)(a).UnmarshalText(b) }
