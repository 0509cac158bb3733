package safetensors

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
)

func regular(names ...string) (entries []Entry) {
	for _, n := range names {
		entries = append(entries, Entry{Name: n, Size: 10})
	}
	return entries
}

func noIndex() ([]byte, error) { return nil, errors.New("the index was read") }

func names(n int) (list []string) {
	for i := range n {
		list = append(list, fmt.Sprintf("s-%05d.safetensors", i))
	}
	return list
}

// indexOf returns an index document that names the files.
func indexOf(files ...string) string {
	var b strings.Builder
	for i, n := range files {
		fmt.Fprintf(&b, `,"t%d":%q`, i, n)
	}
	return `{"weight_map":{` + strings.TrimPrefix(b.String(), ",") + `}}`
}

// with lists the entry beside regular files.
func with(e Entry, files ...string) []Entry { return append(regular(files...), e) }

var longName = strings.Repeat("n", 256-len(identity.Extension)) + identity.Extension

var chosen = map[string]struct {
	entries []Entry
	index   string
	shards  []string
}{
	"index wins": {regular("model.safetensors", "b.safetensors", "a.safetensors", IndexName),
		indexOf("b.safetensors", "a.safetensors", "b.safetensors"), []string{"a.safetensors", "b.safetensors"}},
	"single wins": {regular("model.safetensors", "b.safetensors"), "", []string{"model.safetensors"}},
	"all others": {regular("b.safetensors", "a.safetensors", "config.json"), "",
		[]string{"a.safetensors", "b.safetensors"}},
	"no extension":       {regular(".safetensors", "a.safetensors"), "", []string{"a.safetensors"}},
	"hidden":             {regular("._a.safetensors", "a.safetensors"), "", []string{"._a.safetensors", "a.safetensors"}},
	"upper case ignored": {regular("A.SAFETENSORS", "a.safetensors"), "", []string{"a.safetensors"}},
	"bare name by index": {regular(".safetensors", IndexName), indexOf(".safetensors"), []string{".safetensors"}},
	"sub-folder passed":  {regular("sub/b.safetensors", "a.safetensors"), "", []string{"a.safetensors"}},
	"4096":               {regular(names(4096)...), "", names(4096)},
	"4096 by index":      {regular(append(names(4096), IndexName)...), indexOf(names(4096)...), names(4096)},
	"link not chosen": {with(Entry{Name: "b.safetensors", Mode: Symlink}, "model.safetensors"), "",
		[]string{"model.safetensors"}},
	"name of 255 bytes": {regular(IndexName, longName[1:]), indexOf(longName[1:]), []string{longName[1:]}},
	"adapter beside base": {regular("model.safetensors", "adapter_model.safetensors", "adapter_config.json"), "",
		[]string{"model.safetensors"}},
	"adapter name alone": {regular("adapter_model.safetensors"), "", []string{"adapter_model.safetensors"}},
}

func TestSelectTakes(t *testing.T) {
	for name, c := range chosen {
		s, err := Select(c.entries, func() ([]byte, error) { return []byte(c.index), nil })
		if err != nil || !slices.Equal(s.Shards, c.shards) || s.FromIndex != (c.index != "") {
			t.Errorf("%s: got %.200q (index %v), %v", name, s.Shards, s.FromIndex, err)
		}
	}
}

var refusedFolders = map[string]struct {
	entries []Entry
	code    string
	says    string
}{
	"4097":                {regular(names(4097)...), CodeTooManyShards, "4097"},
	"nothing":             {nil, CodeNoShards, ""},
	"upper case alone":    {regular("A.SAFETENSORS"), CodeNoShards, ""},
	"only leftovers":      {regular("a.safetensors.incomplete"), CodeNoShards, "there: a.safetensors.incomplete"},
	"name with a space":   {regular("my model.safetensors"), CodeNotPortableName, `"my model.safetensors"`},
	"name with a newline": {regular("a\nb.safetensors"), CodeNotPortableName, `"a\nb.safetensors"`},
	"link": {with(Entry{Name: "b.safetensors", Mode: Symlink}, "a.safetensors"), CodeSymlink,
		"b.safetensors: a symbolic link;"},
	"single is a link": {with(Entry{Name: "model.safetensors", Mode: Symlink, Target: "x\ny"}), CodeSymlink,
		`"x\ny"`},
	"device":            {with(Entry{Name: "a.safetensors", Mode: Other}), CodeNotRegular, "a.safetensors"},
	"empty":             {with(Entry{Name: "a.safetensors"}), CodeEmptyShard, "a.safetensors"},
	"index is a folder": {with(Entry{Name: IndexName, Mode: Dir}, "model.safetensors"), CodeNotRegular, IndexName},
	"index is a link":   {with(Entry{Name: IndexName, Mode: Symlink}, "model.safetensors"), CodeSymlink, IndexName},
	"index over 64 MiB": {with(Entry{Name: IndexName, Size: MaxIndex + 1}), CodeIndexTooLarge, "67108865"},
	"adapter":           {regular("adapter_model.safetensors", "adapter_config.json"), CodeAdapterNotBase, ""},
}

