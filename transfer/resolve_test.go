package transfer_test

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// answer makes the proxy answer for a manifest, as a registry would that takes any.
func (s *site) answer(body string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if !strings.Contains(r.URL.Path, "/manifests/") {
			next.ServeHTTP(w, r)
			return
		}
		w.Header().Set("Content-Type", v1.MediaTypeImageManifest)
		fmt.Fprint(w, body)
	}
}

const layer = `{"mediaType":%q,"digest":"sha256:%064d","size":%d,"annotations":{%s}}`

func layers(all ...string) string {
	return `{"schemaVersion":2,"layers":[` + strings.Join(all, ",") + `]}`
}

func named(name string) string {
	return fmt.Sprintf(layer, api.MediaTypeWeightConfig, 1, 5, fmt.Sprintf(`"org.cncf.model.filepath":%q`, name))
}

func typed(mediaType, annotations string) string {
	return fmt.Sprintf(layer, mediaType, 1, 5, annotations)
}

func TestRefusedManifests(t *testing.T) {
	const title = `"org.opencontainers.image.title":"a.txt"`
	tests := map[string]struct{ manifest, want string }{
		"absolute":      {layers(named("/etc/passwd")), "absolute"},
		"up":            {layers(named("../a")), `".."`},
		"up inside":     {layers(named("a/../../b")), `".."`},
		"dot":           {layers(named("./a")), `"."`},
		"folder":        {layers(named("a/")), `""`},
		"backslash":     {layers(named(`a\b`)), "backslash"},
		"nul":           {layers(strings.Replace(named("aXb"), "X", `\u0000`, 1)), "control character"},
		"newline":       {layers(named("a\nb")), "control character"},
		"C1":            {layers(named("a\u009bb")), "control character"},
		"bidi":          {layers(named("a\u202eb")), "control character"},
		"isolate":       {layers(named("a\u2066b")), "control character"},
		"long":          {layers(named(strings.Repeat("x", 256))), "255"},
		"twice":         {layers(named("a"), named("a")), "two files"},
		"file, folder":  {layers(named("a"), named("a/b")), "a file and a folder"},
		"two names":     {layers(typed("x/y.raw", title+`,"org.cncf.model.filepath":"b.txt"`)), "two names"},
		"no name":       {layers(typed("application/octet-stream", "")), "names no file"},
		"tar":           {layers(typed("application/vnd.cncf.model.weight.v1.tar", title)), "tar archive"},
		"image layer":   {layers(typed(v1.MediaTypeImageLayer, "")), "tar archive"},
		"gzip":          {layers(typed("application/vnd.oci.image.layer.v1.tar+gzip", title)), "compressed"},
		"docker":        {layers(typed("application/vnd.docker.image.rootfs.diff.tar.gzip", title)), "compressed"},
		"parameter":     {layers(typed("application/json;+gzip", title)), "compressed"},
		"upper case":    {layers(typed("application/vnd.x+ZSTD", title)), "compressed"},
		"packed folder": {layers(typed(v1.MediaTypeImageLayer, title+`,"io.deis.oras.content.unpack":"true"`)), "packed folder"},
		"kitops":        {layers(typed("application/vnd.kitops.modelkit.model.v1.tar", title)), "archive"},
		"index":         {`{"schemaVersion":2,"manifests":[{"digest":"sha256:00"}]}`, "index of 1 manifests"},
		"nothing":       {layers(), "no files"},
		"not JSON":      {`hello`, "invalid character"},
		"sha512":        {layers(`{"mediaType":"a.raw","digest":"sha512:00","size":1,"annotations":{` + title + `}}`), "sha512"},
		"negative size": {layers(fmt.Sprintf(layer, "a.raw", 1, -5, title)), "-5 bytes"},
		"sizes overflow": {layers(named("b"), fmt.Sprintf(layer, "a.raw", 1, int64(1<<63-1), title)),
			"add up"},
	}
	s := newSite(t)
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			s.answer(tt.manifest)
			_, err := transfer.Resolve(t.Context(), s.c, client.Reference{Host: s.host, Repo: "m", Tag: "v1"})
			if !errors.Is(err, transfer.ErrArtifact) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %s", err, tt.want)
			}
		})
	}
	_, err := transfer.Resolve(t.Context(), s.c, client.Reference{Host: s.host, Repo: "m"})
	if !errors.Is(err, transfer.ErrNoTag) {
		t.Errorf("without a tag: %v", err)
	}
}

