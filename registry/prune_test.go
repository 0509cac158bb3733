package registry_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/prune"
)

// purge runs a purge and returns which uploads it told of.
func (s *server) purge(o prune.Abandoned) (did prune.Purged, gone []prune.Upload, err error) {
	did, err = s.reg.Pruner().PurgeUploads(s.t.Context(), o, func(u prune.Upload) error {
		gone = append(gone, u)
		return nil
	})
	return did, gone, err
}

func TestPurgeUploads(t *testing.T) {
	s := newServer(t)
	now := time.Now()
	s.clock = func() time.Time { return now }
	s.restart(nil)
	old := s.begin("team/model")
	s.want(202, "PATCH", old, []byte("xyz"))
	other := s.begin("lab/model")
	now = now.Add(30 * time.Hour)
	if did, _, err := s.purge(prune.Abandoned{OlderThan: 48 * time.Hour}); err != nil || did != (prune.Purged{Found: 2, Young: 2}) {
		t.Errorf("%+v, %v", did, err)
	}
	did, gone, err := s.purge(prune.Abandoned{OlderThan: 24 * time.Hour, Repos: []string{"team/**"}, DryRun: true})
	if err != nil || did != (prune.Purged{DryRun: true, Found: 1, Dropped: 1, Bytes: 3}) || len(gone) != 1 ||
		gone[0].Repository != "team/model" || gone[0].Bytes != 3 || !strings.HasSuffix(old, gone[0].ID) ||
		gone[0].Age() < 29*time.Hour || gone[0].Age() > 31*time.Hour {
		t.Errorf("%+v, %v, %+v", did, err, gone)
	}
	s.want(204, "GET", old, nil)
	id := other[strings.LastIndex(other, "/")+1:]
	if did, _, err := s.purge(prune.Abandoned{ID: id}); err != nil || did != (prune.Purged{Found: 1, Dropped: 1}) {
		t.Errorf("%+v, %v", did, err)
	}
	if _, _, err := s.purge(prune.Abandoned{ID: id}); !errors.Is(err, api.ErrBlobUploadUnknown) {
		t.Error("an upload that is gone:", err)
	}
	s.want(404, "GET", other, nil)
	s.want(204, "GET", old, nil)
	s.restart(func(c *registry.Config) { c.ReadOnly = true })
	if _, _, err := s.purge(prune.Abandoned{}); !errors.Is(err, api.ErrUnsupported) {
		t.Error("a read-only registry let an upload go:", err)
	}
	if did, _, err := s.purge(prune.Abandoned{DryRun: true}); err != nil || did.Dropped != 1 {
		t.Errorf("%+v, %v", did, err)
	}
}

// An upload that is in use stays, however long ago it got a byte.
func TestPurgeSparesWhatIsInUse(t *testing.T) {
	s := newServer(t)
	at := s.begin("a")
	half := bytes.Repeat([]byte("x"), 512<<10) // what a store takes at once
	conn := s.half("PATCH", at, 2*len(half), half)
	defer conn.Close()
	s.received(at, len(half))
	if did, _, err := s.purge(prune.Abandoned{}); err != nil || did != (prune.Purged{Found: 1, Busy: 1}) {
		t.Errorf("%+v, %v", did, err)
	}
	if _, err := conn.Write(half); err != nil {
		t.Fatal(err)
	}
	s.received(at, 2*len(half))
}

// What an index does not know, as the one before was lost, can be dropped too.
func TestPurgeAfterLossOfTheIndex(t *testing.T) {
	s := newServer(t)
	s.begin("a")
	s.stop()
	if err := os.Remove(filepath.Join(s.dir, "index.db")); err != nil {
		t.Fatal(err)
	}
	s.start()
	if did, gone, err := s.purge(prune.Abandoned{}); err != nil || did.Dropped != 1 || gone[0].Repository != "" {
		t.Errorf("%+v, %v, %+v", did, err, gone)
	}
}
