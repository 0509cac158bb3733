package identity

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/internal/testenv"
)

type vector struct {
	ID       string
	Input    string
	Base64   string `json:"input_base64"`
	SHA256   string `json:"input_sha256"`
	Generate *struct{ Count int }
	Expect   struct {
		Verdict, Stage, Rule string
		Aggregate            string `json:"aggregate_sha256"`
		Total                string `json:"total_size_bytes"`
		Count                int    `json:"shard_count"`
	}
}

type vectors struct {
	Empty       string `json:"aggregate_of_empty_set"`
	Cases       []vector
	Equivalence []struct {
		A, B       string
		Equivalent bool `json:"content_equivalent"`
	}
}

func loadVectors(t testing.TB) (v vectors) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(testenv.Cases(t), "identity-vectors.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &v); err != nil {
		t.Fatal(err)
	}
	if len(v.Cases) < 90 || len(v.Equivalence) == 0 {
		t.Fatalf("only %d vectors and %d pairs", len(v.Cases), len(v.Equivalence))
	}
	return v
}

// bytes returns the text of the document, built by the vector's rule where it is not given.
func (v vector) bytes(t testing.TB) []byte {
	t.Helper()
	data := []byte(v.Input)
	switch {
	case v.Base64 != "":
		var err error
		if data, err = base64.StdEncoding.DecodeString(v.Base64); err != nil {
			t.Fatal(err)
		}
	case v.Generate != nil:
		data = generate(v.Generate.Count)
		if v.SHA256 == "" {
			t.Errorf("%s: no input_sha256 to check against", v.ID)
		}
	}
	if sum := fmt.Sprintf("sha256:%x", sha256.Sum256(data)); v.SHA256 != "" &&
		strings.TrimPrefix(v.SHA256, "sha256:") != strings.TrimPrefix(sum, "sha256:") {
		t.Errorf("%s: built a text with %s, want %s", v.ID, sum, v.SHA256)
	}
	return data
}

// generate writes the manifest of count shards by hand: shard i has i bytes and the digest of i as 8 bytes.
func generate(count int) []byte {
	var list, records bytes.Buffer
	type record struct {
		digest [32]byte
		size   uint64
	}
	var recs []record
	total := 0
	for i := 1; i <= count; i++ {
		d := sha256.Sum256(binary.LittleEndian.AppendUint64(nil, uint64(i)))
		recs = append(recs, record{d, uint64(i)})
		total += i
		if i > 1 {
			list.WriteByte(',')
		}
		fmt.Fprintf(&list, `{"filename":"model-%05d-of-%05d.safetensors","size_bytes":%d,"sha256":"sha256:%x"}`,
			i, count, i, d)
	}
	for range recs { // selection sort: independent of the code under test
		least := 0
		for j := range recs {
			if bytes.Compare(recs[j].digest[:], recs[least].digest[:]) < 0 {
				least = j
			}
		}
		records.Write(binary.LittleEndian.AppendUint64(nil, recs[least].size))
		records.Write(recs[least].digest[:])
		recs = append(recs[:least], recs[least+1:]...)
	}
	head := binary.LittleEndian.AppendUint64([]byte("kiln.base-model-content.v1\x00"), uint64(count))
	return fmt.Appendf(nil, `{"schema_version":1,"manifest_type":"kiln.base-weight-shards.v1",`+
		`"aggregate_algorithm":"kiln.base-model-content.v1","aggregate_sha256":"sha256:%x",`+
		`"total_size_bytes":%d,"shards":[%s]}`,
		sha256.Sum256(append(head, records.Bytes()...)), total, list.Bytes())
}

