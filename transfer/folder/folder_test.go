package folder

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/internal/testenv"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(testlanes.Use(m)) }

// expected is what the shared cases say about one folder.
type expected struct {
	Kind, Verdict, Code string
	Aggregate           string
	Followed            string `json:"aggregate_if_followed"`
	Shards              []string
}

// says is what the refusal or the warning of a case must mention besides its code.
var says = map[string][]string{
	"ID-05": {"model-00002-of-00002.safetensors"},
	"ID-07": {"consolidated.safetensors", "bytes"},
	"ID-08": {"model.fp16.safetensors"},
	"ID-11": {"model-00002-of-00003.safetensors"},
	"ID-13": {"unet", "vae", "text_encoder"},
	"ID-15": {"Hugging Face", "must be regular", "blobs/"},
	"ID-16": {"model-00002-of-00002.safetensors", "../../blobs/abab", "missing"},
	"ID-18": {"circle"},
	"ID-20": {"b.safetensors"},
	"ID-28": {"Model.safetensors", "MODEL.safetensors"},
	"ID-30": {"con.safetensors", "lpt1.model.safetensors"},
	"ID-32": {`mod\u00e8le`, `mode\u0300le`},
	"ID-36": {"model-00002-of-00002.safetensors", "git-lfs"},
	"ID-43": {"model.safetensors.index.json", "must be regular"},
	"ST-02": {"model.safetensors", "3 bytes"},
}

func cases(t *testing.T) (string, map[string]expected) {
	t.Helper()
	dir := testenv.FieldCases(t)
	b, err := os.ReadFile(filepath.Join(dir, "expected.json"))
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]expected
	if err := json.Unmarshal(b, &all); err != nil {
		t.Fatal(err)
	}
	return dir, all
}

// identify is what every command does with a folder first.
func identify(t *testing.T, dir string, o Options) (Sum, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	f, err := Open(dir, o)
	if err != nil {
		return Sum{}, err
	}
	return f.Sum(ctx, nil)
}

func TestFieldCases(t *testing.T) {
	dir, all := cases(t)
	ran := 0
	for id, want := range all {
		if want.Kind != "dir" && want.Kind != "st" {
			continue
		}
		ran++
		t.Run(id, func(t *testing.T) {
			root := filepath.Join(dir, id)
			if id == "ID-15" {
				root = filepath.Join(root, "snapshots", "rev0")
			}
			before := listing(t, root)
			sum, err := identify(t, root, Options{})
			check(t, id, want, sum, err)
			if id != "ST-01" && want.Followed != "" || want.Code == "symlink_shard" {
				followed, err := identify(t, root, Options{FollowLinks: true})
				checkFollowed(t, id, want, followed, err)
			}
			if after := listing(t, root); before != after {
				t.Errorf("the folder was changed:\n%s\nto\n%s", before, after)
			}
		})
	}
	if ran < 50 {
		t.Errorf("only %d cases ran", ran)
	}
}

func check(t *testing.T, id string, want expected, sum Sum, err error) {
	t.Helper()
	said := ""
	var rule *safetensors.Error
	switch {
	case want.Verdict == "reject" && !errors.As(err, &rule):
		t.Fatalf("got %v, %v, want %s", sum.Manifest.Aggregate, err, want.Code)
	case want.Verdict == "reject":
		// An empty file is both too short for a header and no shard; the second is seen first.
		if rule.Code != want.Code && !(id == "ST-01" && rule.Code == safetensors.CodeEmptyShard) {
			t.Errorf("refused as %s, want %s", rule.Code, want.Code)
		}
		said = err.Error()
	case err != nil:
		t.Fatalf("refused: %v", err)
	default:
		var codes []string
		for _, w := range sum.Warnings {
			said += w.Message + "\n"
			codes = append(codes, w.Code)
		}
		if want.Verdict == "warn" && !slices.Contains(codes, want.Code) {
			t.Errorf("warned of %v, want %s", codes, want.Code)
		}
		if want.Verdict == "accept" && len(slices.DeleteFunc(codes, func(c string) bool { return c == WarnLeftover })) > 0 {
			t.Errorf("warned of %s", said)
		}
		checkManifest(t, want, want.Aggregate, sum.Manifest)
	}
	for _, text := range says[id] {
		if !strings.Contains(said, text) {
			t.Errorf("said %q, which does not mention %q", said, text)
		}
	}
	if strings.ContainsAny(strings.TrimSuffix(said, "\n"), "\x00\r") {
		t.Errorf("said %q", said)
	}
}

func checkFollowed(t *testing.T, id string, want expected, sum Sum, err error) {
	t.Helper()
	switch {
	case want.Followed != "" && err != nil:
		t.Errorf("with links followed: %v", err)
	case want.Followed != "":
		checkManifest(t, want, want.Followed, sum.Manifest)
	case id == "ID-43":
		if err != nil {
			t.Errorf("index behind a link: %v", err)
		}
	case err == nil || !strings.Contains(err.Error(), "missing"):
		t.Errorf("with links followed: %v", err)
	}
}

