package safetensors

import (
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

func TestSelectRules(t *testing.T) {
	many := func(n int) (names []string) {
		for i := range n {
			names = append(names, fmt.Sprintf("s-%05d.safetensors", i))
		}
		return names
	}
	indexOf := func(names []string) string {
		var b strings.Builder
		for i, n := range names {
			fmt.Fprintf(&b, `,"t%d":%q`, i, n)
		}
		return `{"weight_map":{` + strings.TrimPrefix(b.String(), ",") + `}}`
	}
	long := strings.Repeat("n", 256-len(identity.Extension)) + identity.Extension
	for name, c := range map[string]struct {
		entries []Entry
		index   string
		shards  string // joined by spaces; empty: refused
		code    string
		says    string
	}{
		"index wins": {regular("model.safetensors", "b.safetensors", "a.safetensors", IndexName),
			`{"weight_map":{"x":"b.safetensors","y":"a.safetensors","z":"b.safetensors"}}`, "a.safetensors b.safetensors", "", ""},
		"single wins":          {regular("model.safetensors", "b.safetensors"), "", "model.safetensors", "", ""},
		"all others":           {regular("b.safetensors", "a.safetensors", "config.json"), "", "a.safetensors b.safetensors", "", ""},
		"no extension":         {regular(".safetensors", "a.safetensors"), "", "a.safetensors", "", ""},
		"hidden":               {regular("._a.safetensors", "a.safetensors"), "", "._a.safetensors a.safetensors", "", ""},
		"upper case ignored":   {regular("A.SAFETENSORS", "a.safetensors"), "", "a.safetensors", "", ""},
		"bare name by index":   {regular(".safetensors", IndexName), `{"weight_map":{"x":".safetensors"}}`, ".safetensors", "", ""},
		"sub-folder passed":    {regular("sub/b.safetensors", "a.safetensors"), "", "a.safetensors", "", ""},
		"4096":                 {regular(many(4096)...), "", strings.Join(many(4096), " "), "", ""},
		"4096 by index":        {regular(append(many(4096), IndexName)...), indexOf(many(4096)), strings.Join(many(4096), " "), "", ""},
		"4097":                 {regular(many(4097)...), "", "", CodeTooManyShards, "4097"},
		"4097 by index":        {regular(append(many(4097), IndexName)...), indexOf(many(4097)), "", CodeTooManyShards, "4096"},
		"nothing":              {nil, "", "", CodeNoShards, ""},
		"upper case alone":     {regular("A.SAFETENSORS"), "", "", CodeNoShards, ""},
		"only leftovers":       {regular("a.safetensors.incomplete"), "", "", CodeNoShards, "a.safetensors.incomplete"},
		"name with a space":    {regular("my model.safetensors"), "", "", CodeNotPortableName, `"my model.safetensors"`},
		"name with a newline":  {regular("a\nb.safetensors"), "", "", CodeNotPortableName, `"a\nb.safetensors"`},
		"link among others":    {append(regular("a.safetensors"), Entry{Name: "b.safetensors", Mode: Symlink}), "", "", CodeSymlink, "b.safetensors"},
		"single is a link":     {[]Entry{{Name: "model.safetensors", Mode: Symlink, Target: "x\ny"}}, "", "", CodeSymlink, `"x\ny"`},
		"link not chosen":      {append(regular("model.safetensors"), Entry{Name: "b.safetensors", Mode: Symlink}), "", "model.safetensors", "", ""},
		"device":               {[]Entry{{Name: "a.safetensors", Mode: Other}}, "", "", CodeNotRegular, "a.safetensors"},
		"empty":                {[]Entry{{Name: "a.safetensors"}}, "", "", CodeEmptyShard, "a.safetensors"},
		"index is a folder":    {append(regular("model.safetensors"), Entry{Name: IndexName, Mode: Dir}), "", "", CodeNotRegular, IndexName},
		"index is a link":      {append(regular("model.safetensors"), Entry{Name: IndexName, Mode: Symlink}), "", "", CodeSymlink, IndexName},
		"index over 64 MiB":    {[]Entry{{Name: IndexName, Size: MaxIndex + 1}}, "", "", CodeIndexTooLarge, "67108865"},
		"index not JSON":       {regular(IndexName, "model.safetensors"), `{"weight_map":`, "", CodeIndexNotJSON, "byte 14"},
		"index empty":          {regular(IndexName, "model.safetensors"), ``, "", CodeIndexNotJSON, ""},
		"index an array":       {regular(IndexName, "model.safetensors"), `[]`, "", CodeIndexNotJSON, "an object"},
		"index a page":         {regular(IndexName, "model.safetensors"), `<html>gone</html>`, "", CodeIndexNotJSON, "web page"},
		"index without map":    {regular(IndexName, "model.safetensors"), `{"metadata":{}}`, "", CodeIndexEmpty, ""},
		"map is null":          {regular(IndexName, "model.safetensors"), `{"weight_map":null}`, "", CodeIndexWeightMap, "null"},
		"map is an array":      {regular(IndexName, "model.safetensors"), `{"weight_map":["a"]}`, "", CodeIndexWeightMap, "array"},
		"value no string":      {regular(IndexName, "model.safetensors"), `{"weight_map":{"t\n":1}}`, "", CodeIndexWeightMap, `"t\n"`},
		"tensor twice":         {regular(IndexName, "a.safetensors"), `{"weight_map":{"t":"a.safetensors","t":"a.safetensors"}}`, "", CodeIndexNotJSON, "twice"},
		"member twice":         {regular(IndexName, "a.safetensors"), `{"x":{"y":1,"y":2},"weight_map":{"t":"a.safetensors"}}`, "", CodeIndexNotJSON, "twice"},
		"value with a slash":   {regular(IndexName, "a/b.safetensors"), `{"weight_map":{"t":"a/b.safetensors"}}`, "", CodeNotPortableName, "a/b"},
		"value with a parent":  {regular(IndexName), `{"weight_map":{"t":"../b.safetensors"}}`, "", CodeNotPortableName, ".."},
		"value is a parent":    {regular(IndexName), `{"weight_map":{"t":".."}}`, "", CodeNotPortableName, ".."},
		"value empty":          {regular(IndexName), `{"weight_map":{"t":""}}`, "", CodeNotPortableName, `""`},
		"value of 256 bytes":   {regular(IndexName, long), `{"weight_map":{"t":"` + long + `"}}`, "", CodeNotPortableName, "256 bytes"},
		"value of 255 bytes":   {regular(IndexName, long[1:]), `{"weight_map":{"t":"` + long[1:] + `"}}`, long[1:], "", ""},
		"value no safetensors": {regular(IndexName, "a.bin"), `{"weight_map":{"t":"a.bin"}}`, "", CodeNotPortableName, "a.bin"},
		"value in upper case":  {regular(IndexName, "a.SAFETENSORS"), `{"weight_map":{"t":"a.SAFETENSORS"}}`, "", CodeNotPortableName, ""},
		"two missing": {regular(IndexName, "b.safetensors", "c.safetensors.incomplete"),
			`{"weight_map":{"t":"a.safetensors","u":"b.safetensors","v":"c.safetensors"}}`, "", CodeIndexMissingFile,
			"2 are missing: a.safetensors, c.safetensors; unfinished downloads are there: c.safetensors.incomplete"},
		"adapter":             {regular("adapter_model.safetensors", "adapter_config.json"), "", "", CodeAdapterNotBase, ""},
		"adapter beside base": {regular("model.safetensors", "adapter_model.safetensors", "adapter_config.json"), "", "model.safetensors", "", ""},
		"adapter name alone":  {regular("adapter_model.safetensors"), "", "adapter_model.safetensors", "", ""},
	} {
		read := noIndex
		if slices.ContainsFunc(c.entries, func(e Entry) bool { return e.Name == IndexName && e.Mode == Regular && e.Size <= MaxIndex }) {
			read = func() ([]byte, error) { return []byte(c.index), nil }
		}
		s, err := Select(c.entries, read)
		if c.code == "" {
			if err != nil || strings.Join(s.Shards, " ") != c.shards || s.FromIndex != (c.index != "") {
				t.Errorf("%s: got %.200q (index %v), %v", name, s.Shards, s.FromIndex, err)
			}
			continue
		}
		var e *Error
		if !errors.As(err, &e) || e.Code != c.code || !strings.Contains(err.Error(), c.says) || s.Shards != nil {
			t.Errorf("%s: got %v, want %s saying %q", name, err, c.code, c.says)
		} else if strings.ContainsAny(err.Error(), "\n\r") {
			t.Errorf("%s: %q is not one line", name, err)
		}
	}
}

func TestSelectReadError(t *testing.T) {
	_, err := Select(regular(IndexName), func() ([]byte, error) { return nil, io.ErrUnexpectedEOF })
	var e *Error
	if !errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &e) || !strings.Contains(err.Error(), IndexName) {
		t.Errorf("got %v", err)
	}
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
		"whole family":    {regular("m-1-of-2.safetensors", "m-2-of-2.safetensors"), nil},
		"no family":       {regular("of-of-x.safetensors", "a-of-2.safetensors", "x-1-of-9999999.safetensors"), nil},
		"one family of 2": {regular("a-1-of-1.safetensors", "b-1-of-2.safetensors"), []string{WarnFamilyIncomplete, ": b-2-of-2.safetensors"}},
		"odd numbers":     {regular("a-0-of-2.safetensors", "a-3-of-2.safetensors"), []string{WarnFamilyIncomplete, "2 of 2 files"}},
		"many missing": {family(1, 30), []string{WarnFamilyIncomplete,
			"28 of 30 files of a numbered set are missing: m-00002-of-00030.safetensors, "}},
		"the rest counted": {family(1, 30), []string{WarnFamilyIncomplete, "m-00011-of-00030.safetensors and 18 more"}},
		"huge total":       {regular("m-1-of-999999.safetensors"), []string{WarnFamilyIncomplete, "999998 of 999999"}},
		"three alike": {regular("a.safetensors", "A.safetensors", "b.safetensors"),
			[]string{WarnCaseCollision, "A.safetensors, a.safetensors"}},
		"reserved":     {regular("COM1.x.safetensors", "com0.safetensors", "nul.safetensors"), []string{WarnWindowsReserved, "COM1.x.safetensors, nul.safetensors"}},
		"odd extra":    {append(regular("model.safetensors"), Entry{Name: "x\n.safetensors", Size: 7}), []string{WarnExtra, `"x\n.safetensors" (7 bytes)`}},
		"many extra":   {append(regular("model.safetensors"), family(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)...), []string{WarnExtra, "2 more"}},
		"extra folder": {append(regular("model.safetensors"), Entry{Name: "d.safetensors", Mode: Dir}), []string{WarnExtra, "d.safetensors"}},
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
			if w.Code != c.want[2*i] || !strings.Contains(w.Message, c.want[2*i+1]) || strings.Contains(w.Message, "\n") || len(w.Names) == 0 {
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