func TestVectors(t *testing.T) {
	all := loadVectors(t)
	valid := map[string]Manifest{}
	for _, v := range all.Cases {
		m, err := Parse(v.bytes(t))
		if v.Expect.Verdict == "valid" {
			if err != nil {
				t.Errorf("%s: %v", v.ID, err)
				continue
			}
			valid[v.ID] = m
			if m.Aggregate.String() != v.Expect.Aggregate || fmt.Sprint(m.TotalSize) != v.Expect.Total ||
				len(m.Shards) != v.Expect.Count {
				t.Errorf("%s: got %v, %d bytes, %d shards", v.ID, m.Aggregate, m.TotalSize, len(m.Shards))
			}
			checkFixedPoint(t, m)
			continue
		}
		var e *Error
		if !errors.As(err, &e) {
			t.Errorf("%s: got %v, want %s %s", v.ID, err, v.Expect.Stage, v.Expect.Rule)
		} else if string(e.Stage) != v.Expect.Stage || e.Rule != v.Expect.Rule {
			t.Errorf("%s: got %s %s (%v), want %s %s", v.ID, e.Stage, e.Rule, err, v.Expect.Stage, v.Expect.Rule)
		} else if !strings.HasSuffix(err.Error(), "("+e.Rule+")") || strings.ContainsAny(err.Error(), "\n\x00") {
			t.Errorf("%s: text %q", v.ID, err)
		}
	}
	for _, p := range all.Equivalence {
		a, okA := valid[p.A]
		b, okB := valid[p.B]
		if !okA || !okB {
			t.Errorf("pair %s, %s: not both valid", p.A, p.B)
		}
		if got := a.SameContent(b); got != p.Equivalent {
			t.Errorf("%s, %s: SameContent = %v", p.A, p.B, got)
		}
		if got := Compare(a, b); got.Same != p.Equivalent {
			t.Errorf("%s, %s: Compare = %+v", p.A, p.B, got)
		}
	}
	if got := aggregate(nil).String(); got != all.Empty {
		t.Errorf("aggregate of the empty set = %s, want %s", got, all.Empty)
	}
}

// checkFixedPoint checks parse → marshal → parse, and that New builds the same manifest from its shards.
func checkFixedPoint(t *testing.T, m Manifest) {
	t.Helper()
	text, err := m.MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	again, err := Parse(text)
	if err != nil {
		t.Fatalf("canonical text refused: %v\n%.300s", err, text)
	}
	text2, err := json.Marshal(again)
	if err != nil || !bytes.Equal(text, text2) {
		t.Fatalf("canonical text changed: %v\n%.300s\n%.300s", err, text, text2)
	}
	reversed := make([]Shard, len(m.Shards))
	for i, s := range m.Shards {
		reversed[len(reversed)-1-i] = s
	}
	built, err := New(reversed)
	if err != nil || built.Aggregate != m.Aggregate || built.TotalSize != m.TotalSize || !Compare(built, m).Same {
		t.Fatalf("New: %v, %v", built.Summary(), err)
	}
}

// TestFieldManifests runs the field cases of manifests. want maps the code of a case to our rule.
func TestFieldManifests(t *testing.T) {
	want := map[string]string{
		"unknown_field": "no-unknown-fields", "unsorted": RuleSortedUnique, "duplicate_filename": RuleSortedUnique,
		"zero_size": RuleNonzeroSize, "total_mismatch": RuleTotal, "aggregate_mismatch": RuleAggregate,
		"no_shards": RuleShardCount, "too_many_shards": RuleShardCount, "trailing_data": "no-trailing-data",
		"bad_version": RuleSchemaVersion, "bad_type": "type", "not_portable_name": RuleFilename,
		"bad_digest": RuleDigestForm,
	}
	says := map[string]string{
		"MF-04": "ascending byte order", "MF-05": "the same filename", "MF-08": "add up to", "MF-12": "4097 shards",
		"MF-17": "schema_version is 2, only 1 is read",
		"MF-19": `"../model-00001-of-00002.safetensors"`, "MF-20": "256 bytes",
	}
	dir := testenv.FieldCases(t)
	ran := 0
	for id, c := range testenv.Expected(t, dir) {
		if c.Kind != "manifest" {
			continue
		}
		ran++
		data, err := os.ReadFile(filepath.Join(dir, id, "manifest.json"))
		if err != nil {
			t.Fatal(err)
		}
		m, err := Parse(data)
		if c.Verdict == "accept" {
			if err != nil {
				t.Errorf("%s: %v", id, err)
			}
			checkFixedPoint(t, m)
			continue
		}
		var e *Error
		if !errors.As(err, &e) || e.Rule != want[c.Code] || !strings.Contains(err.Error(), says[id]) {
			t.Errorf("%s: got %v, want %s (%s) saying %q", id, err, want[c.Code], c.Code, says[id])
		}
	}
	if ran < 17 {
		t.Errorf("only %d manifest cases", ran)
	}
}

