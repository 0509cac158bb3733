package transfer

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/internal/bench/report"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

// TestZeros: the large shard is a valid one, and a flipped byte makes it another without changing its size.
func TestZeros(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "model")
	const size = 1e6
	if err := zeros(dir, size); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "model.safetensors")
	before, err := os.ReadFile(path)
	if err != nil || len(before) != size {
		t.Fatalf("%d bytes, %v", len(before), err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := safetensors.Read(f, size); err != nil {
		t.Error(err)
	}
	if err := flip(path, size/2); err != nil {
		t.Fatal(err)
	}
	after, err := os.ReadFile(path)
	if err != nil || len(after) != size || after[size/2] == before[size/2] || after[size/2-1] != before[size/2-1] {
		t.Errorf("%d bytes, %v", len(after), err)
	}
}

// TestRefetched: the goal is that of the mean, and the worst is said beside it.
func TestRefetched(t *testing.T) {
	at := places(large)
	if len(at) != quarters+1 || at[0]/segment != at[quarters]/segment || at[quarters]%segment != segment-1 {
		t.Errorf("places: %d", at)
	}
	r := (&Bench{Full: true}).refetched(large, []float64{4e6, 8e6, 12e6, 16e6, 20e6})
	if r.Value != 10 || r.State != report.Met || !strings.Contains(r.Notes, "mean 1/500 ") ||
		!strings.Contains(r.Notes, "these 1/312;") || !strings.Contains(r.Notes, "1/250: 20.00 MB") {
		t.Errorf("%+v", r)
	}
	if r := (&Bench{Full: true}).refetched(large, []float64{17e6, 17e6, 17e6, 17e6, 17e6}); r.State != report.Missed {
		t.Errorf("%+v", r)
	}
}

// TestRates: a pull is never the slower one where the other waits for itself.
func TestRates(t *testing.T) {
	b := &Bench{Size: 1e9 / shards}
	round := rig.Round{kiln: {CPU: 0.5}, oras: {CPU: 1}, curlAll: {CPU: 0.001}, hub: {CPU: 5}}
	rows := b.rates(rig.Rounds{round})
	link := rows[len(rows)-1]
	if rows[0].Value != 2 || link.Value < 16 || link.Unit != " Gbit/s" {
		t.Errorf("%+v", rows)
	}
	if !strings.HasSuffix(link.Notes, "nor beyond it: oras pull, huggingface_hub") {
		t.Errorf("notes: %s", link.Notes)
	}
}

// TestPullRows: the reference of a pull is all that its parts cost together.
func TestPullRows(t *testing.T) {
	b := &Bench{Size: 1e9 / shards}
	round := rig.Round{
		kiln: {CPU: 0.9, Wall: 1}, discard: {CPU: 0.25}, pure: {CPU: 0.5}, toFile: {CPU: 0.25}, toDisk: {CPU: 1.05},
		oras: {CPU: 1, Wall: 0.5}, hub: {CPU: 1, Wall: 4}, curlAll: {CPU: 1, Wall: 1},
		curl + verified: {CPU: 1, Wall: 2}, curlAll + verified: {CPU: 1, Wall: 1},
	}
	rows := b.pullRows(rig.Rounds{round})
	got := map[string]report.State{}
	for _, r := range rows {
		got[r.What] = r.State
	}
	want := map[string]report.State{
		rows[0].What: report.Met, "wall / `curl`, then `openssl dgst`": report.Met, "wall / `oras pull`": report.Missed,
	}
	for what, state := range want {
		if got[what] != state {
			t.Errorf("%s: %s, want %s", what, got[what], state)
		}
	}
	if rows[0].Value != 0.9 || rows[1].Value != 0.5 {
		t.Errorf("%+v", rows[:2])
	}
}