// TestForeignNames: what oras and modctl push is read as files.
func TestForeignNames(t *testing.T) {
	s := newSite(t)
	s.answer(layers(
		typed(v1.MediaTypeImageLayer, `"org.opencontainers.image.title":"model.safetensors"`),
		typed("application/x-gzip", `"org.cnai.model.filepath":"sub/x.json"`),
		typed("application/vnd.cncf.model.doc.v1.raw", `"org.cncf.model.filepath":"README.md"`),
		typed(v1.MediaTypeEmptyJSON, ``)))
	p, err := transfer.Resolve(t.Context(), s.c, client.Reference{Host: s.host, Repo: "m", Tag: "v1"})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range p.Files {
		names = append(names, f.Name)
	}
	if got := strings.Join(names, " "); got != "README.md model.safetensors sub/x.json" || p.NoBase != nil ||
		len(p.Encoded) != 1 || p.Encoded[0] != "sub/x.json" {
		t.Errorf("got %s, %v", got, p.NoBase)
	}
}

// TestNoBase: shards inside an artifact that is not a base give it no identity, and it can be pulled.
func TestNoBase(t *testing.T) {
	s := newSite(t)
	files := map[string][]byte{"adapter_model.safetensors": shard(5000, 1), "adapter_config.json": []byte("{}")}
	m := v1.Manifest{MediaType: v1.MediaTypeImageManifest, ArtifactType: api.ArtifactTypeAdapter}
	m.SchemaVersion = 2
	m.Config = s.blob("m", []byte("{}"), v1.MediaTypeEmptyJSON, "")
	for _, name := range sortedKeys(files) {
		m.Layers = append(m.Layers, s.blob("m", files[name], api.MediaTypeWeight, name))
	}
	s.manifest("m", "v1", m)
	if p := s.resolve("m", "v1"); p.NoBase == nil || !p.Aggregate.IsZero() {
		t.Errorf("an adapter was given the identity %s", p.Aggregate)
	}
	s.pull(filepath.Join(t.TempDir(), "m"), files)
}

func TestAggregate(t *testing.T) {
	s := newSite(t)
	files := map[string][]byte{"model.safetensors": shard(5000, 1), "config.json": []byte("{}")}
	renamed := map[string][]byte{"weights.safetensors": files["model.safetensors"], "config.json": []byte("{}")}
	template := maps.Clone(files)
	template["chat.jinja"] = []byte("x")
	s.push("a/m", "v1", files)
	want := s.resolve("a/m", "v1")
	resolve := func(repo string) (transfer.Plan, error) {
		return transfer.ResolveAggregate(t.Context(), s.past, want.Aggregate, repo)
	}
	if p, err := resolve(""); err != nil || p.Manifest != want.Manifest || p.Repository != "a/m" {
		t.Fatalf("one packaging: %v, %v", p.Reference(), err)
	}
	s.push("b/m", "v1", renamed)
	if p, err := resolve(""); err != nil || p.Aggregate != want.Aggregate {
		t.Fatalf("two packagings that differ in the names of shards: %v, %v", p.Reference(), err)
	}
	third := s.push("c/m", "v1", template)
	_, err := resolve("")
	var differ *transfer.PackagingsError
	if !errors.As(err, &differ) || len(differ.Differences) != 1 || differ.Differences[0].Name != "chat.jinja" ||
		!strings.Contains(err.Error(), "chat.jinja") {
		t.Fatalf("packagings that differ in a template: %v", err)
	}
	for i, p := range differ.Plans {
		if absent := differ.Differences[0].Digests[i].IsZero(); absent == (p.Repository == "c/m") {
			t.Errorf("%s: template absent: %v", p.Repository, absent)
		}
	}
	if p, err := resolve("c/m"); err != nil || p.Manifest != third {
		t.Errorf("one repository of several: %v, %v", p.Reference(), err)
	}
	if _, err := resolve("d/m"); !errors.Is(err, api.ErrAggregateUnknown) {
		t.Errorf("a repository without it: %v", err)
	}
	_, err = transfer.ResolveAggregate(t.Context(), s.past, identity.Aggregate{1}, "")
	if !errors.Is(err, api.ErrAggregateUnknown) {
		t.Errorf("an unknown aggregate: %v", err)
	}
}