func shard(name string, size uint64, fill byte) Shard {
	return Shard{name, size, Digest(bytes.Repeat([]byte{fill}, 32))}
}

func TestErrorsNameShardAndValues(t *testing.T) {
	good := []Shard{shard("a.safetensors", 11, 1), shard("b.safetensors", 22, 2)}
	m, err := New(good)
	if err != nil {
		t.Fatal(err)
	}
	edit := func(f func(*Manifest)) Manifest {
		c := m
		c.Shards = append([]Shard(nil), m.Shards...)
		f(&c)
		return c
	}
	for _, c := range []struct {
		m     Manifest
		rule  string
		shard int
		says  string
	}{
		{Manifest{}, RuleShardCount, -1, "0 shards"},
		{edit(func(m *Manifest) { m.Shards[1].Filename = "b\n.safetensors" }), RuleFilename, 1, `"b\n.safetensors"`},
		{edit(func(m *Manifest) { m.Shards[1].Filename = "" }), RuleFilename, 1, `filename ""`},
		{edit(func(m *Manifest) { m.Shards[1].Filename = "\xff.safetensors" }), RuleFilename, 1, `"\xff.safetensors"`},
		{edit(func(m *Manifest) { m.Shards[1].Filename = "é.safetensors" }), RuleFilename, 1, `"\u00e9.safetensors"`},
		{edit(func(m *Manifest) { m.Shards[0].Size = 0 }), RuleNonzeroSize, 0, "shards[0] a.safetensors"},
		{edit(func(m *Manifest) { m.Shards[1].Filename = "a.safetensors" }), RuleSortedUnique, 1, "the same"},
		{edit(func(m *Manifest) { m.Shards[0].Filename = "c.safetensors" }), RuleSortedUnique, 1, "c.safetensors"},
		{edit(func(m *Manifest) { m.Shards[0].Size = 1<<64 - 22 }), RuleTotalOverflow, -1, "2^64-1"},
		{edit(func(m *Manifest) { m.TotalSize = 34 }), RuleTotal, -1, "total_size_bytes is 34, the shards add up to 33"},
		{edit(func(m *Manifest) { m.Aggregate[0] ^= 1 }), RuleAggregate, -1, m.Aggregate.String()},
	} {
		err := c.m.Validate()
		var e *Error
		if !errors.As(err, &e) || e.Rule != c.rule || e.Shard != c.shard || !strings.Contains(err.Error(), c.says) {
			t.Errorf("got %v, want %s at %d saying %q", err, c.rule, c.shard, c.says)
		}
		if _, err := c.m.MarshalJSON(); err == nil {
			t.Errorf("%s: marshalled", c.rule)
		}
	}
	_, err = Parse([]byte(`{"shards":[{"filename":"a","size_bytes":1,"sha256":""},{"filename":"a","size_bytes":1.5}]}`))
	var e *Error
	if !errors.As(err, &e) || e.Shard != 1 || !strings.Contains(err.Error(), "shards[1].size_bytes") {
		t.Errorf("got %v", err)
	}
	_, err = Parse([]byte(`{"shards":[{"filename":"a","size_bytes":1,"sha256":""}],"shards":[]}`))
	if !errors.As(err, &e) || e.Shard != -1 {
		t.Errorf("a fault after the shards: %v at shard %d", err, e.Shard)
	}
	if _, err := New([]Shard{shard("a.safetensors", 1<<63, 1), shard("b.safetensors", 1<<63, 1)}); !errors.As(err, &e) ||
		e.Rule != RuleTotalOverflow {
		t.Errorf("New with sizes over 2^64: %v", err)
	}
}

