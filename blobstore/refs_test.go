package blobstore

import "testing"

func FuzzDecodeRefs(f *testing.F) {
	b, err := EncodeRefs([]Ref{{Repo: "r", Name: "n", Seq: 1, Manifest: []byte("{}")}, {Deleted: true}})
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
