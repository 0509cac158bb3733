// Package testenv finds what tests need beside the source tree. Only tests import it.
package testenv

import (
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// Cases returns the folder of the shared test cases, which holds identity-vectors.json, field-cases.jsonl and
// make_cases.py. It is $KILN_CASES, else shared/cases beside the repository. The test fails when there is none.
func Cases(t testing.TB) string {
	t.Helper()
	dir := os.Getenv("KILN_CASES")
	if dir == "" {
		dir = filepath.Join(Root(t), "..", "shared", "cases")
	}
	if _, err := os.Stat(filepath.Join(dir, "identity-vectors.json")); err != nil {
		t.Fatalf("no test cases: %v (set KILN_CASES to the folder that holds identity-vectors.json)", err)
	}
	return dir
}

// Root returns the root of the repository: the nearest folder at or above the working directory with a go.mod.
func Root(t testing.TB) string {
	t.Helper()
	start, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		if dir == filepath.Dir(dir) {
			t.Fatalf("no go.mod at or above %s", start)
		}
	}
}

// FieldCases builds the file-based field cases anew in a folder of their own and returns it. Case X lies in the folder
// X, its verdict in expected.json. The folder goes with the test. It needs python3 on PATH.
func FieldCases(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "cases")
	out, err := exec.Command("python3", filepath.Join(Cases(t), "make_cases.py"), dir).CombinedOutput()
	t.Cleanup(func() { makeRemovable(dir) })
	if err != nil {
		t.Fatalf("make_cases.py (needs Python 3.11 or later): %v\n%s", err, out)
	}
	return dir
}

// makeRemovable gives back the write permission that a read-only case took from its folder.
func makeRemovable(dir string) {
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			err = os.Chmod(path, 0o700)
		}
		return err
	})
}

// Expectation is the verdict on one field case, as expected.json states it.
type Expectation struct {
	Kind                string   `json:"kind"`    // st, dir, manifest, adapter, pull
	Verdict             string   `json:"verdict"` // accept, reject, warn
	Code                string   `json:"code"`
	Shards              []string `json:"shards"`                // base names, sorted
	Aggregate           string   `json:"aggregate"`             // empty when no identity comes out
	AggregateIfFollowed string   `json:"aggregate_if_followed"` // of a folder of links, when they are followed
}

// Expected returns the verdicts of the cases that FieldCases built in dir, by case id.
func Expected(t testing.TB, dir string) map[string]Expectation {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, "expected.json"))
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]Expectation
	if err := json.Unmarshal(data, &all); err != nil {
		t.Fatalf("expected.json: %v", err)
	}
	if len(all) == 0 {
		t.Fatal("expected.json: no cases")
	}
	return all
}