func TestSelectRefusesFolders(t *testing.T) {
	for name, c := range refusedFolders {
		checkSelectRefuses(t, name, c.entries, noIndex, c.code, c.says)
	}
}

var refusedIndexes = map[string]struct{ index, code, says string }{
	"not JSON":             {`{"weight_map":`, CodeIndexNotJSON, "byte 14"},
	"empty":                {``, CodeIndexNotJSON, ""},
	"an array":             {`[]`, CodeIndexNotJSON, "an object"},
	"a page":               {`<html>gone</html>`, CodeIndexNotJSON, "web page"},
	"without map":          {`{"metadata":{}}`, CodeIndexEmpty, ""},
	"map is null":          {`{"weight_map":null}`, CodeIndexWeightMap, "null"},
	"map is an array":      {`{"weight_map":["a"]}`, CodeIndexWeightMap, "array"},
	"value no string":      {`{"weight_map":{"t\n":1}}`, CodeIndexWeightMap, `"t\n"`},
	"tensor twice":         {`{"weight_map":{"t":"a.safetensors","t":"a.safetensors"}}`, CodeIndexNotJSON, "twice"},
	"member twice":         {`{"x":{"y":1,"y":2},"weight_map":{"t":"a.safetensors"}}`, CodeIndexNotJSON, "twice"},
	"4097 files":           {indexOf(names(4097)...), CodeTooManyShards, "4096"},
	"value with a slash":   {indexOf("a/b.safetensors"), CodeNotPortableName, "a/b"},
	"value with a parent":  {indexOf("../b.safetensors"), CodeNotPortableName, ".."},
	"value is a parent":    {indexOf(".."), CodeNotPortableName, ".."},
	"value empty":          {indexOf(""), CodeNotPortableName, `""`},
	"value of 256 bytes":   {indexOf(longName), CodeNotPortableName, "256 bytes"},
	"value no safetensors": {indexOf("a.bin"), CodeNotPortableName, "a.bin"},
	"value in upper case":  {indexOf("a.SAFETENSORS"), CodeNotPortableName, ""},
	"two missing": {indexOf("a.safetensors", "b.safetensors", "c.safetensors"), CodeIndexMissingFile,
		"2 are missing: a.safetensors, c.safetensors; unfinished downloads are there: c.safetensors.incomplete"},
}

func TestSelectRefusesIndexes(t *testing.T) {
	entries := regular(IndexName, "model.safetensors", "b.safetensors", "c.safetensors.incomplete", "a/b.safetensors",
		"a.bin", "a.SAFETENSORS", longName)
	for name, c := range refusedIndexes {
		checkSelectRefuses(t, name, entries, func() ([]byte, error) { return []byte(c.index), nil }, c.code, c.says)
	}
}

func checkSelectRefuses(t *testing.T, name string, entries []Entry, index func() ([]byte, error), code, says string) {
	t.Helper()
	s, err := Select(entries, index)
	var e *Error
	if !errors.As(err, &e) || e.Code != code || !strings.Contains(err.Error(), says) || s.Shards != nil {
		t.Errorf("%s: got %v, want %s saying %q", name, err, code, says)
	} else if strings.ContainsAny(err.Error(), "\n\r") {
		t.Errorf("%s: %q is not one line", name, err)
	}
}

func TestSelectReadError(t *testing.T) {
	_, err := Select(regular(IndexName), func() ([]byte, error) { return nil, io.ErrUnexpectedEOF })
	var e *Error
	if !errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &e) || !strings.Contains(err.Error(), IndexName) {
		t.Errorf("got %v", err)
	}
}

// TestIndexLimit checks that the limit holds also for a document that is longer than the listing says.
func TestIndexLimit(t *testing.T) {
	doc := []byte(indexOf("a.safetensors"))
	doc = append(doc, bytes.Repeat([]byte(" "), MaxIndex-len(doc))...)
	read := func() ([]byte, error) { return doc, nil }
	if s, err := Select(regular(IndexName, "a.safetensors"), read); err != nil || len(s.Shards) != 1 {
		t.Errorf("at the limit: %q, %v", s.Shards, err)
	}
	doc = append(doc, ' ')
	checkSelectRefuses(t, "one byte over", regular(IndexName, "a.safetensors"), read, CodeIndexTooLarge, "67108865")
}

