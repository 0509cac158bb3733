package upkeep_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// A scrub reads what an index would be made anew from, while the index still has all of it.
func TestDamagedRecords(t *testing.T) {
	r := newRig(t, nil)
	for _, tag := range []string{"a", "b", "c"} {
		r.put(201, "team/x", tag, r.image("team/x", []byte(tag)))
	}
	if did, err := r.reg.Scrubber().Scrub(t.Context(), upkeep.Order{}); err != nil || did.Records != "" {
		t.Fatalf("%+v, %v", did, err)
	}
	log, err := os.OpenFile(filepath.Join(r.dir, "refs.log"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	if _, err := log.WriteAt([]byte("damage"), 100); err != nil {
		t.Fatal(err)
	}
	did, err := r.reg.Scrubber().Scrub(t.Context(), upkeep.Order{})
	if err != nil || !strings.Contains(did.Records, "byte") {
		t.Fatalf("%+v, %v", did, err)
	}
	if h := r.reg.Health(); h.Status != "degraded" {
		t.Errorf("%+v", h)
	}
	if !strings.Contains(r.log.String(), "records of manifests and tags damaged") {
		t.Error(r.log)
	}
	r.do(200, "GET", "/v2/team/x/manifests/b", nil) // the index serves it
}