func checkManifest(t *testing.T, want expected, aggregate string, m identity.Manifest) {
	t.Helper()
	var names []string
	for _, s := range m.Shards {
		names = append(names, s.Filename)
	}
	if aggregate != "" && (m.Aggregate.String() != aggregate || !slices.Equal(names, want.Shards)) {
		t.Errorf("%s over %v, want %s over %v", m.Aggregate, names, aggregate, want.Shards)
	}
}

func listing(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		b.WriteString(path + " " + info.Mode().String() + " " + info.ModTime().String() + "\n")
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// shard is a small valid file with one tensor of n bytes.
func shard(n int) []byte {
	header := `{"w":{"dtype":"U8","shape":[` + itoa(n) + `],"data_offsets":[0,` + itoa(n) + `]}}`
	for len(header)%8 != 0 {
		header += " "
	}
	b := append([]byte{byte(len(header)), byte(len(header) >> 8), 0, 0, 0, 0, 0, 0}, header...)
	return append(b, make([]byte, n)...)
}

func itoa(n int) string { b, _ := json.Marshal(n); return string(b) }

func write(t *testing.T, dir string, files map[string][]byte) {
	t.Helper()
	for name, b := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestChanged changes a file in every way while it is being read.
func TestChanged(t *testing.T) {
	const size = 4 * Piece
	for name, change := range map[string]func(path string) error{
		"grows": func(path string) error {
			f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteString("more")
			return errors.Join(err, f.Close())
		},
		"shrinks": func(path string) error { return os.Truncate(path, 3*Piece) },
		"is rewritten": func(path string) error {
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteAt([]byte{1}, 3*Piece)
			return errors.Join(err, f.Close(), os.Chtimes(path, time.Time{}, time.Now().Add(time.Hour)))
		},
		"is replaced": func(path string) error {
			if err := os.WriteFile(path+".new", shard(size), 0o644); err != nil {
				return err
			}
			return os.Rename(path+".new", path)
		},
		"is removed": os.Remove,
	} {
		dir := t.TempDir()
		write(t, dir, map[string][]byte{"model.safetensors": shard(size)})
		f, err := Open(dir, Options{})
		if err != nil {
			t.Fatal(err)
		}
		once := false
		_, err = f.Sum(t.Context(), func(file File, done int64) {
			if !once && done > Piece {
				once = true
				if err := change(filepath.Join(dir, file.Name)); err != nil {
					t.Error(err)
				}
			}
		})
		if !errors.Is(err, ErrChanged) || !strings.Contains(err.Error(), "model.safetensors") {
			t.Errorf("%s: %v", name, err)
		}
		if _, _, err := f.Read(f.Shards[0]); err == nil {
			t.Errorf("%s: opened for sending", name)
		}
	}
}

// TestSnapshot changes the source after the snapshot was taken: the identity stays.
func TestSnapshot(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "model")
	os.Mkdir(dir, 0o755)
	write(t, dir, map[string][]byte{"model.safetensors": shard(100), "config.json": []byte("{}")})
	f, err := Open(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	want, err := f.Sum(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	s, remove, err := f.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	found, _ := filepath.Glob(filepath.Join(parent, ".kiln-model-snapshot-*"))
	if len(found) != 1 {
		t.Fatalf("snapshots beside the source: %v", found)
	}
	if info, err := os.Stat(found[0]); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("folder: %v, %v", info.Mode(), err)
	}
	if info, err := os.Stat(filepath.Join(found[0], "model.safetensors")); err != nil || info.Mode().Perm() != 0o400 {
		t.Errorf("file: %v, %v", info, err)
	}
	write(t, dir, map[string][]byte{"model.safetensors": shard(99), "config.json": []byte("[]")})
	got, err := s.Sum(t.Context(), nil)
	if err != nil || got.Manifest.Aggregate != want.Manifest.Aggregate {
		t.Errorf("%v, %v", got.Manifest, err)
	}
	r, unchanged, err := s.Read(s.Others[0])
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(r); string(b) != "{}" || err != nil || unchanged() != nil {
		t.Errorf("config of the snapshot: %q, %v", b, err)
	}
	r.Close()
	if err := remove(); err != nil {
		t.Error(err)
	}
	if found, _ := filepath.Glob(filepath.Join(parent, ".kiln-*")); len(found) != 0 {
		t.Errorf("left behind: %v", found)
	}
	if _, _, err := f.Snapshot(t.Context()); !errors.Is(err, ErrChanged) {
		t.Errorf("snapshot of a changed file: %v", err)
	}
	if found, _ := filepath.Glob(filepath.Join(parent, ".kiln-*")); len(found) != 0 {
		t.Errorf("left behind: %v", found)
	}
}

// TestSnapshotLeftovers: what a killed process left goes with the next snapshot, and what another one uses stays.
func TestSnapshotLeftovers(t *testing.T) {
	parent := filepath.Join(t.TempDir(), "a[1-2]*b")
	dir := filepath.Join(parent, "model")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, dir, map[string][]byte{"model.safetensors": shard(100)})
	f, err := Open(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	live, remove, err := f.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dead, file := filepath.Join(parent, ".kiln-model-snapshot-1"), filepath.Join(parent, ".kiln-model-snapshot-2")
	if err := os.Mkdir(dead, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, dead, map[string][]byte{"model.safetensors": shard(100)})
	write(t, parent, map[string][]byte{filepath.Base(file): nil})
	_, removeNext, err := f.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(dead); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the leftover: %v", err)
	}
	if _, err := os.Lstat(file); err != nil {
		t.Errorf("a file of such a name: %v", err)
	}
	if _, err := live.Sum(t.Context(), nil); err != nil {
		t.Errorf("the snapshot in use: %v", err)
	}
	if err := errors.Join(remove(), removeNext()); err != nil {
		t.Error(err)
	}
}

func TestSnapshotElsewhere(t *testing.T) {
	dir, elsewhere := t.TempDir(), t.TempDir()
	t.Setenv("KILN_SNAPSHOT_DIR", elsewhere)
	write(t, dir, map[string][]byte{"model.safetensors": shard(100)})
	f, err := Open(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	_, remove, err := f.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if found, _ := filepath.Glob(filepath.Join(elsewhere, ".kiln-model-snapshot-*")); len(found) != 1 {
		t.Errorf("in the chosen folder: %v", found)
	}
	if err := remove(); err != nil {
		t.Error(err)
	}
}

func TestOthers(t *testing.T) {
	dir := t.TempDir()
	along := []string{"config.json", "merges.txt", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "modeling_x.py",
		"LICENSE", "README.md", "1_Pooling/config.json", "a/b/template.jinja"}
	files := map[string][]byte{"model.safetensors": shard(8)}
	for _, name := range append(along, "checkpoint-5/config.json", "checkpoint-5/model.safetensors", ".cache/x.json",
		"1_Pooling/notes.log", "1_Pooling/.hidden.json", ".hidden.json", "x.incomplete", "pytorch_model.bin", "optimizer.pt", "run.sh",
		"LICENSE.exe", "config.json.tmp", "bad\nname.json") {
		files[name] = []byte(name)
	}
	write(t, dir, files)
	os.Mkdir(filepath.Join(dir, "original"), 0o755)
	os.Mkdir(filepath.Join(dir, "folder.json"), 0o755)
	os.Symlink("config.json", filepath.Join(dir, "generation_config.json"))
	for follow, want := range map[bool][]string{false: along, true: append(along, "generation_config.json")} {
		f, err := Open(dir, Options{FollowLinks: follow})
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, o := range f.Others {
			names = append(names, o.Name)
		}
		slices.Sort(names)
		if slices.Sort(want); !slices.Equal(names, want) {
			t.Errorf("went along: %q, want %q", names, want)
		}
		if !slices.ContainsFunc(f.Warnings, func(w safetensors.Warning) bool {
			return w.Code == WarnApart && slices.Equal(w.Names, []string{"checkpoint-5"})
		}) {
			t.Errorf("no word of the folder with weights of its own: %v", f.Warnings)
		}
		s, remove, err := f.Snapshot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for i, o := range s.Others {
			if b, err := os.ReadFile(o.path); err != nil || string(b) != string(files[o.Name]) && o.Name != "generation_config.json" {
				t.Errorf("snapshot of %s: %q, %v", f.Others[i].Name, b, err)
			}
		}
		if err := remove(); err != nil {
			t.Error(err)
		}
		warned := slices.ContainsFunc(f.Warnings, func(w safetensors.Warning) bool {
			return w.Code == WarnLinked && strings.Contains(w.Message, "generation_config.json")
		})
		if warned == follow {
			t.Errorf("links followed %t, warned of one left out %t", follow, warned)
		}
	}
}

func TestUnknownDType(t *testing.T) {
	dir := t.TempDir()
	b := slices.Clone(shard(8))
	copy(b[strings.Index(string(b), `"U8"`):], `"U9"`)
	write(t, dir, map[string][]byte{"model.safetensors": b})
	_, err := identify(t, dir, Options{})
	var rule *safetensors.Error
	if !errors.As(err, &rule) || rule.Code != safetensors.CodeUnknownDType {
		t.Errorf("got %v", err)
	}
	sum, err := identify(t, dir, Options{AnyDType: true})
	if err != nil || len(sum.Warnings) != 1 || sum.Manifest.Shards[0].Digest != identity.Sum(b) {
		t.Errorf("asked for: %+v, %v", sum, err)
	}
}

func TestCancelled(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string][]byte{"model.safetensors": shard(4 * Piece)})
	f, err := Open(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	_, err = f.Sum(ctx, func(File, int64) { cancel() })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}
