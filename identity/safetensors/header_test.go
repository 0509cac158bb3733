package safetensors

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// file returns a safetensors file with the header text and n bytes of data.
func file(text string, n int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
	return append(append(b, text...), make([]byte, n)...)
}

func read(b []byte) (Header, error) { return Read(bytes.NewReader(b), int64(len(b))) }

// one returns a header with one tensor, t.
func one(dtype, shape, offsets string) string {
	return fmt.Sprintf(`{"t":{"dtype":%q,"shape":%s,"data_offsets":%s}}`, dtype, shape, offsets)
}

var headers = []struct {
	text string
	data int    // bytes after the header
	code string // empty: taken
	says string
}{
	{one("F32", "[4]", "[0,16]"), 16, "", ""},
	{one("F4", "[6]", "[0,3]"), 3, "", ""},
	{one("F6_E2M3", "[4]", "[0,3]"), 3, "", ""},
	{one("F6_E3M2", "[2,2]", "[0,3]"), 3, "", ""},
	{one("C64", "[2]", "[0,16]"), 16, "", ""},
	{one("BOOL", "[0,18446744073709551615]", "[0,0]"), 0, "", ""},
	{`{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"later":{"x":[1]}}}` + " \t\n\r", 1, "", ""},
	{one("F4", "[5]", "[0,3]"), 3, CodeSizeMismatch, "3 bytes"},
	{one("F4", "[5]", "[0,2]"), 2, CodeSizeMismatch, "needs 3 bytes"},
	{one("F6_E2M3", "[1]", "[0,1]"), 1, CodeSizeMismatch, ""},
	{one("F32", "[4294967296,4294967296]", "[0,0]"), 0, CodeSizeMismatch, "2^64 bits"},
	{one("F64", "[2305843009213693952]", "[0,0]"), 0, CodeSizeMismatch, "2^64 bits"},
	{one("U8", "[18446744073709551615]", "[0,8]"), 8, CodeSizeMismatch, "2^64 bits"},
	{one("F32", "[1.0]", "[0,4]"), 4, CodeBadInteger, `"t"`},
	{one("F32", "[1e0]", "[0,4]"), 4, CodeBadInteger, ""},
	{one("F32", "[-1]", "[0,4]"), 4, CodeBadInteger, ""},
	{one("F32", "[1]", "[-0,4]"), 4, CodeBadInteger, ""},
	{one("F32", "[1]", "[0,16.0]"), 16, CodeBadInteger, ""},
	{one("F32", "[1]", "[0,18446744073709551616]"), 16, CodeBadInteger, ""},
	{one("F32", "[01]", "[0,4]"), 4, CodeHeaderNotJSON, "byte 29"},
	{one("F32", "[1]", "[0]"), 4, CodeBadTensor, "1 data_offsets"},
	{one("F32", "[1]", "[0,4,4]"), 4, CodeBadTensor, "3 data_offsets"},
	{one("F32", "[1]", "[]"), 4, CodeBadTensor, "0 data_offsets"},
	{one("F32", "null", "[0,4]"), 4, CodeBadTensor, ""},
	{one("F32", "4", "[0,4]"), 4, CodeBadTensor, ""},
	{one("f32", "[1]", "[0,4]"), 4, CodeUnknownDType, `"f32"`},
	{one("Q", "[1]", "[0,4]"), 5, CodeTrailingBytes, ""},
	{one("Q", "[1]", "[4,0]"), 5, CodeOffsetOrder, ""},
	{`{"t":{"dtype":7,"shape":[],"data_offsets":[0,4]}}`, 4, CodeBadTensor, ""},
	{`{"t":{"shape":[],"data_offsets":[0,4]}}`, 4, CodeBadTensor, "lacks"},
	{`{"t":["F32",[1],[0,4]]}`, 4, CodeBadTensor, "an array"},
	{`{"t":null}`, 4, CodeBadTensor, ""},
	{`{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"later":1e308}}`, 1, "", ""},
	{`{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"later":1e999}}`, 1, CodeHeaderNotJSON, "out of range"},
	{`{"t":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}`, 1, CodeDuplicateTensor, `"dtype" twice`},
	{`{"__metadata__":{},"__metadata__":{}}`, 0, CodeDuplicateTensor, "__metadata__"},
	{`{"__metadata__":null}`, 0, CodeMetadata, "null"},
	{`{"__metadata__":[]}`, 0, CodeMetadata, "an array"},
	{`{"__metadata__":{"a\nb":{}}}`, 0, CodeMetadata, `"a\nb"`},
	{`[]`, 0, CodeHeaderNotJSON, "'{'"},
	{` {}`, 0, CodeHeaderNotJSON, "'{'"},
	{``, 0, CodeHeaderNotJSON, "0 bytes"},
	{`{}x`, 0, CodeHeaderNotJSON, "byte 2"},
	{"{\"\xff\":1}", 0, CodeHeaderNotJSON, "UTF-8"},
	{`{"x":` + strings.Repeat("[", 200), 0, CodeBadTensor, "an array"},
	{`{"t":{"x":` + strings.Repeat("[", 200), 0, CodeHeaderNotJSON, "deeper"},
	{one("U8", "[8]", "[0,8]"), 7, CodeTruncated, "promises 8 bytes of data, 7 are there (1 short)"},
	{one("U8", "[8]", "[1,9]"), 9, CodeOffsetGap, "bytes 0-1"},
}