func TestWarnings(t *testing.T) {
	family := func(numbers ...int) (e []Entry) {
		for _, i := range numbers {
			e = append(e, regular(fmt.Sprintf("m-%05d-of-00030.safetensors", i))...)
		}
		return e
	}
	for name, c := range map[string]struct {
		entries []Entry
		want    []string // code and what the message says, by turns
	}{
		"whole family": {regular("m-1-of-2.safetensors", "m-2-of-2.safetensors"), nil},
		"no family":    {regular("of-of-x.safetensors", "a-of-2.safetensors", "x-1-of-9999999.safetensors"), nil},
		"one family of 2": {regular("a-1-of-1.safetensors", "b-1-of-2.safetensors"),
			[]string{WarnFamilyIncomplete, ": b-2-of-2.safetensors"}},
		"odd numbers": {regular("a-0-of-2.safetensors", "a-3-of-2.safetensors"),
			[]string{WarnFamilyIncomplete, "2 of 2 files"}},
		"many missing": {family(1, 30), []string{WarnFamilyIncomplete,
			"28 of 30 files of a numbered set are missing: m-00002-of-00030.safetensors, "}},
		"the rest counted": {family(1, 30), []string{WarnFamilyIncomplete, "m-00011-of-00030.safetensors and 18 more"}},
		"huge total":       {regular("m-1-of-999999.safetensors"), []string{WarnFamilyIncomplete, "999998 of 999999"}},
		"three alike": {regular("a.safetensors", "A.safetensors", "b.safetensors"),
			[]string{WarnCaseCollision, "A.safetensors, a.safetensors"}},
		"reserved": {regular("COM1.x.safetensors", "com0.safetensors", "nul.safetensors"),
			[]string{WarnWindowsReserved, "COM1.x.safetensors, nul.safetensors"}},
		"odd extra": {with(Entry{Name: "x\n.safetensors", Size: 7}, "model.safetensors"),
			[]string{WarnExtra, `"x\n.safetensors" (7 bytes)`}},
		"many extra": {append(family(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12), regular("model.safetensors")...),
			[]string{WarnExtra, "2 more"}},
		"extra folder": {with(Entry{Name: "d.safetensors", Mode: Dir}, "model.safetensors"),
			[]string{WarnExtra, "d.safetensors"}},
	} {
		s, err := Select(c.entries, noIndex)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if len(s.Warnings) != len(c.want)/2 {
			t.Errorf("%s: got %+v", name, s.Warnings)
			continue
		}
		for i, w := range s.Warnings {
			if w.Code != c.want[2*i] || !strings.Contains(w.Message, c.want[2*i+1]) ||
				strings.Contains(w.Message, "\n") || len(w.Names) == 0 {
				t.Errorf("%s: got %+v, want %s saying %q", name, w, c.want[2*i], c.want[2*i+1])
			}
		}
	}
	s, err := Select(regular(IndexName, "m-1-of-2.safetensors"),
		func() ([]byte, error) { return []byte(`{"weight_map":{"t":"m-1-of-2.safetensors"}}`), nil })
	if err != nil || len(s.Warnings) != 0 {
		t.Errorf("an index was second-guessed: %+v, %v", s.Warnings, err)
	}
}

// FuzzSelect reads a listing from text, one entry a line: mode, size, name.
func FuzzSelect(f *testing.F) {
	f.Add("0 9 a.safetensors\n1 0 b.safetensors\n0 5 config.json", "", uint64(1))
	f.Add("0 9 model.safetensors.index.json\n0 4 a.safetensors", `{"weight_map":{"t":"a.safetensors"}}`, uint64(2))
	f.Add("0 9 m-00001-of-00003.safetensors\n0 9 M-00001-of-00003.safetensors\n0 9 x/a.safetensors", "", uint64(3))
	f.Fuzz(func(t *testing.T, listing, index string, seed uint64) {
		var entries []Entry
		byName := map[string]Entry{}
		for line := range strings.Lines(listing) {
			var e Entry
			var name string
			if n, _ := fmt.Sscanf(line, "%d %d %s", &e.Mode, &e.Size, &name); n != 3 {
				continue
			}
			if e.Name = name; byName[name].Name == "" {
				entries = append(entries, e)
				byName[name] = e
			}
		}
		read := func() ([]byte, error) { return []byte(index), nil }
		s, err := Select(entries, read)
		shuffled := slices.Clone(entries)
		rand.New(rand.NewPCG(seed, 0)).Shuffle(len(shuffled), func(i, j int) {
			shuffled[i], shuffled[j] = shuffled[j], shuffled[i]
		})
		if again, err2 := Select(shuffled, read); fmt.Sprint(err) != fmt.Sprint(err2) || !reflect.DeepEqual(s, again) {
			t.Fatalf("the order of the listing counts: %+v, %v; %+v, %v", s, err, again, err2)
		}
		if err != nil {
			var e *Error
			if !errors.As(err, &e) || strings.ContainsAny(err.Error(), "\n\r") || s.Shards != nil {
				t.Fatalf("bad error %#v", err)
			}
			return
		}
		if len(s.Shards) < 1 || len(s.Shards) > identity.MaxShards || !slices.IsSorted(s.Shards) {
			t.Fatalf("bad set %q", s.Shards)
		}
		for i, n := range s.Shards {
			if e, ok := byName[n]; !ok || e.Mode != Regular || e.Size <= 0 || identity.CheckFilename(n) != nil ||
				i > 0 && s.Shards[i-1] == n || slices.Contains(s.Extra, n) {
				t.Fatalf("bad shard %q in %+v", n, s)
			}
		}
	})
}
