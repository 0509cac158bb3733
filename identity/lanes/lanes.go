// Package lanes hashes several streams at once on one core, and lets the SHA-256 of one blob be checked in parts.
//
// # Streams at once
//
// A stream's SHA-256 leaves most of a core idle: each step waits for the one before. Write takes pieces of several
// streams and hashes them together in less processor time than one after the other, with the same hashes; a Pool does
// so for streams that are in the hands of many goroutines. A lone stream is hashed by its own Write.
//
// # Parts of a blob
//
// SHA-256 is a chain of states: each 64 bytes turn one state into the next. Who knows the states at the edges of a
// blob's segments, its midstates, can check each segment for itself, in any order and on any processor: it must lead
// from the state at its start to that at its end, the first one from SHA-256's fixed start, and the last one to the
// blob's digest. The checks of all segments together are the very computation of the digest. So midstates need no trust
// where all segments are checked: wrong ones can only refuse. A single segment that passed says no more than that it
// belongs to these midstates, and that one is named as damaged is only worth what the midstates are worth.
//
// A Recorder notes the midstates of a stream while it is hashed, which costs nothing that can be measured and 32 bytes
// for each segment of 16 MiB. States are the midstates of one blob, with the checks.
//
// # The form kiln.sha256-midstates.v1
//
// Integers are big-endian, as in SHA-256.
//
//	bytes  content
//	24     "kiln.sha256-midstates.v1"
//	8      size of a segment in bytes: 16777216
//	8      size of the blob in bytes
//	32     SHA-256 of the blob
//	32 n   the state (eight words) at each edge strictly inside the blob, in order: n = (size-1)/segment, rounded down,
//	       and 0 for an empty blob
//	32     SHA-256 of everything above
//
// It is binary because nearly all of it is hashes: text would double it and need one spelling enforced. Every set of
// midstates has exactly one form. The last field tells a form that decayed from a blob that did.
//
// This package is pure, as identity is. Nothing in it starts a goroutine.
package lanes

import (
	"encoding/binary"
	"fmt"

	"github.com/kiln-registry/kiln-registry/identity"
)

// SegmentSize is the number of bytes of a segment of kiln.sha256-midstates.v1.
const SegmentSize = 16 << 20

// MaxEdges is how many midstates a blob can have: those of 16 TiB.
const MaxEdges = 1 << 20

// State is a chaining state of SHA-256: its eight words, big-endian.
type State [32]byte

// What crypto/sha256 and sha256-simd both save of a hash: the magic, the state, the bytes of a block that is not yet
// full, and how many bytes came in all.
const (
	savedMagic = "sha\x03"
	savedSize  = len(savedMagic) + len(State{}) + 64 + 8
)

// stateOf returns the chaining state of h, which has been given a multiple of 64 bytes.
func stateOf(h identity.Hash) State {
	b := save(h)
	if n := savedLength(b); n%64 != 0 {
		panic(fmt.Sprintf("lanes: no chaining state after %d bytes", n))
	}
	return State(b[len(savedMagic):])
}

// save returns what h saves of itself.
func save(h identity.Hash) []byte {
	b, err := h.MarshalBinary()
	if err != nil || len(b) != savedSize || string(b[:len(savedMagic)]) != savedMagic {
		// Only another implementation of SHA-256 can come to this, and then nothing here holds.
		panic(fmt.Sprintf("lanes: a saved SHA-256 of %d bytes is not of the known layout: %v", len(b), err))
	}
	return b
}

// savedLength returns how many bytes a hash was given that was saved as b.
func savedLength(b []byte) uint64 { return binary.BigEndian.Uint64(b[len(b)-8:]) }

// setState makes h a hash that has the state s after n bytes, a multiple of 64.
func setState(h identity.Hash, s State, n int64) error {
	b := make([]byte, savedSize)
	copy(b, savedMagic)
	copy(b[len(savedMagic):], s[:])
	binary.BigEndian.PutUint64(b[savedSize-8:], uint64(n))
	return h.UnmarshalBinary(b)
}

// Edges returns how many edges of segments lie strictly inside a blob of so many bytes.
func Edges(size, segment int64) int64 {
	if size <= 0 {
		return 0
	}
	return (size - 1) / segment
}

// checkSegment refuses what can't be the size of a segment.
func checkSegment(segment int64) error {
	if segment <= 0 || segment%64 != 0 {
		return fmt.Errorf("a segment of %d bytes: want a positive multiple of 64", segment)
	}
	return nil
}
