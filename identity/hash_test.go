package identity

import (
	"bytes"
	"crypto/sha256"
	"math/rand/v2"
	"testing"
)

// The digest of the standard library satisfies Hash: sha256-simd returns it on processors without SHA instructions.
var _ = sha256.New().(Hash)

// TestSavedState checks that NewHash and crypto/sha256 save the same bytes and continue each other's state.
func TestSavedState(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	data := make([]byte, 4096)
	for i := range data {
		data[i] = byte(rnd.Uint32())
	}
	lengths := []int{0, 1, 55, 56, 57, 63, 64, 65, 119, 120, 127, 128, 129, 1000, 4095, 4096}
	for range 200 {
		lengths = append(lengths, rnd.IntN(len(data)))
	}
	for _, n := range lengths {
		ours, std := NewHash(), sha256.New().(Hash)
		ours.Write(data[:n])
		std.Write(data[:n])
		a, errA := ours.MarshalBinary()
		b, errB := std.MarshalBinary()
		if errA != nil || errB != nil || !bytes.Equal(a, b) {
			t.Fatalf("after %d bytes the states differ: %v, %v\n%x\n%x", n, errA, errB, a, b)
		}
		whole := Digest(sha256.Sum256(data))
		for name, h := range map[string]Hash{"ours from std": NewHash(), "std from ours": sha256.New().(Hash)} {
			state := b
			if name == "std from ours" {
				state = a
			}
			h.Write([]byte("of no account"))
			if err := h.UnmarshalBinary(state); err != nil {
				t.Fatalf("%s at %d: %v", name, n, err)
			}
			// In two pieces, so that a buffered tail meets more than one Write.
			cut := n + (len(data)-n)/3
			h.Write(data[n:cut])
			h.Write(data[cut:])
			if got := DigestOf(h); got != whole {
				t.Fatalf("%s at %d: got %v, want %v", name, n, got, whole)
			}
		}
		if DigestOf(ours) != Digest(sha256.Sum256(data[:n])) {
			t.Fatalf("after %d bytes the digest is wrong", n)
		}
	}
}

func TestSavedStateRefused(t *testing.T) {
	good, err := NewHash().MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range [][]byte{
		nil, good[:len(good)-1], append(bytes.Clone(good), 0), append([]byte("sha\x02"), good[4:]...),
	} {
		if err := NewHash().UnmarshalBinary(bad); err == nil {
			t.Errorf("took a state of %d bytes", len(bad))
		}
	}
}

func TestDigestOfLeavesTheHash(t *testing.T) {
	h := NewHash()
	h.Write([]byte("a"))
	first := DigestOf(h)
	h.Write([]byte("bc"))
	if DigestOf(h) != Sum([]byte("abc")) || first != Sum([]byte("a")) {
		t.Error("DigestOf changed the state")
	}
}