func TestHeaderRules(t *testing.T) {
	for _, c := range headers {
		h, err := read(file(c.text, c.data))
		if c.code == "" {
			if err != nil || len(h.Tensors) != 1 || h.Size != uint64(8+len(c.text)) || h.Tensors[0].End != uint64(c.data) {
				t.Errorf("%s: got %+v, %v", c.text, h, err)
			}
			continue
		}
		var e *Error
		if !errors.As(err, &e) || e.Code != c.code || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%.80s: got %v, want %s saying %q", c.text, err, c.code, c.says)
		}
		if e != nil && e.Code != CodeUnknownDType && h.Tensors != nil {
			t.Errorf("%.80s: refused, but gave tensors", c.text)
		}
	}
}

// TestLengthLikeMagic: a header of 640 bytes starts like a pickle, and its fault is told all the same.
func TestLengthLikeMagic(t *testing.T) {
	text := one("U8", "[2]", "[0,1]")
	_, err := read(file(text+strings.Repeat(" ", 0x280-len(text)), 1))
	var e *Error
	if !errors.As(err, &e) || e.Code != CodeSizeMismatch {
		t.Errorf("got %v, want %s", err, CodeSizeMismatch)
	}
	_, err = read(file(strings.Repeat("x", 0x280), 1))
	if !errors.As(err, &e) || e.Code != CodeNotSafetensors {
		t.Errorf("got %v, want %s", err, CodeNotSafetensors)
	}
}

func TestHeaderLen(t *testing.T) {
	prefix := func(n uint64) (p [8]byte) {
		binary.LittleEndian.PutUint64(p[:], n)
		return p
	}
	const huge = int64(1) << 40
	for _, c := range []struct {
		prefix [8]byte
		size   int64
		code   string
	}{
		{prefix(MaxHeader), huge, ""},
		{prefix(MaxHeader + 1), huge, CodeHeaderTooLarge},
		{prefix(1 << 63), huge, CodeHeaderTooLarge},
		{prefix(1<<64 - 1), 1<<63 - 1, CodeHeaderTooLarge},
		{prefix(92), 100, ""},
		{prefix(93), 100, CodeHeaderExceeds},
		{prefix(MaxHeader), 8, CodeHeaderExceeds},
		{prefix(0), 7, CodeHeaderTooShort},
		{[8]byte([]byte("version ")), huge, CodeLFSPointer},
		{[8]byte([]byte("<!DOCTYP")), huge, CodeHTMLPage},
		{[8]byte([]byte("<html><h")), huge, CodeHTMLPage},
		{[8]byte([]byte("GGUF\x03\x00\x00\x00")), huge, CodeNotSafetensors},
		{[8]byte([]byte("PK\x03\x04\x00\x00\x00\x00")), 1000, CodeNotSafetensors},
		// A header of 67,324,752 bytes starts like a zip archive and is none.
		{[8]byte([]byte("PK\x03\x04\x00\x00\x00\x00")), huge, ""},
	} {
		n, err := HeaderLen(c.prefix, c.size)
		var e *Error
		switch {
		case c.code == "" && (err != nil || uint64(n) != binary.LittleEndian.Uint64(c.prefix[:])):
			t.Errorf("%q of %d: %d, %v", c.prefix, c.size, n, err)
		case c.code != "" && (!errors.As(err, &e) || e.Code != c.code):
			t.Errorf("%q of %d: got %v, want %s", c.prefix, c.size, err, c.code)
		}
	}
}

func TestDiagnose(t *testing.T) {
	for text, code := range map[string]string{
		"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n": CodeLFSPointer,
		"\n\t <HTML><body>x": CodeHTMLPage,
		`<?xml version="1.0"?><Error><Code>NoSuchKey</Code>`: CodeHTMLPage,
		"":                                  "",
		"<html":                             "",
		"plain text, no":                    "",
		"\x40\x00\x00\x00\x00\x00\x00\x00{": "",
	} {
		err := Diagnose([]byte(text))
		var e *Error
		if errors.As(err, &e) != (code != "") || e != nil && e.Code != code {
			t.Errorf("%q: got %v, want %q", text, err, code)
		}
	}
}

