package index

import (
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

func exampleRecord() Record {
	d := identity.Sum([]byte("x"))
	return Record{
		Repo: "a", Digest: d, MediaType: "m", Size: 1 << 40, ArtifactType: "t",
		Annotations: map[string]string{"b": "", "a": "1"},
		Kind:        api.KindBase, State: api.ContentDirect, Aggregate: identity.Aggregate(d), Evidence: api.EvidenceDocument,
		Bases: []identity.Aggregate{{1}, {2}}, Name: "n", Facts: []byte(`{"name":"n"}`), Links: []Link{{"adapter", d}, {"receipt", d}},
		ShardCount: 4096, TotalSize: 1<<64 - 1, Packaging: d, Subject: d, Seq: 1<<64 - 1, Created: time.Unix(0, -1).UTC(),
	}
}

// forms are the decoders of all values, each returning what it read encoded again.
var forms = map[string]func(data []byte) (v any, again []byte, err error){
	"record": func(data []byte) (any, []byte, error) {
		r, err := decodeRecord("a", identity.Sum([]byte("x")), data)
		return r, encodeRecord(r), err
	},
	"listed": func(data []byte) (any, []byte, error) {
		var l, same listed
		err := l.decode(data)
		r, b := Record{}, Binding{Evidence: api.Evidence(l.evidence), BoundBy: l.boundBy}
		if !l.binds {
			r.Kind = api.KindBase
		}
		again, failed := encodeListed(r, b, 1, nil, false)
		if err := same.decode(again); failed != nil || err != nil || same.binds != l.binds ||
			string(same.evidence) != string(l.evidence) || same.boundBy != l.boundBy {
			panic("a listing's value does not read as it was written")
		}
		return nil, data, err
	},
	"sums": func(data []byte) (any, []byte, error) {
		v, err := decodeSums(data)
		return v, encodeSums(v), err
	},
	"shards": func(data []byte) (any, []byte, error) {
		v, err := decodeShards(data)
		return v, encodeShards(v), err
	},
	"tag": func(data []byte) (any, []byte, error) {
		v, err := decodeTag(data)
		return v, v.encode(), err
	},
	"lease": func(data []byte) (any, []byte, error) {
		v, err := decodeLease(data)
		return v, v.encode(), err
	},
	"upload": func(data []byte) (any, []byte, error) {
		v, err := decodeUpload("id", data)
		return v, encodeUpload(v), err
	},
	"number": func(data []byte) (any, []byte, error) {
		v, err := decodeNumber(data)
		return v, encodeNumber(v), err
	},
}

func examples() map[string][]byte {
	d := identity.Sum([]byte("x"))
	return map[string][]byte{
		"record": encodeRecord(exampleRecord()),
		"sums":   encodeSums([]identity.Digest{d, {}}),
		"shards": encodeShards(identity.Manifest{Aggregate: identity.Aggregate(d), TotalSize: 7,
			Shards: []identity.Shard{{Filename: "a", Size: 7, Digest: d}}}),
		"tag":    tagValue{d, 9}.encode(),
		"lease":  lease{-1, time.Unix(1, 2)}.encode(),
		"upload": encodeUpload(Upload{ID: "id", Repo: "r", Caller: "c", Digest: d, Size: -1, Expires: time.Unix(1, 2)}),
		"number": encodeNumber(1<<64 - 1),
	}
}

func TestForms(t *testing.T) {
	r, err := decodeRecord("a", identity.Sum([]byte("x")), examples()["record"])
	if err != nil || !reflect.DeepEqual(r, exampleRecord()) {
		t.Errorf("record: %+v, %v", r, err)
	}
	for name, data := range examples() {
		if _, again, err := forms[name](data); err != nil || string(again) != string(data) {
			t.Errorf("%s: %x, %v; want %x", name, again, err, data)
		}
		for n := range data {
			if name == "sums" && n%32 == 0 {
				continue // a shorter list
			}
			if _, _, err := forms[name](data[:n]); !errors.Is(err, ErrDamaged) {
				t.Errorf("%s cut to %d bytes: %v", name, n, err)
			}
		}
		if _, _, err := forms[name](append(data, 0)); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s with a byte more: %v", name, err)
		}
	}
}

func TestSeal(t *testing.T) {
	k := tagKey("a", "b")
	v := seal(k, []byte("body"))
	if b, err := unseal(k, v); err != nil || string(b) != "body" {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := unseal(tagKey("a", "c"), v); !errors.Is(err, ErrDamaged) {
		t.Errorf("the value of another key: %v", err)
	}
	for i := range v {
		v[i] ^= 0x10
		if _, err := unseal(k, v); !errors.Is(err, ErrDamaged) {
			t.Errorf("byte %d changed: %v", i, err)
		}
		v[i] ^= 0x10
	}
}

// FuzzForms: a decoder refuses or reads what reads the same when it is written again.
func FuzzForms(f *testing.F) {
	for _, data := range examples() {
		f.Add(data)
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		for name, form := range forms {
			v, again, err := form(data)
			if err != nil {
				continue
			}
			w, twice, err := form(again)
			if err != nil || !reflect.DeepEqual(v, w) || string(again) != string(twice) {
				t.Errorf("%s: %+v, written and read: %+v, %v", name, v, w, err)
			}
		}
		if _, err := unseal(key("k"), data); err != nil && !errors.Is(err, ErrDamaged) {
			t.Error(err)
		}
	})
}

// FuzzCursor: a cursor is refused or places the reader inside the query.
func FuzzCursor(f *testing.F) {
	r := exampleRecord()
	queries := []Query{
		{Aggregate: r.Aggregate}, {Aggregate: r.Aggregate, Kind: r.Kind},
		{Aggregate: r.Aggregate, Kind: r.Kind, Repo: r.Repo},
		{Aggregate: r.Aggregate, Name: r.Name}, {Unbound: true}, {Target: r.Links[0].Target},
		{Repo: r.Repo}, {Repo: r.Repo, Subject: r.Subject}, {Repo: r.Repo, Subject: r.Subject, ArtifactType: r.ArtifactType},
	}
	for _, q := range queries {
		f.Add(Cursor(q, r))
	}
	f.Add("")
	f.Add("YQ")
	f.Fuzz(func(t *testing.T, cursor string) {
		for _, q := range queries {
			q.After = cursor
			k, err := q.start()
			if err != nil {
				if !errors.Is(err, ErrCursor) {
					t.Error(err)
				}
				continue
			}
			prefix, _ := q.prefix()
			if string(k[:len(prefix)]) != string(prefix) || len(k) > maxKey+1 {
				t.Errorf("cursor %q leads to %x", cursor, k)
			}
		}
	})
}

func TestAfter(t *testing.T) {
	for prefix, want := range map[string]string{"a": "b", "a\xff": "b", "a\x00": "a\x01", "\xff": "", "": ""} {
		if got := after([]byte(prefix)); string(got) != want || (got == nil) != (want == "") {
			t.Errorf("after %q comes %q, want %q", prefix, got, want)
		}
	}
}