func TestOrderOfRules(t *testing.T) {
	// One text with every fault; each repair brings out the next rule.
	text := `{"schema_version":2,"manifest_type":"x","aggregate_algorithm":"x","aggregate_sha256":"x",` +
		`"total_size_bytes":5,"shards":[]}`
	const dg = `"sha256:1111111111111111111111111111111111111111111111111111111111111111"`
	for _, step := range []struct{ rule, old, new string }{
		{RuleSchemaVersion, `version":2`, `version":1`},
		{RuleManifestType, `type":"x"`, `type":"kiln.base-weight-shards.v1"`},
		{RuleAggregateAlgorithm, `algorithm":"x"`, `algorithm":"kiln.base-model-content.v1"`},
		{RuleShardCount, `[]`, `[{"filename":"b.bin","size_bytes":0,"sha256":""},` +
			`{"filename":"a.bin","size_bytes":0,"sha256":""}]`},
		{RuleFilename, `b.bin`, `b.safetensors`},
		{RuleNonzeroSize, `"size_bytes":0`, `"size_bytes":18446744073709551615`},
		{RuleDigestForm, `"sha256":""`, `"sha256":` + dg},
		{RuleFilename, `a.bin`, `a.safetensors`},
		{RuleNonzeroSize, `"size_bytes":0`, `"size_bytes":18446744073709551615`},
		{RuleDigestForm, `"sha256":""`, `"sha256":` + dg},
		{RuleSortedUnique, `b.safetensors`, `B.safetensors`},
		{RuleTotalOverflow, `"size_bytes":18446744073709551615`, `"size_bytes":3`},
		{RuleTotalOverflow, `"size_bytes":18446744073709551615`, `"size_bytes":3`},
		{RuleTotal, `total_size_bytes":5`, `total_size_bytes":6`},
		{RuleDigestForm, `aggregate_sha256":"x"`, `aggregate_sha256":` + dg},
		{RuleAggregate, "", ""},
	} {
		_, err := Parse([]byte(text))
		var e *Error
		if !errors.As(err, &e) || e.Rule != step.rule {
			// 2^64-1 + 3 still overflows, so that step is there twice.
			t.Fatalf("got %v, want %s in\n%s", err, step.rule, text)
		}
		text = strings.Replace(text, step.old, step.new, 1)
	}
}

func TestParseCap(t *testing.T) {
	doc := generate(3)
	fits := append(doc, bytes.Repeat([]byte(" "), MaxDocument-len(doc))...)
	if _, err := Parse(fits); err != nil {
		t.Errorf("%d bytes: %v", len(fits), err)
	}
	var e *Error
	if _, err := Parse(append(fits, ' ')); !errors.As(err, &e) || e.Rule != RuleInputSize || e.Stage != StageParse {
		t.Errorf("one byte over the limit: %v", err)
	}
}

