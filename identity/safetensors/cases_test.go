package safetensors

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/testenv"
)

// says holds what the message on a field case must contain.
var says = map[string][]string{
	"ST-01": {"model.safetensors: ", "0 bytes"},
	"ST-02": {"model.safetensors: ", "3 bytes"},
	"ST-03": {"5 short"},
	"ST-04": {"4096 bytes"},
	"ST-06": {"100000001 bytes", "at most 100000000"},
	"ST-07": {"git-lfs pointer", "sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393",
		"5329398688 bytes", "fetch"},
	"ST-08": {"503 Backend fetch failed"},
	"ST-09": {`"a" twice`},
	"ST-11": {`"b"`, "16-32"},
	"ST-12": {`"a"`, `"b"`},
	"ST-13": {`"lm_head.weight"`, `"embed.weight"`},
	"ST-14": {"19 bytes follow"},
	"ST-15": {"4000000 bytes", "has 16"},
	"ST-17": {`"a"`, "16", "0"},
	"ST-18": {`"a"`, "-16"},
	"ST-19": {`"a"`, "Q4_K"},
	"ST-20": {`"step"`},
	"ST-24": {`"e"`, `"a"`},
	"ST-27": {"at byte 55"},
	"ST-34": {"torch", "zip"},
	"ST-35": {"at byte 5 "},
	"ST-38": {"24 short"},
	"ID-05": {"model-00002-of-00002.safetensors"},
	"ID-13": {"text_encoder, unet, vae"},
	"ID-15": {"hub cache", "must be regular", "../../blobs/"},
	"ID-16": {"model-00002-of-00002.safetensors", "abababab", "missing"},
	"ID-20": {"b.safetensors"},
	"ID-22": {"folder"},
	"ID-23": {"model-00002-of-00002.safetensors"},
	"ID-25": {"git-lfs pointer"},
	"ID-32": {`"mod\u00e8le.safetensors"`, `"mode\u0300le.safetensors"`},
	"ID-36": {"model-00002-of-00002.safetensors", "git-lfs pointer"},
	"ID-43": {IndexName, "elsewhere.json"},
}

// warned holds what a warning must contain.
var warned = map[string][]string{
	"ID-07": {"consolidated.safetensors (", " bytes)"},
	"ID-08": {"model.fp16.safetensors"},
	"ID-11": {"model-00002-of-00003.safetensors"},
	"ID-28": {"MODEL.safetensors, Model.safetensors"},
	"ID-30": {"aux.safetensors, con.safetensors, lpt1.model.safetensors"},
}

func checkRefused(t *testing.T, id string, err error, code string) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) || e.Code != code {
		t.Errorf("%s: got %v, want %s", id, err, code)
		return
	}
	checkText(t, id, err.Error(), says[id])
}

func checkText(t *testing.T, id, text string, parts []string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("%s: %q does not say %q", id, text, part)
		}
	}
	if strings.ContainsAny(text, "\n\r\x00") {
		t.Errorf("%s: %q is not one line", id, text)
	}
}

func readFile(t *testing.T, path string) (Header, error) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	h, err := Read(f, info.Size())
	return h, InFile(filepath.Base(path), err)
}

func TestFieldFiles(t *testing.T) {
	dir := testenv.FieldCases(t)
	ran := 0
	for id, c := range testenv.Expected(t, dir) {
		if c.Kind != "st" {
			continue
		}
		ran++
		h, err := readFile(t, filepath.Join(dir, id, "model.safetensors"))
		if c.Verdict != "accept" {
			checkRefused(t, id, err, c.Code)
		} else if err != nil {
			t.Errorf("%s: %v", id, err)
		}
		switch id {
		case "ST-19":
			if len(h.Tensors) != 1 {
				t.Error("ST-19: no header beside the unknown dtype")
			}
		case "ST-21":
			if h.Metadata == nil || len(h.Metadata) != 0 || len(h.Tensors) != 1 {
				t.Errorf("ST-21: %+v", h)
			}
		case "ST-22":
			if s := h.Tensors[0]; len(s.Shape) != 0 || s.End != 4 {
				t.Errorf("ST-22: %+v", s)
			}
		case "ST-28":
			if h.Tensors[0].Name != "z" || h.Tensors[1].Name != "a" {
				t.Errorf("ST-28: not in the order of offsets: %+v", h.Tensors)
			}
		case "ST-32":
			if h.Tensors[0].Name != "model.Größe.層.w\n\"x\\" {
				t.Errorf("ST-32: %q", h.Tensors[0].Name)
			}
		case "ST-37":
			if len(h.Tensors) != 20000 || h.Tensors[19999].Name != "blk.19999.w" {
				t.Errorf("ST-37: %d tensors", len(h.Tensors))
			}
		}
	}
	if ran < 30 {
		t.Errorf("only %d file cases", ran)
	}
}

