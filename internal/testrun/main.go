// Command testrun writes what a training run on a base leaves behind: an adapter of Kiln's, one that PEFT saved, an
// exact checkpoint with the request of a run that wants to go on from it, a checkpoint of an earlier version that
// records only the aggregate, and an eval. The base is a full shard manifest in a file, as kiln-push identify prints it.
package main

import (
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
)

// provenance is a valid kiln.execution-provenance.v1.
//
//go:embed provenance.json
var provenance []byte

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	fs := flag.NewFlagSet("testrun", flag.ContinueOnError)
	base := fs.String("base", "", "file with the shard manifest of the base")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if fs.NArg() != 1 {
		return errors.New("want one folder")
	}
	text, err := os.ReadFile(*base)
	if err != nil {
		return err
	}
	m, err := identity.Parse(text)
	if err != nil {
		return fmt.Errorf("%s: %w", *base, err)
	}
	return write(fs.Arg(0), m)
}

func write(dir string, base identity.Manifest) error {
	in := func(name string) string { return filepath.Join(dir, name) }
	return errors.Join(
		testartifact.Adapter(in("sql"), 1, &base),
		testartifact.PEFT(in("plain"), 2),
		checkpoint(in("sql-checkpoint-step-00000001"+documents.CheckpointSuffix), in("request.json"), base),
		testartifact.Checkpoint(in("old-checkpoint-step-00000001"+documents.CheckpointSuffix), 3, &base, true),
		os.WriteFile(in("eval.json"), eval(base), 0o644),
		os.WriteFile(in("provenance.json"), provenance, 0o644),
	)
}

// checkpoint writes a checkpoint that records how it was computed, and the request of a run that is the same in every
// respect.
func checkpoint(dir, request string, base identity.Manifest) error {
	if err := testartifact.Checkpoint(dir, 1, &base, false); err != nil {
		return err
	}
	text, err := testartifact.Provenance(dir, provenance)
	return errors.Join(err, os.WriteFile(request, text, 0o644))
}

// eval is the result of one suite on the base and on the adapter sql.
func eval(base identity.Manifest) []byte {
	of := func(adapter any, passed int) map[string]any {
		return map[string]any{
			"suite_name": "sql-smoke", "adapter": adapter, "aggregation": map[string]any{"kind": "single"},
			"metrics":  map[string]any{"num_examples": 50, "num_pass": passed, "accuracy": float64(passed) / 50},
			"outcomes": []any{}, "aggregated_outcomes": []any{}, "suite_hash": "sql-smoke-1",
			"started_at": "2026-01-02T04:00:00Z", "finished_at": "2026-01-02T04:05:00Z",
		}
	}
	text, err := json.Marshal(map[string]any{
		"schema_version": 2, "job_id": "eval-1", "state": "completed", "base_weight_shard_manifest": base,
		"effective_seed": "17", "seed_derivation": "kiln.eval-seed.v1", "runs": []any{of(nil, 21), of("sql", 44)},
	})
	if err != nil {
		panic(err) // the value above always has a JSON form
	}
	return text
}
