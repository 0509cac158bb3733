package blobstore

import (
	"bytes"
	"testing"
)

// What was written before refs had findings is read as it was.
func TestDecodeRefsWithoutFinding(t *testing.T) {
	old := append([]byte{1, 0, 1, 'r', 1, 'n', 7}, make([]byte, 32)...)
	old = append(old, 1, 'm', 2, '{', '}')
	refs, err := DecodeRefs(old)
	if err != nil || len(refs) != 1 || refs[0].Seq != 7 || string(refs[0].Manifest) != "{}" || refs[0].Finding != "" {
		t.Fatalf("%+v, %v", refs, err)
	}
	if again, err := EncodeRefs(refs); err != nil || !bytes.Equal(again, old) {
		t.Errorf("%x, %v", again, err)
	}
	refs[0].Finding = "x"
	kept, err := EncodeRefs(refs)
	if err != nil {
		t.Fatal(err)
	}
	if back, err := DecodeRefs(kept); err != nil || back[0].Finding != "x" {
		t.Errorf("%+v, %v", back, err)
	}
	kept[1] |= 1 << 3
	if _, err := DecodeRefs(kept); err == nil {
		t.Error("a ref with a flag that nobody knows was read")
	}
}

func FuzzDecodeRefs(f *testing.F) {
	b, err := EncodeRefs([]Ref{{Repo: "r", Name: "n", Seq: 1, Manifest: []byte("{}"), Finding: "f"}, {Deleted: true}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte{0})
	f.Fuzz(func(t *testing.T, b []byte) {
		refs, err := DecodeRefs(b)
		if err != nil {
			return
		}
		again, err := EncodeRefs(refs)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := DecodeRefs(again); err != nil {
			t.Fatal(err)
		}
	})
}