// list lists a folder for Select, links followed or not.
func list(t *testing.T, dir string, follow bool) (entries []Entry) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		e := Entry{Name: name}
		if info.Mode()&fs.ModeSymlink != 0 {
			e.Mode = Symlink
			if e.Target, err = os.Readlink(path); err != nil {
				return err
			}
			to, err := os.Stat(path)
			e.Broken = err != nil
			if err != nil || !follow {
				entries = append(entries, e)
				return nil
			}
			info = to
		}
		switch {
		case info.Mode().IsRegular():
			e.Mode, e.Size = Regular, info.Size()
		case info.IsDir():
			e.Mode = Dir
		default:
			e.Mode = Other
		}
		entries = append(entries, e)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return entries
}

// identify selects the shards of a folder, checks their headers and sums them.
func identify(t *testing.T, dir string, follow bool) (Selection, identity.Manifest, error) {
	t.Helper()
	s, err := Select(list(t, dir, follow), func() ([]byte, error) { return os.ReadFile(filepath.Join(dir, IndexName)) })
	if err != nil {
		return s, identity.Manifest{}, err
	}
	var shards []identity.Shard
	for _, n := range s.Shards {
		if _, err := readFile(t, filepath.Join(dir, n)); err != nil {
			return s, identity.Manifest{}, err
		}
		data, err := os.ReadFile(filepath.Join(dir, n))
		if err != nil {
			t.Fatal(err)
		}
		shards = append(shards, identity.Shard{Filename: n, Size: uint64(len(data)), Digest: identity.Sum(data)})
	}
	m, err := identity.New(shards)
	return s, m, err
}

func TestFieldFolders(t *testing.T) {
	dir := testenv.FieldCases(t)
	ran := 0
	for id, c := range testenv.Expected(t, dir) {
		if c.Kind != "dir" {
			continue
		}
		ran++
		root := filepath.Join(dir, id)
		if id == "ID-15" {
			root = filepath.Join(root, "snapshots", "rev0")
		}
		s, m, err := identify(t, root, false)
		if c.Verdict == "reject" {
			checkRefused(t, id, err, c.Code)
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", id, err)
			continue
		}
		if !slices.Equal(s.Shards, c.Shards) || m.Aggregate.String() != c.Aggregate {
			t.Errorf("%s: got %q %v, want %q %s", id, s.Shards, m.Aggregate, c.Shards, c.Aggregate)
		}
		checkWarnings(t, id, s, c)
	}
	if ran < 27 {
		t.Errorf("only %d folder cases", ran)
	}
	for _, id := range []string{"ID-16", "ID-18"} {
		_, _, err := identify(t, filepath.Join(dir, id), true)
		checkRefused(t, id, err, CodeSymlink)
	}
	want := testenv.Expected(t, dir)["ID-15"]
	s, m, err := identify(t, filepath.Join(dir, "ID-15", "snapshots", "rev0"), true)
	if err != nil || m.Aggregate.String() != want.AggregateIfFollowed || !slices.Equal(s.Shards, want.Shards) {
		t.Errorf("ID-15 followed: %v %q, %v", m.Aggregate, s.Shards, err)
	}
}

func checkWarnings(t *testing.T, id string, s Selection, c testenv.Expectation) {
	t.Helper()
	if c.Verdict == "accept" {
		if len(s.Warnings) > 0 {
			t.Errorf("%s: warned of %+v", id, s.Warnings)
		}
		if id == "ID-35" && !slices.Equal(s.Leftovers, []string{"model-00002-of-00002.safetensors.incomplete"}) {
			t.Errorf("ID-35: leftovers %q", s.Leftovers)
		}
		return
	}
	i := slices.IndexFunc(s.Warnings, func(w Warning) bool { return w.Code == c.Code })
	if i < 0 || len(s.Warnings) != 1 {
		t.Errorf("%s: got %+v, want %s alone", id, s.Warnings, c.Code)
		return
	}
	checkText(t, id, s.Warnings[i].Message, warned[id])
}
