package registry_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
)

// many makes so many refs that an index that is lost is filled in order of its rows.
func (s *server) many() {
	s.t.Helper()
	s.fill()
	m := s.manifest("team/tags", nil, nil)
	for i := range 600 {
		if a := s.put("team/tags", fmt.Sprint("v", i%500), m); a.status != 201 {
			s.t.Fatal(a)
		}
	}
}

// TestSortedRebuild: an index that is filled in order of its rows is the same as one that all changes were applied to,
// deletes included, and goes on in the same way.
func TestSortedRebuild(t *testing.T) {
	s := newServer(t)
	s.many()
	want := s.export()
	s.stop()
	for range 2 { // it is the same each time
		if err := os.Remove(filepath.Join(s.dir, "index.db")); err != nil {
			t.Fatal(err)
		}
		before := s.log.Len()
		s.start()
		if said := s.log.String()[before:]; !strings.Contains(said, "sorted=true") {
			t.Error("it was not sorted:\n", said)
		}
		if got := s.export(); got != want {
			t.Fatalf("rows differ:\n%s\n---\n%s", want, got)
		}
		if found := s.lacking(); len(found) > 0 {
			t.Errorf("%+v", found)
		}
		before = s.log.Len()
		s.stop()
		s.start()
		if said := s.log.String()[before:]; strings.Contains(said, "brought level") {
			t.Error("it was repaired twice:\n", said)
		}
		s.stop()
	}
	s.start()
	s.base("back/model", "v2", "b", "8")
	if want = s.export(); strings.Count(want, "back/model") != 4 {
		t.Error(want)
	}
	s.reindexed("what came later")
}

// lacking compares the index with all deletes and tags of the store.
func (s *server) lacking() []index.Lack {
	s.t.Helper()
	var ops []index.Op
	for ref, err := range s.store.Since(s.t.Context(), 0) {
		if err != nil {
			s.t.Fatal(err)
		}
		switch isTag := ref.Name != ref.Digest.String(); {
		case ref.Deleted && isTag:
			ops = append(ops, index.DeleteTag{Repo: ref.Repo, Tag: ref.Name, Seq: ref.Seq})
		case ref.Deleted:
			ops = append(ops, index.DeleteManifest{Repo: ref.Repo, Digest: ref.Digest, Seq: ref.Seq})
		case isTag:
			ops = append(ops, index.PutTag{Repo: ref.Repo, Tag: ref.Name, Digest: ref.Digest, Seq: ref.Seq})
		}
	}
	found, err := s.ix.Lacks(s.t.Context(), ops...)
	if err != nil {
		s.t.Fatal(err)
	}
	return found
}

// TestSortedNeedsFindings: where something is to be found again, the changes are applied one after the other.
func TestSortedNeedsFindings(t *testing.T) {
	s := newServer(t)
	s.many()
	m := s.manifest("a", nil, map[string]any{"annotations": map[string]string{"k": "v"}})
	seq, err := s.ix.NextSeq(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	ref := blobstore.Ref{
		Repo: "a", Name: identity.Sum(m).String(), Seq: seq, Digest: identity.Sum(m), MediaType: manifestType, Manifest: m,
		Time: time.Now(),
	}
	if _, err := s.store.Put(context.Background(), ref); err != nil {
		t.Fatal(err)
	}
	s.stop()
	if err := os.Remove(filepath.Join(s.dir, "index.db")); err != nil {
		t.Fatal(err)
	}
	before := s.log.Len()
	s.start()
	if said := s.log.String()[before:]; !strings.Contains(said, "sorted=false") {
		t.Error(said)
	}
	if _, err := s.ix.Get(t.Context(), "a", ref.Name); err != nil || errors.Is(err, index.ErrNotFound) {
		t.Error(err)
	}
	s.reindexed("with what was found again")
}

// refsThatWait are refs that are read again only when they may be.
type refsThatWait struct {
	blobstore.Refs
	reached, goOn chan struct{} // reached gets one when somebody waits for goOn; nil: nobody waits
}

func (w *refsThatWait) Since(ctx context.Context, after blobstore.Position) iter.Seq2[blobstore.PlacedRef, error] {
	if w.reached != nil {
		select {
		case w.reached <- struct{}{}:
			<-w.goOn
		case <-w.goOn: // closed: nobody looks on any more
		}
	}
	return w.Refs.Since(ctx, after)
}
