package testenv

import (
	"os"
	"path/filepath"
	"testing"
)

func TestFieldCases(t *testing.T) {
	dir := FieldCases(t)
	all := Expected(t, dir)
	for id := range all {
		if info, err := os.Stat(filepath.Join(dir, id)); err != nil || !info.IsDir() {
			t.Errorf("case %s has no folder: %v", id, err)
		}
	}
	if got := all["ID-01"]; got.Kind != "dir" || got.Verdict != "accept" || len(got.Shards) != 2 || got.Aggregate == "" {
		t.Errorf("ID-01 = %+v", got)
	}
}
