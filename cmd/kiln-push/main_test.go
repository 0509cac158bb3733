package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/testenv"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
	"github.com/kiln-registry/kiln-registry/internal/testregistry"
	"github.com/kiln-registry/kiln-registry/registry"
)

func TestMain(m *testing.M) { testscript.Main(testlanes.Use(m), map[string]func(){"kiln-push": main}) }

// TestScripts runs one script per promise. Each has a registry of its own at $REGISTRY, a read-only one at $FROZEN, and
// servers that deny everything at $DENIED, answer with a page at $PAGE, and serve a resident model at $RESIDENT.
func TestScripts(t *testing.T) {
	cmds := map[string]func(*testscript.TestScript, bool, []string){
		"exits": testregistry.Exits, "shard": makeShard, "serving": serving, "aggregate": aggregate,
	}
	maps.Copy(cmds, madeCommands)
	testscript.Run(t, testscript.Params{
		Dir:  "testdata",
		Cmds: cmds,
		Setup: func(e *testscript.Env) error {
			store, err := testregistry.Open(filepath.Join(e.WorkDir, ".registry"), e.Defer)
			if err != nil {
				return err
			}
			reg := &writes{Handler: store}
			e.Values[writesKey{}] = reg
			frozen, err := testregistry.Open(filepath.Join(e.WorkDir, ".frozen"), e.Defer, func(c *registry.Config) {
				c.ReadOnly = true
			})
			if err != nil {
				return err
			}
			e.Setenv("HOME", filepath.Join(e.WorkDir, ".home"))
			e.Setenv("KILN_LANES", os.Getenv("KILN_LANES"))
			for name, h := range map[string]http.Handler{
				"REGISTRY": reg,
				"FROZEN":   frozen,
				"DENIED":   http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) }),
				"PAGE": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					w.Header().Set("Content-Type", "text/html")
					fmt.Fprint(w, "<html>log in</html>")
				}),
				"RESIDENT": noToken(http.FileServer(http.Dir(filepath.Join(e.WorkDir, "resident")))),
			} {
				srv := httptest.NewServer(h)
				e.Defer(srv.Close)
				e.Setenv(name, strings.TrimPrefix(srv.URL, "http://"))
			}
			return nil
		},
	})
}

