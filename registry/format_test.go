package registry_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
)

// An index of an earlier version is made anew at the start, and the log says so.
func TestIndexOfAnEarlierFormat(t *testing.T) {
	s := newServer(t)
	s.fill()
	want := s.export()
	s.stop()
	kv, err := boltkv.Open(filepath.Join(s.dir, "index.db"), boltkv.Options{})
	if err != nil {
		t.Fatal(err)
	}
	err = kv.Update(t.Context(), func(x index.Txn) error { return x.Put([]byte("zformat"), []byte("\x01\x01>Rp9")) })
	if err != nil {
		t.Fatal(err)
	}
	if err := kv.Close(); err != nil {
		t.Fatal(err)
	}
	s.start()
	if got := s.export(); got != want {
		t.Errorf("rows differ:\n%s\n---\n%s", want, got)
	}
	for _, word := range []string{"of an earlier format", "format=1", "brought level"} {
		if !strings.Contains(s.log.String(), word) {
			t.Errorf("no %q in the log:\n%s", word, s.log)
		}
	}
	s.base("team/model", "v9", "m", "9")
	s.stop()
	s.start()
	if n := strings.Count(s.log.String(), "of an earlier format"); n != 1 {
		t.Errorf("it was made anew %d times", n)
	}
}