// TestUnpullable: many newer manifests that can't be pulled, each dressed in its own way, hide none that can.
func TestUnpullable(t *testing.T) {
	s := newSite(t)
	files := map[string][]byte{"model.safetensors": shard(5000, 1), "config.json": []byte("{}")}
	good := s.push("a/m", "v1", files)
	want := s.resolve("a/m", "v1").Aggregate
	m := v1.Manifest{MediaType: v1.MediaTypeImageManifest}
	m.SchemaVersion = 2
	m.Config = s.blob("evil/m", []byte("{}"), v1.MediaTypeEmptyJSON, "")
	m.Layers = []v1.Descriptor{s.blob("evil/m", files["model.safetensors"], api.MediaTypeWeight, "model.safetensors"),
		s.blob("evil/m", files["config.json"], api.MediaTypeWeightConfig, "config.json")}
	for i := range 70 {
		m.Layers[1].MediaType = fmt.Sprintf("application/vnd.x%d+zstd", i)
		s.manifest("evil/m", fmt.Sprint("v", i), m)
	}
	p, err := transfer.ResolveAggregate(t.Context(), s.past, want, "")
	if err != nil || p.Manifest != good || !errors.Is(p.Passed, transfer.ErrArtifact) {
		t.Errorf("%s, %v, %v", p.Reference(), p.Passed, err)
	}
	if _, err := transfer.ResolveAggregate(t.Context(), s.past, want, "evil/m"); !errors.Is(err, transfer.ErrArtifact) {
		t.Errorf("none that can be pulled: %v", err)
	}
	if p, err := transfer.ResolveAggregate(t.Context(), s.past, want, "a/m:v1"); err != nil || p.Manifest != good {
		t.Errorf("by its tag: %v", err)
	}
}

func TestVerify(t *testing.T) {
	dir := t.TempDir()
	files := map[string][]byte{"a": []byte("aaaa"), "sub/b": []byte("bbbb"), "c": []byte("cccc"), "d": []byte("dddd"), "e": nil}
	var want []staging.File
	for _, name := range sortedKeys(files) {
		write(t, filepath.Join(dir, name), files[name])
		want = append(want, staging.File{Name: name, Size: int64(len(files[name])), Digest: identity.Sum(files[name])})
	}
	check := func(extra bool, codes ...string) {
		t.Helper()
		v, err := transfer.Verify(t.Context(), dir, want, transfer.VerifyOptions{Extra: extra})
		var got []string
		for _, f := range v.Findings {
			got = append(got, f.String())
		}
		if err != nil || len(got) != len(codes) {
			t.Fatalf("got %q, %v", got, err)
		}
		for i, c := range codes {
			if !strings.HasPrefix(got[i], c) {
				t.Errorf("got %q, want %q", got[i], c)
			}
		}
	}
	check(true)
	write(t, filepath.Join(dir, "a"), []byte("aaaA"))
	write(t, filepath.Join(dir, "c"), []byte("ccc"))
	write(t, filepath.Join(dir, "d"), []byte("ddddd"))
	write(t, filepath.Join(dir, "x\x1b[31m"), nil)
	if err := os.Remove(filepath.Join(dir, "e")); err != nil {
		t.Fatal(err)
	}
	all := []string{"a: digest_mismatch: want sha256:", "c: short_file: want 4 bytes, got 3",
		"d: long_file: want 4 bytes, got 5", "e: missing"}
	check(false, all...)
	check(true, append(all, `"x\x1b[31m": extra`)...)
	if err := errors.Join(os.Rename(filepath.Join(dir, "sub"), filepath.Join(dir, "real")),
		os.Symlink("real", filepath.Join(dir, "sub")), os.Remove(filepath.Join(dir, "a")), syscall.Mkfifo(filepath.Join(dir, "a"), 0o644)); err != nil {
		t.Fatal(err)
	}
	check(false, append(append([]string{"a: not_a_regular_file"}, all[1:]...), "sub/b: missing")...)
	if _, err := transfer.Verify(t.Context(), filepath.Join(dir, "c"), want, transfer.VerifyOptions{}); err == nil {
		t.Error("a file was verified as a folder")
	}
}

func TestParseAggregate(t *testing.T) {
	hex := strings.Repeat("0a", 32)
	for given, hint := range map[string]string{
		hex:                              "write it as sha256:" + hex,
		"SHA256:" + strings.ToUpper(hex): "write it as sha256:" + hex,
		"sha-256:" + hex:                 "write it as sha256:" + hex,
		"sha512:" + hex:                  "kiln-push identify",
		"sha256:" + hex[1:]:              "kiln-push identify",
	} {
		_, is, err := transfer.ParseAggregate(given)
		if odd, ok := err.(*transfer.AggregateError); !is || !ok || !strings.Contains(odd.Hint(), hint) ||
			!strings.Contains(odd.Error(), "64 lowercase hex") {
			t.Errorf("%s: %v, %v; want hint %q", given, is, err, hint)
		}
	}
	if a, is, err := transfer.ParseAggregate("sha256:" + hex); !is || err != nil || a.Hex() != hex {
		t.Errorf("%v, %v, %v", a, is, err)
	}
	for _, given := range []string{"model", "sha256", "host:5000/sha256:v1", "sha256:5000/team/model:v1", hex + "/model"} {
		if _, is, err := transfer.ParseAggregate(given); is || err != nil {
			t.Errorf("%s: %v, %v", given, is, err)
		}
	}
}