// noToken answers only those who send no token.
func noToken(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" {
			http.Error(w, "a token was sent", http.StatusBadRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// makeShard writes a valid file with one tensor: shard FILE NAME CONTENT [METADATA]
func makeShard(ts *testscript.TestScript, _ bool, args []string) {
	meta := ""
	if len(args) > 3 {
		meta = `"__metadata__":{"note":"` + args[3] + `"},`
	}
	n := len(args[2])
	header := fmt.Sprintf(`{%s%q:{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, meta, args[1], n, n)
	b := append([]byte{byte(len(header)), 0, 0, 0, 0, 0, 0, 0}, header...)
	path := ts.MkAbs(args[0])
	ts.Check(os.MkdirAll(filepath.Dir(path), 0o755))
	ts.Check(os.WriteFile(path, append(b, args[2]...), 0o644))
}

// aggregate sets AGGREGATE to the first line of a file: aggregate FILE
func aggregate(ts *testscript.TestScript, _ bool, args []string) {
	first, _, _ := strings.Cut(ts.ReadFile(args[0]), "\n")
	ts.Setenv("AGGREGATE", first)
}

// serving writes what a resident model answers: serving MANIFEST|none
func serving(ts *testscript.TestScript, _ bool, args []string) {
	answer := map[string]any{"status": "ok", "role": "resident", "base_weight_identity": nil, "checks": []any{}}
	if args[0] != "none" {
		var m struct {
			Type      string            `json:"manifest_type"`
			Algorithm string            `json:"aggregate_algorithm"`
			Aggregate string            `json:"aggregate_sha256"`
			Total     int64             `json:"total_size_bytes"`
			Shards    []json.RawMessage `json:"shards"`
		}
		ts.Check(json.Unmarshal([]byte(ts.ReadFile(args[0])), &m))
		answer["base_weight_identity"] = map[string]any{
			"manifest_type": m.Type, "aggregate_algorithm": m.Algorithm, "aggregate_sha256": m.Aggregate,
			"total_size_bytes": m.Total, "shard_count": len(m.Shards),
		}
	}
	b, err := json.Marshal(answer)
	ts.Check(err)
	ts.Check(os.MkdirAll(ts.MkAbs("resident"), 0o755))
	ts.Check(os.WriteFile(ts.MkAbs("resident/health"), b, 0o644))
}

// TestInterrupted: a command that begins anew is not said to go on.
func TestInterrupted(t *testing.T) {
	dir := t.TempDir()
	b := append([]byte{52, 0, 0, 0, 0, 0, 0, 0}, `{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`[:52]...)
	if err := os.WriteFile(filepath.Join(dir, "x.safetensors"), append(b, "}w"...), 0o644); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, args := range [][]string{{"identify", dir}, {"compare", dir, dir}} {
		var stdout, stderr bytes.Buffer
		code := cli.Report(&stderr, run(ctx, args, &stdout, &stderr))
		if code != cli.CodeTryAgain || stderr.String() != "error: interrupted\n" || stdout.Len() > 0 {
			t.Errorf("%q: exit code %d, %q, %q", args, code, stdout.String(), stderr.String())
		}
	}
}

// rules are the names that the reader of shard manifests has for the conditions of the cases.
var rules = map[string]string{
	"unknown_field": "no-unknown-fields", "unsorted": "sorted-unique", "duplicate_filename": "sorted-unique", "zero_size": "nonzero-size",
	"total_mismatch": "total", "aggregate_mismatch": "aggregate", "no_shards": "shard-count", "too_many_shards": "shard-count",
	"trailing_data": "no-trailing-data", "bad_version": "schema-version", "bad_type": "type", "not_portable_name": "filename",
	"bad_digest": "digest-form",
}

// TestFieldCases runs the command on every folder and manifest of the shared cases.
func TestFieldCases(t *testing.T) {
	dir := testenv.FieldCases(t)
	b, err := os.ReadFile(filepath.Join(dir, "expected.json"))
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]struct{ Kind, Verdict, Code, Aggregate string }
	if err := json.Unmarshal(b, &all); err != nil {
		t.Fatal(err)
	}
	ran := 0
	for id, want := range all {
		path, args, refused := filepath.Join(dir, id), []string(nil), cli.CodeBadInput
		switch {
		case want.Kind == "dir" || want.Kind == "st":
			if id == "ID-15" {
				path = filepath.Join(path, "snapshots", "rev0")
			}
			args = []string{"identify", path}
		case want.Kind == "manifest":
			if want.Verdict == "reject" {
				want.Code = rules[want.Code]
			}
			args, refused = []string{"compare", filepath.Join(path, "manifest.json"), filepath.Join(path, "manifest.json")}, cli.CodeUsage
		default:
			continue
		}
		ran++
		var stdout, stderr bytes.Buffer
		code := cli.Report(&stderr, run(t.Context(), args, &stdout, &stderr))
		first, _, _ := strings.Cut(stdout.String(), "\n")
		switch said := stderr.String(); {
		case want.Verdict == "reject":
			// An empty file is refused as an empty shard before its header could be too short.
			known := want.Code != "" && strings.Contains(said, "("+want.Code+")") || id == "ST-01" && strings.Contains(said, "empty_shard")
			if code != refused || stdout.Len() > 0 || !strings.HasPrefix(said, "error: ") || !known {
				t.Errorf("%s: exit code %d, %q, %q; want %s", id, code, stdout.String(), said, want.Code)
			}
		case code != cli.CodeOK, want.Kind == "dir" && first != want.Aggregate:
			t.Errorf("%s: exit code %d, %q, %q; want %s", id, code, first, said, want.Aggregate)
		case want.Verdict == "warn" && !(strings.Contains(said, "warning: ") && strings.Contains(said, want.Code)):
			t.Errorf("%s: said %q, want a warning of %s", id, said, want.Code)
		}
	}
	if ran < 65 {
		t.Errorf("only %d cases ran", ran)
	}
}

// adapterRules are the names that this command has for the conditions of the adapter cases.
var adapterRules = map[string]string{
	"config_not_json": "json-syntax", "adapter_digest_mismatch": "file-digest",
	"base_is_adapter": "several_adapters", // as a folder of two: which of them is meant is not said
}

// TestAdapterCases pushes every adapter folder of the shared cases.
func TestAdapterCases(t *testing.T) {
	t.Setenv("HOME", t.TempDir())
	dir := testenv.FieldCases(t)
	b, err := os.ReadFile(filepath.Join(dir, "expected.json"))
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]struct{ Kind, Verdict, Code string }
	if err := json.Unmarshal(b, &all); err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(testregistry.New(t))
	defer srv.Close()
	ran := 0
	for id, want := range all {
		if want.Kind != "adapter" {
			continue
		}
		ran++
		refused := want.Verdict == "reject" || want.Code == "several_adapters" || want.Code == "base_is_adapter"
		if known, ok := adapterRules[want.Code]; ok {
			want.Code = known
		}
		ref := strings.TrimPrefix(srv.URL, "http://") + "/cases/" + strings.ToLower(id) + ":v1"
		var stdout, stderr bytes.Buffer
		code := cli.Report(&stderr, run(t.Context(), []string{"adapter", "-q", filepath.Join(dir, id), ref}, &stdout, &stderr))
		switch said := stderr.String(); {
		case refused:
			if code != cli.CodeBadInput || stdout.Len() > 0 || !strings.Contains(said, "("+want.Code+")") {
				t.Errorf("%s: exit code %d, %q, %q; want %s", id, code, stdout.String(), said, want.Code)
			}
		case code != cli.CodeOK:
			t.Errorf("%s: exit code %d, %q", id, code, said)
		case want.Verdict == "warn" && !strings.Contains(said, "("+want.Code+")"), want.Verdict == "accept" && said != "":
			t.Errorf("%s: said %q, want %s", id, said, want.Code)
		case (want.Code == "base_unproven") != strings.HasPrefix(stdout.String(), "base      not recorded"):
			t.Errorf("%s: %q", id, stdout.String())
		}
	}
	if ran < 15 {
		t.Errorf("only %d cases ran", ran)
	}
}
