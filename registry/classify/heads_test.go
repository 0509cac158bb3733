package classify

import (
	"bytes"
	"io"
	"testing"
	"testing/iotest"

	"github.com/kiln-registry/kiln-registry/identity"
)

// A blob that was seen to begin as a safetensors file is not read again, however its bytes came; of every other one
// nothing is known.
func TestHeads(t *testing.T) {
	whole := tensors("1")
	for name, c := range map[string]struct {
		text  []byte
		known bool
	}{
		"shard":   {whole, true},
		"zeros":   {make([]byte, 40), false},
		"cut":     {whole[:8], false},
		"too big": {append([]byte{255, 255, 0, 0, 0, 0, 0, 0}, "{        "...), false},
		"empty":   {nil, false},
	} {
		var heads Heads
		var head Head
		if _, err := io.ReadAll(head.Watch(iotest.OneByteReader(bytes.NewReader(c.text)))); err != nil {
			t.Fatal(err)
		}
		d := identity.Sum(c.text)
		heads.Note(d, int64(len(c.text)), &head)
		heads.Note(identity.Sum([]byte("another")), 100, nil)
		if heads.Safetensors(d) != c.known || heads.Safetensors(identity.Sum([]byte("another"))) {
			t.Errorf("%s: %v", name, heads.Safetensors(d))
		}
		ok, err := looksRight(t.Context(), heads.Over(blobs{}), file{Descriptor: Descriptor{Digest: d, Size: 95}})
		if ok != c.known || (err == nil) != c.known {
			t.Errorf("%s: %v, %v", name, ok, err)
		}
	}
}

// The latest blobs are known, and not more than twice as many as are promised.
func TestHeadsAreFew(t *testing.T) {
	var heads Heads
	var head Head
	whole := tensors("1")
	if _, err := io.ReadAll(head.Watch(bytes.NewReader(whole))); err != nil {
		t.Fatal(err)
	}
	of := func(i int) identity.Digest { return identity.Digest{byte(i >> 16), byte(i >> 8), byte(i), 1} }
	const n = 3*mostHeads + 1
	for i := range n {
		heads.Note(of(i), int64(len(whole)), &head)
	}
	if heads.Safetensors(of(0)) || !heads.Safetensors(of(n-1)) || !heads.Safetensors(of(n-mostHeads)) {
		t.Error("the wrong ones are known")
	}
	if held := len(heads.young) + len(heads.old); held > 2*mostHeads {
		t.Errorf("%d are held", held)
	}
}
