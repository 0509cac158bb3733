package strictjson

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"strings"
	"testing"
)

func nested(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }

// many is an object of 30 members, the closing brace left out.
var many = func() string {
	s := `{"k0":0`
	for i := 1; i < 30; i++ {
		s += fmt.Sprintf(`,"k%d":%d`, i, i)
	}
	return s
}()

var documents = []struct {
	in, rule string // no rule: taken
	offset   int
	path     string
}{
	{in: `{}`}, {in: " [ ] \r\n\t"}, {in: `{"a":1,"A":2}`}, {in: `"\ud83d\ude00"`}, {in: `"\u0000"`},
	{in: nested(127)}, {in: many + "}"}, {in: `{"a":{"b":1},"b":[{"b":1},{"b":2}]}`}, {in: `-0`}, {in: `1e9`},
	{"", RuleSyntax, 0, ""},
	{" ", RuleSyntax, 1, ""},
	{"\ufeff{}", RuleSyntax, 0, ""},
	{`{"a":1,}`, RuleSyntax, 7, ""},
	{`[1,]`, RuleSyntax, 3, ""},
	{`[,1]`, RuleSyntax, 1, "[0]"},
	{`[1 2]`, RuleSyntax, 3, ""},
	{`{"a" 1}`, RuleSyntax, 5, ""},
	{`{a:1}`, RuleSyntax, 1, ""},
	{`{'a':1}`, RuleSyntax, 1, ""},
	{`{"a":1`, RuleSyntax, 6, ""},
	{`{"a":`, RuleSyntax, 5, "a"},
	{`{"a":[1,{"b c":nul}]}`, RuleSyntax, 15, `a[1]."b c"`},
	{`"abc`, RuleSyntax, 4, ""},
	{"\"a\nb\"", RuleSyntax, 2, ""},
	{"\"\\ta\nb\"", RuleSyntax, 4, ""},
	{`"\x"`, RuleSyntax, 2, ""},
	{`"\u12g4"`, RuleSyntax, 5, ""},
	{`"\u12`, RuleSyntax, 5, ""},
	{`"\`, RuleSyntax, 2, ""},
	{`011`, RuleSyntax, 0, ""},
	{`-`, RuleSyntax, 1, ""},
	{`+1`, RuleSyntax, 0, ""},
	{`1.`, RuleSyntax, 2, ""},
	{`.5`, RuleSyntax, 0, ""},
	{`1e`, RuleSyntax, 2, ""},
	{`1e+`, RuleSyntax, 3, ""},
	{`[NaN]`, RuleSyntax, 1, "[0]"},
	{`tru`, RuleSyntax, 0, ""},
	{`{}{}`, RuleTrailing, 2, ""},
	{`{} x`, RuleTrailing, 3, ""},
	{"{}\x00", RuleTrailing, 2, ""},
	{`1x`, RuleTrailing, 1, ""},
	{"{\"a\":\"\xff\"}", RuleUTF8, 6, ""},
	{"\"\xc3\"", RuleUTF8, 1, ""},
	{"\"\xed\xa0\x80\"", RuleUTF8, 1, ""},
	{`"ab\ud800"`, RuleUTF8, 3, ""},
	{`"\udc00"`, RuleUTF8, 1, ""},
	{`"\ud800\u0041"`, RuleUTF8, 1, ""},
	{`"\ud800\ud800"`, RuleUTF8, 1, ""},
	{`{"a":1,"a":2}`, RuleDuplicate, 7, ""},
	{`{"a":1,"\u0061":2}`, RuleDuplicate, 7, ""},
	{`{"x":[0,{"a":1,"b":2,"a":3}]}`, RuleDuplicate, 21, "x[1]"},
	{many + `,"k3":1}`, RuleDuplicate, len(many) + 1, ""},
	{many + `,"k29":1}`, RuleDuplicate, len(many) + 1, ""},
	{nested(128), RuleDepth, 127, strings.Repeat("[0]", 127)},
}

func TestRules(t *testing.T) {
	for _, c := range documents {
		err := Valid([]byte(c.in))
		if c.rule == "" {
			if err != nil {
				t.Errorf("%.60q: %v", c.in, err)
			}
			continue
		}
		var e *Error
		if !errors.As(err, &e) {
			t.Errorf("%.60q: got %v, want rule %s", c.in, err, c.rule)
		} else if e.Rule != c.rule || e.Offset != c.offset || e.Path != c.path {
			t.Errorf("%.60q: got rule %s at %d in %q (%v), want %s at %d in %q",
				c.in, e.Rule, e.Offset, e.Path, err, c.rule, c.offset, c.path)
		}
	}
}

// Finite refuses the numbers that serde_json refuses to hold.
func TestFinite(t *testing.T) {
	long := strings.Repeat("9", 309)
	for in, good := range map[string]bool{
		"0": true, "-0": true, "1e308": true, "-1.7976931348623157e308": true, "1e-400": true, "-1e-99999999999": true,
		"0e999": true, "0.0e+99999999999999999999": true, "0.00001e310": true, long[:308]: true, "5e-324": true,
		"1e400": false, "-1e999": false, "1e+99999999999999999999": false, "1.8e308": false, long: false,
		"-" + long: false, long + ".5": false, "1E309": false,
	} {
		for _, text := range []string{in, `{"a":[{"b":` + in + `}]}`} {
			err := Read([]byte(text), func(r *Reader) error { r.Finite(); return r.Skip() })
			var e *Error
			if good && err != nil || !good && (!errors.As(err, &e) || e.Rule != RuleF64) {
				t.Errorf("%.60s: %v", text, err)
			}
			if err := Valid([]byte(text)); err != nil {
				t.Errorf("%.60s: %v", text, err)
			}
		}
	}
}

func TestUint(t *testing.T) {
	for in, want := range map[string]any{
		"0": uint64(0), "11": uint64(11), "18446744073709551615": uint64(1<<64 - 1), "9007199254740993": uint64(1<<53 + 1),
		"18446744073709551616": RuleU64, "-1": RuleU64, "-0": RuleU64, "99999999999999999999999": RuleU64,
		"1.0": RuleInteger, "1e3": RuleInteger, "-1.5": RuleInteger, "1E2": RuleInteger,
		`"1"`: RuleType, "true": RuleType, "[]": RuleType, "{}": RuleType, "null": RuleNotNull,
		"nil": RuleSyntax, "01": RuleSyntax,
	} {
		var v uint64
		err := Read([]byte(in), func(r *Reader) (err error) { v, err = r.Uint64(); return err })
		checkUint(t, in, want, v, err)
	}
	for in, want := range map[string]any{
		"1": uint64(1), "4294967295": uint64(1<<32 - 1), "4294967296": RuleU32, "4294967297": RuleU32, "-1": RuleU32,
	} {
		var v uint32
		err := Read([]byte(in), func(r *Reader) (err error) { v, err = r.Uint32(); return err })
		checkUint(t, in, want, uint64(v), err)
	}
}

func checkUint(t *testing.T, in string, want any, v uint64, err error) {
	t.Helper()
	var e *Error
	switch {
	case errors.As(err, &e):
		if e.Rule != want {
			t.Errorf("%s: got %v, want %v", in, err, want)
		}
	case v != want:
		t.Errorf("%s: got %d, want %v", in, v, want)
	}
}

func TestStruct(t *testing.T) {
	type doc struct {
		name string
		size uint64
		flag bool
	}
	parse := func(in string) (d doc, err error) {
		err = Read([]byte(in), func(r *Reader) error {
			return r.Struct(
				Field{Name: "name", Read: func() (err error) { d.name, err = r.String(); return err }},
				Field{Name: "size", Read: func() (err error) { d.size, err = r.Uint64(); return err }},
				Field{Name: "flag", Optional: true, Read: func() (err error) { d.flag, err = r.Bool(); return err }})
		})
		return d, err
	}
	full := doc{"a\n\u00e9", 7, true}
	for _, in := range []string{
		`{"name":"a\né","size":7,"flag":true}`, ` { "flag" : true , "n\u0061me" : "a\u000a\u00E9" , "size" : 7 } `,
	} {
		if d, err := parse(in); err != nil || d != full {
			t.Errorf("%s: got %+v, %v", in, d, err)
		}
	}
	for _, in := range []string{`{"name":"","size":0}`, `{"name":"","size":0,"flag":null}`} {
		if d, err := parse(in); err != nil || d != (doc{}) {
			t.Errorf("%s: got %+v, %v", in, d, err)
		}
	}
	for in, want := range map[string]string{
		`{"name":"a"}`:                     RuleRequired,
		`{"name":"a","size":null}`:         RuleNotNull,
		`{"name":"a","Size":1}`:            RuleExactName,
		`{"name":"a","size":1,"other":1}`:  RuleUnknownField,
		`{"name":"a","size":1,"name":"a"}`: RuleDuplicate,
		`{"name":1,"size":1}`:              RuleType,
		`{"name":"a","size":1,"flag":nil}`: RuleSyntax,
		`["a",1]`:                          RuleType,
		`null`:                             RuleNotNull,
	} {
		var e *Error
		if _, err := parse(in); !errors.As(err, &e) || e.Rule != want {
			t.Errorf("%s: got %v, want %s", in, err, want)
		}
	}
}

func TestErrorText(t *testing.T) {
	err := Read([]byte(`{"shards":[1,{"size":"x"}]}`), func(r *Reader) error {
		return r.Object(func(string) error {
			return r.Array(func(i int) error {
				if i == 0 {
					return r.Skip()
				}
				return r.Object(func(string) error { _, err := r.Uint64(); return err })
			})
		})
	})
	const want = "shards[1].size: want a number, got a string at byte 21 (type)"
	if err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	own := errors.New("of the caller")
	got := Read([]byte(`{"a":1}`), func(r *Reader) error { return r.Object(func(string) error { return own }) })
	if got != own {
		t.Errorf("the caller's error came back as %v", got)
	}
}

func TestRawAndNumber(t *testing.T) {
	err := Read([]byte(` [ {"a": 1} , -1.50e+2 ]`), func(r *Reader) error {
		return r.Array(func(i int) error {
			if i == 0 {
				b, err := r.Raw()
				if string(b) != `{"a": 1}` {
					t.Errorf("Raw = %q", b)
				}
				return err
			}
			s, err := r.Number()
			if s != "-1.50e+2" {
				t.Errorf("Number = %q", s)
			}
			return err
		})
	})
	if err != nil {
		t.Error(err)
	}
}

// generic reads a value the way encoding/json does into an any, numbers as text.
func generic(r *Reader) (v any, err error) {
	switch r.Kind() {
	case Object:
		m := map[string]any{}
		err = r.Object(func(name string) (err error) { m[name], err = generic(r); return err })
		return m, err
	case Array:
		a := []any{}
		err = r.Array(func(int) error {
			e, err := generic(r)
			a = append(a, e)
			return err
		})
		return a, err
	case String:
		return r.String()
	case Number:
		s, err := r.Number()
		return json.Number(s), err
	case Bool:
		return r.Bool()
	}
	return nil, r.Skip()
}

// FuzzAgainstStandard checks that all we take the standard decoder takes with the same value, and that what it takes
// and we do not breaks one of the rules on which we are stricter.
func FuzzAgainstStandard(f *testing.F) {
	for _, s := range []string{
		`{"a":[1,-2.5e3,null,true,false,"\u00e9\ud83d\ude00\\\/\b\f\n\r\t\""],"b":{}}`, ` [[],{"x":{"y":"z"}}] `,
		`{"a":1,"a":2}`, "\ufeff{}", `"\ud800"`, "\"\xff\"", `01`, `{}{}`, `{"":0}`, `"` + strings.Repeat("x", 40) + `"`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var got any
		err := Read(data, func(r *Reader) (err error) { got, err = generic(r); return err })
		if skip := Valid(data); (skip == nil) != (err == nil) {
			t.Fatalf("Valid says %v, reading says %v", skip, err)
		}
		dec := json.NewDecoder(bytes.NewReader(data))
		dec.UseNumber()
		if err == nil {
			var want any
			if err := dec.Decode(&want); err != nil || !json.Valid(data) {
				t.Fatalf("taken, but the standard decoder says %v", err)
			}
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("got %#v, standard %#v", got, want)
			}
			return
		}
		var e *Error
		if !errors.As(err, &e) || e.Offset < 0 || e.Offset > len(data) || strings.ContainsAny(err.Error(), "\n\r") {
			t.Fatalf("bad error %#v", err)
		}
		if json.Valid(data) && e.Rule != RuleUTF8 && e.Rule != RuleDuplicate && e.Rule != RuleDepth {
			t.Fatalf("refused valid JSON: %v", err)
		}
	})
}

func BenchmarkValid(b *testing.B) {
	var doc bytes.Buffer
	doc.WriteString(`{"weight_map":{"x":"y"`)
	for i := range 20000 {
		fmt.Fprintf(&doc, `,"model.layers.%d.mlp.experts.%d.down_proj.weight":"model-%05d-of-00100.safetensors"`,
			i/100, i%100, i%100)
	}
	doc.WriteString("}}")
	b.SetBytes(int64(doc.Len()))
	b.ReportAllocs()
	for b.Loop() {
		if err := Valid(doc.Bytes()); err != nil {
			b.Fatal(err)
		}
	}
}

// Of many names in one object the same one is found twice, however it is spelled; and what is kept of them is little more
// than the text.
func TestManyNames(t *testing.T) {
	var doc bytes.Buffer
	for i := range 100_000 {
		fmt.Fprintf(&doc, `%c"%x":0`, "{,"[min(i, 1)], i)
	}
	whole := append(doc.Bytes(), '}')
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if err := Valid(whole); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if took := after.TotalAlloc - before.TotalAlloc; took > uint64(3*len(whole)) {
		t.Errorf("takes %d bytes for %d of text", took, len(whole))
	}
	for _, again := range []string{"0", "f", "10", "1869f", `\u0031869f`, `c35\u0030`} {
		twice := append(doc.Bytes(), `,"`+again+`":0}`...)
		var e *Error
		if err := Valid(twice); !errors.As(err, &e) || e.Rule != RuleDuplicate || e.Offset != doc.Len()+1 {
			t.Errorf("%s: %v", again, err)
		}
	}
	if err := Valid([]byte(`{"\\":0,"\"":0,"":0,"a\"":0,"a\\":0,"\u0061":0}`)); err != nil {
		t.Error(err)
	}
	var e *Error
	if err := Valid([]byte(`{"\u0061":0,"a":0}`)); !errors.As(err, &e) || e.Rule != RuleDuplicate {
		t.Error(err)
	}
}

// TestLimit: members count over all objects, also those of values that are skipped.
func TestLimit(t *testing.T) {
	for doc, members := range map[string]int{
		`{}`: 0, `[{},{}]`: 0, `{"a":1,"b":[{"a":1},{"a":{"b":null}}]}`: 5, `{"a":{"a":{"a":{}}}}`: 3,
	} {
		for most := 1; most < 7; most++ {
			err := Read([]byte(doc), func(r *Reader) error {
				r.Limit(most)
				return r.Skip()
			})
			var e *Error
			if refused := errors.As(err, &e) && e.Rule == RuleMembers; refused != (members > most) || !refused && err != nil {
				t.Errorf("%s with at most %d members: %v", doc, most, err)
			}
		}
	}
}

// What ends the plain part of a string is found wherever it stands, also behind bytes that differ from it in one bit.
func TestPlain(t *testing.T) {
	simple := func(b []byte) int {
		for i, c := range b {
			if c == '"' || c == '\\' || c < ' ' {
				return i
			}
		}
		return len(b)
	}
	for length := range 20 {
		for at := range length {
			for c := range 256 {
				for _, fill := range []byte{' ', '!', '#', '[', ']', 0x7f, 0x80, 0xa2, 0xdc, 0xff} {
					b := bytes.Repeat([]byte{fill}, length)
					b[at] = byte(c)
					if got, want := plain(b), simple(b); got != want {
						t.Fatalf("%q: %d, want %d", b, got, want)
					}
				}
			}
		}
	}
}