type failing struct{}

func (failing) ReadAt([]byte, int64) (int, error) { return 0, io.ErrUnexpectedEOF }

func TestReadFails(t *testing.T) {
	var e *Error
	if _, err := Read(failing{}, 100); !errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &e) {
		t.Errorf("got %v", err)
	}
	if _, err := ParseHeader([8]byte{4}, []byte("{}"), 100); err == nil || errors.As(err, &e) {
		t.Errorf("a text of another length: %v", err)
	}
	if err := InFile("x", nil); err != nil {
		t.Errorf("InFile of nil = %v", err)
	}
	if err := InFile("a b", io.EOF); !errors.Is(err, io.EOF) || err.Error() != `"a b": EOF` {
		t.Errorf("InFile = %v", err)
	}
}

// manyTensors returns the header of a file of n two-byte tensors.
func manyTensors(n int) []byte {
	var text bytes.Buffer
	text.WriteByte('{')
	for i := range n {
		if i > 0 {
			text.WriteByte(',')
		}
		fmt.Fprintf(&text, `"layers.%d.mlp.experts.%d.down_proj.weight":{"dtype":"F16","shape":[1,1],"data_offsets":[%d,%d]}`,
			i/128, i%128, 2*i, 2*i+2)
	}
	text.WriteByte('}')
	return file(text.String(), 2*n)
}

// TestMemory checks that a header takes memory in proportion to its text, also one made to take much.
func TestMemory(t *testing.T) {
	counted := file(`{"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":[""`+
		strings.Repeat(`,"data_offsets"`, 100_000)+`]}}`, 0)
	var shortest strings.Builder
	for i := range 20000 {
		fmt.Fprintf(&shortest, `,"%x":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}`, i, i, i+1)
	}
	for _, c := range []struct {
		name string
		file []byte
		most int // times the length of the file
	}{
		{"many tensors", manyTensors(20000), 4},
		{"short tensors", file("{"+shortest.String()[1:]+"}", 20000), 6},
		{"counted in vain", counted, 3},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := read(c.file)
		runtime.ReadMemStats(&after)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if took := after.TotalAlloc - before.TotalAlloc; took > uint64(c.most*len(c.file)) {
			t.Errorf("%s: a file of %d bytes took %d bytes", c.name, len(c.file), took)
		}
	}
}

func FuzzParseHeader(f *testing.F) {
	f.Add([]byte(`{"__metadata__":{"a":"b"},"z":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]}}`), uint16(3))
	f.Add([]byte(`{"a":{"dtype":"BF16","shape":[],"data_offsets":[2,4]},`+
		`"b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]},`+
		`"c":{"dtype":"U16","shape":[1],"data_offsets":[0,2]}}  `), uint16(4))
	f.Add([]byte(`{"a":{"dtype":"Q4","shape":[],"data_offsets":[0,4]}}`), uint16(4))
	f.Add([]byte(`{"a":{"dtype":"F64","shape":[18446744073709551615,2],"data_offsets":[0,4]}}`), uint16(4))
	f.Fuzz(func(t *testing.T, text []byte, data uint16) {
		b := file(string(text), int(data))
		h, err := read(b)
		var e *Error
		if err != nil && (!errors.As(err, &e) || strings.ContainsAny(err.Error(), "\n\r")) {
			t.Fatalf("bad error %#v", err)
		}
		if err != nil && e.Code != CodeUnknownDType {
			return
		}
		at := uint64(0)
		for _, x := range h.Tensors {
			if x.Begin != at || x.End < x.Begin || x.DType.Bits() == 0 && err == nil {
				t.Fatalf("taken with %+v at %d", x, at)
			}
			at = x.End
		}
		if at != uint64(data) || h.Size != uint64(8+len(text)) {
			t.Fatalf("taken with %d of %d bytes covered", at, data)
		}
		again, err2 := read(slices.Clone(b))
		if fmt.Sprint(again, err2) != fmt.Sprint(h, err) {
			t.Fatalf("read differently: %v, %v", again, err2)
		}
	})
}

func BenchmarkParseHeader20000(b *testing.B) {
	data := manyTensors(20000)
	prefix := [8]byte(data)
	n, err := HeaderLen(prefix, int64(len(data)))
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(n)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ParseHeader(prefix, data[8:8+n], int64(len(data))); err != nil {
			b.Fatal(err)
		}
	}
}