func TestSummaryJSON(t *testing.T) {
	m, err := New([]Shard{shard("model.safetensors", 11, 0x42)})
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"manifest_type":"kiln.base-weight-shards.v1","aggregate_algorithm":"kiln.base-model-content.v1",` +
		`"aggregate_sha256":"sha256:c62f9f56234c61c943716ae3b8783c851fb41a2551e31f17d15f1b0c346339b5",` +
		`"shard_count":1,"total_size_bytes":11}`
	got, err := json.Marshal(m.Summary())
	if err != nil || string(got) != want {
		t.Errorf("got %s, %v", got, err)
	}
	var back Summary
	if err := json.Unmarshal(got, &back); err != nil || back != m.Summary() {
		t.Errorf("read back %+v, %v", back, err)
	}
	var inside struct{ M *Manifest }
	text := append(append([]byte(`{"M":`), generate(2)...), '}')
	if err := json.Unmarshal(text, &inside); err != nil || len(inside.M.Shards) != 2 {
		t.Errorf("inside a document: %+v, %v", inside.M, err)
	}
	if err := json.Unmarshal([]byte(`{"M":{}}`), &inside); err == nil {
		t.Error("an empty object was taken as a manifest")
	}
}

func TestCompare(t *testing.T) {
	of := func(shards ...Shard) Manifest {
		m, err := New(shards)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	names := func(s []Shard) string {
		var n []string
		for _, x := range s {
			n = append(n, x.Filename)
		}
		return strings.Join(n, " ")
	}
	for _, c := range []struct {
		a, b         Manifest
		onlyA, onlyB string
	}{
		{of(shard("a.safetensors", 1, 1), shard("b.safetensors", 2, 2)),
			of(shard("y.safetensors", 2, 2), shard("z.safetensors", 1, 1)), "", ""},
		{of(shard("a.safetensors", 1, 1), shard("b.safetensors", 1, 1)), of(shard("x.safetensors", 1, 1)),
			"b.safetensors", ""},
		{of(shard("a.safetensors", 1, 1)), of(shard("a.safetensors", 2, 1)), "a.safetensors", "a.safetensors"},
		{of(shard("c.safetensors", 1, 1), shard("a.safetensors", 1, 9), shard("b.safetensors", 1, 5)),
			of(shard("b.safetensors", 1, 5), shard("d.safetensors", 1, 7)), "a.safetensors c.safetensors", "d.safetensors"},
	} {
		d := Compare(c.a, c.b)
		if names(d.OnlyA) != c.onlyA || names(d.OnlyB) != c.onlyB || d.Same != (c.onlyA == "" && c.onlyB == "") ||
			d.Same != c.a.SameContent(c.b) {
			t.Errorf("got %+v, want only A %q, only B %q", d, c.onlyA, c.onlyB)
		}
		back := Compare(c.b, c.a)
		if back.Same != d.Same || names(back.OnlyA) != names(d.OnlyB) || names(back.OnlyB) != names(d.OnlyA) {
			t.Errorf("not symmetric: %+v and %+v", d, back)
		}
	}
}

func TestDigestText(t *testing.T) {
	d := Sum([]byte("abc"))
	const abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
	if d.Hex() != abc || d.String() != "sha256:"+abc || Aggregate(d).Hex() != abc {
		t.Errorf("digest of abc = %v", d)
	}
	for _, bad := range []string{
		"", abc, "sha256:", "sha256:" + abc[1:], "sha256:" + abc + "0", "SHA256:" + abc, "sha256-" + abc,
		" sha256:" + abc[1:],
		"sha256:" + strings.ToUpper(abc), "sha256:" + abc[:63] + "g", "sha512:" + abc,
	} {
		if _, err := ParseDigest(bad); err == nil {
			t.Errorf("ParseDigest took %q", bad)
		}
		if _, err := ParseAggregate(bad); err == nil {
			t.Errorf("ParseAggregate took %q", bad)
		}
	}
	for _, d := range []Digest{{}, d} {
		text, err := d.MarshalText()
		var back Digest
		if err != nil || back.UnmarshalText(text) != nil || back != d || d.IsZero() != (len(text) == 0) {
			t.Errorf("%v came back as %v from %q", d, back, text)
		}
	}
	var raw [32]byte
	if _, err := hex.Decode(raw[:], []byte(abc)); err != nil || d.Compare(raw) != 0 || d.Compare(Digest{}) != 1 {
		t.Error("Compare")
	}
}

func FuzzParse(f *testing.F) {
	for _, v := range loadVectors(f).Cases {
		if v.Generate == nil {
			f.Add(v.bytes(f))
		}
	}
	f.Add(generate(3))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := Parse(data)
		checkSpaced(t, data, m, err)
		if err != nil {
			var e *Error
			if !errors.As(err, &e) || e.Rule == "" || e.Msg == "" || strings.ContainsAny(err.Error(), "\n\r") {
				t.Fatalf("bad error %#v", err)
			}
			if len(m.Shards) > 0 {
				t.Fatal("a refused text gave shards")
			}
			return
		}
		if err := m.Validate(); err != nil {
			t.Fatalf("parsed, but %v", err)
		}
		checkFixedPoint(t, m)
	})
}

func BenchmarkParse4096(b *testing.B) {
	doc := generate(MaxShards)
	b.SetBytes(int64(len(doc)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Parse(doc); err != nil {
			b.Fatal(err)
		}
	}
}
