package upkeep_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// remove removes the file of a stored blob behind the store's back.
func (r *rig) remove(d identity.Digest) {
	r.t.Helper()
	if err := os.Remove(filepath.Join(r.dir, "blobs", "sha256", d.Hex()[:2], d.Hex())); err != nil {
		r.t.Fatal(err)
	}
}

// aside returns what is told of blobs in quarantine and missing.
func (r *rig) aside() (told []upkeep.Aside) {
	r.t.Helper()
	err := r.reg.Scrubber().TellAside(context.Background(), func(e upkeep.Event) { told = append(told, *e.Aside) })
	if err != nil {
		r.t.Fatal(err)
	}
	return told
}

// TestMissing: a blob whose file was removed from outside is found and named with what refers to it, stays known over a
// restart and a reindex, and another push of the bytes heals it.
func TestMissing(t *testing.T) {
	r := newRig(t, nil)
	layer := []byte("layer")
	m, d := r.image("b", layer), identity.Sum(layer)
	r.put(201, "b", "v1", m)
	r.put(201, "a", "v1", r.image("a", layer))
	leased := r.blob("a", []byte("no manifest refers to it"))
	if did, found := r.scrub(); did.Missing != 0 || len(found) != 0 {
		t.Fatalf("before: %+v, %v", did, found)
	}
	r.remove(d)
	r.remove(leased)
	want := []index.Referrer{{Repository: "a", Digest: identity.Sum(m)}, {Repository: "b", Digest: identity.Sum(m)}}
	for range 2 {
		did, found := r.scrub()
		f := found[d]
		if did.Missing != 1 || did.Read.Blobs != 1 || len(found) != 1 || f.Verdict != upkeep.Missing ||
			!slices.Equal(f.Manifests, want) {
			t.Errorf("%+v, %+v", did, found)
		}
	}
	if _, found := r.scrub(d, leased); found[d].Verdict != upkeep.Missing || found[leased].Verdict != upkeep.Gone {
		t.Errorf("%+v", found)
	}
	if !strings.Contains(r.log.String(), "a@"+identity.Sum(m).String()) {
		t.Errorf("the log names no manifest:\n%s", r.log)
	}
	known := func(when string) {
		t.Helper()
		if h := r.health(); h.Status != "degraded" || h.Missing != 1 || h.Quarantined != 0 {
			t.Errorf("%s: %+v", when, h)
		}
		told := r.aside()
		if len(told) != 1 || told[0].Digest != d || told[0].Lost != upkeep.Missing || told[0].Since.IsZero() ||
			!slices.Equal(told[0].Repositories, []string{"a", "b"}) {
			t.Errorf("%s: %+v", when, told)
		}
	}
	known("found")
	r.stop()
	r.start()
	known("after a restart")
	if err := r.reg.Reindex(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.stop()
	r.start()
	known("after a reindex and a restart")
	r.do(404, "GET", "/v2/a/blobs/"+d.String(), nil)
	r.blob("a", layer)
	r.do(200, "GET", "/v2/b/blobs/"+d.String(), nil)
	healed := func(when string) {
		t.Helper()
		if h := r.health(); h.Status != "ok" || h.Missing != 0 || len(r.aside()) != 0 {
			t.Errorf("%s: %+v", when, h)
		}
	}
	healed("pushed again")
	r.stop()
	r.start()
	healed("after a restart")
	if did, found := r.scrub(); did.Missing != 0 || len(found) != 0 {
		t.Errorf("healed: %+v, %v", did, found)
	}
}

// TestMissingAndDeleted: what nothing refers to any more is not missed.
func TestMissingAndDeleted(t *testing.T) {
	r := newRig(t, nil)
	m, d := r.image("a", []byte("layer")), identity.Sum([]byte("layer"))
	r.put(201, "a", "v1", m)
	r.remove(d)
	r.scrub()
	if h := r.health(); h.Missing != 1 {
		t.Fatalf("%+v", h)
	}
	r.do(202, "DELETE", "/v2/a/manifests/"+identity.Sum(m).String(), nil)
	if h := r.health(); h.Missing != 0 || h.Status != "ok" {
		t.Errorf("%+v", h)
	}
	r.stop()
	r.start()
	if h := r.health(); h.Missing != 0 || h.Status != "ok" {
		t.Errorf("after a restart: %+v", h)
	}
}

// TestMissingPutBack: a file that is put back by hand is seen by the next scrub.
func TestMissingPutBack(t *testing.T) {
	r := newRig(t, nil)
	d := identity.Sum([]byte("layer"))
	r.put(201, "a", "v1", r.image("a", []byte("layer")))
	path := filepath.Join(r.dir, "blobs", "sha256", d.Hex()[:2], d.Hex())
	if err := os.Rename(path, path+"~"); err != nil {
		t.Fatal(err)
	}
	r.scrub()
	if err := os.Rename(path+"~", path); err != nil {
		t.Fatal(err)
	}
	if h := r.health(); h.Missing != 1 {
		t.Fatalf("%+v", h)
	}
	if did, found := r.scrub(); did.Missing != 0 || len(found) != 0 || r.health().Status != "ok" {
		t.Errorf("%+v, %v", did, found)
	}
}

// TestMissingInPass: a pass finds every blob that is missing, wherever it is in the order, and reads every other one,
// also when it is interrupted after each.
func TestMissingInPass(t *testing.T) {
	r := newRig(t, nil)
	var all []identity.Digest
	for i := range 12 {
		layer := fmt.Append(nil, i)
		r.put(201, "a", fmt.Sprint(i), r.image("a", layer))
		all = append(all, identity.Sum(layer))
	}
	slices.SortFunc(all, identity.Digest.Compare)
	gone := []identity.Digest{all[0], all[1], all[5], all[10], all[11]}
	for _, d := range gone {
		r.remove(d)
	}
	p := r.pass(week, func(p upkeep.Scrubbing) bool { return !p.Ended.IsZero() })
	if p.Missing != int64(len(gone)) || p.Read.Blobs != 8 {
		t.Errorf("%+v", p)
	}
	var told []identity.Digest
	for _, a := range r.aside() {
		told = append(told, a.Digest)
	}
	if !slices.Equal(told, gone) || r.health().Missing != len(gone) {
		t.Errorf("%v, want %v", told, gone)
	}
}

// TestMissingIsSuspected: a read that finds no file has the blob looked at without waiting for the pass.
func TestMissingIsSuspected(t *testing.T) {
	for _, method := range []string{"GET", "HEAD"} {
		r := newRig(t, nil)
		d := identity.Sum([]byte("layer"))
		r.put(201, "a", "v1", r.image("a", []byte("layer")))
		r.remove(d)
		r.do(404, method, "/v2/a/blobs/"+d.String(), nil)
		r.pass(0, func(upkeep.Scrubbing) bool { return r.health().Missing == 1 })
	}
}

// TestAsideIsNotMissing: a blob in quarantine is not counted twice.
func TestAsideIsNotMissing(t *testing.T) {
	r := newRig(t, nil)
	m, d := r.image("a", []byte("layer")), identity.Sum([]byte("layer"))
	r.put(201, "a", "v1", m)
	r.rewrite(d, flip(0))
	for round := range 2 {
		did, found := r.scrub()
		if f := found[d]; did.Missing != 0 || did.Damaged != 1 || did.Read.Blobs != int64(2-round) || !f.Aside ||
			f.Before != (round > 0) || round > 0 && len(f.Manifests) != 1 {
			t.Errorf("%+v, %+v", did, found)
		}
	}
	if h := r.health(); h.Missing != 0 || h.Quarantined != 1 || len(r.aside()) != 1 {
		t.Errorf("%+v", h)
	}
	if _, found := r.scrub(d); found[d].Verdict != upkeep.Damaged || !found[d].Before {
		t.Errorf("%+v", found)
	}
	r.do(202, "DELETE", "/v2/a/manifests/v1", nil)
	r.do(202, "DELETE", "/v2/a/manifests/"+identity.Sum(m).String(), nil)
	if did, found := r.scrub(); did.Damaged != 0 || len(found) != 0 {
		t.Errorf("nothing refers to it: %+v, %+v", did, found)
	}
	if _, found := r.scrub(d); found[d].Verdict != upkeep.Gone || !found[d].Aside {
		t.Errorf("%+v", found)
	}
}

// TestUnreadable: a blob that the system does not let the registry read is no damage and no reason for a server to fail:
// it can't be had for now, whoever pushes it is asked to send it again, and that heals it.
func TestUnreadable(t *testing.T) {
	for name, errno := range map[string]error{"denied": syscall.EACCES, "disk": syscall.EIO} {
		t.Run(name, func(t *testing.T) {
			s := &reads{open: func(blobstore.Info) (io.ReadCloser, error) { return nil, nil }}
			r := newRig(t, func(r *rig) {
				r.wrap = func(st blobstore.Store) blobstore.Store { s.Store = st; return aside{s, st.(blobstore.Quarantine)} }
			})
			m, d := r.image("a", []byte("layer")), identity.Sum([]byte("layer"))
			path := "/v2/a/blobs/" + d.String()
			r.put(201, "a", "v1", m)
			generation := r.stored()[d].Generation
			s.open = func(i blobstore.Info) (io.ReadCloser, error) {
				if i.Digest == d && i.Generation == generation {
					return nil, &fs.PathError{Op: "open", Path: "x", Err: errno}
				}
				return nil, nil
			}
			r.do(200, "HEAD", path, nil) // nobody knows yet
			if b := r.do(503, "GET", path, nil); !bytes.Contains(b, []byte("failed to read a blob")) {
				t.Errorf("%s", b)
			}
			r.pass(0, func(upkeep.Scrubbing) bool { return r.health().Unreadable == 1 })
			did, found := r.scrub()
			if did.Unreadable != 1 || did.Damaged != 0 || found[d].Aside || !strings.Contains(found[d].Why, errno.Error()) {
				t.Errorf("%+v, %+v", did, found)
			}
			for _, when := range []string{"found", "restarted"} {
				told := r.aside()
				if h := r.health(); h.Status != "degraded" || h.Unreadable != 1 || len(told) != 1 ||
					told[0].Lost != upkeep.Unreadable || !strings.Contains(told[0].Why, errno.Error()) {
					t.Errorf("%s: %+v, %+v", when, h, told)
				}
				r.do(404, "HEAD", path, nil)
				if b := r.do(400, "PUT", "/v2/a/manifests/v2", m, "Content-Type", manifestType); !bytes.Contains(b,
					[]byte("can't be read here: push it again")) {
					t.Errorf("%s", b)
				}
				r.do(202, "POST", "/v2/b/blobs/uploads/?from=a&mount="+d.String(), nil)
				r.do(503, "GET", path, nil)
				r.stop()
				r.start()
			}
			r.blob("a", []byte("layer"))
			r.do(200, "GET", path, nil)
			r.do(200, "HEAD", path, nil)
			r.put(201, "a", "v2", m)
			if h := r.health(); h.Status != "ok" || len(r.aside()) != 0 {
				t.Errorf("%+v", h)
			}
		})
	}
}

// TestReadableAgain: a blob that was unreadable is not any more when it is read well.
func TestReadableAgain(t *testing.T) {
	s := &reads{open: func(blobstore.Info) (io.ReadCloser, error) { return nil, syscall.EIO }}
	r := newRig(t, func(r *rig) {
		r.wrap = func(st blobstore.Store) blobstore.Store { s.Store = st; return s }
	})
	d := r.blob("a", []byte("layer"))
	r.scrub()
	if h := r.health(); h.Unreadable != 1 { // nothing refers to it, and it is there
		t.Errorf("%+v", h)
	}
	s.open = func(blobstore.Info) (io.ReadCloser, error) { return nil, nil }
	r.do(200, "GET", "/v2/a/blobs/"+d.String(), nil)
	r.pass(0, func(upkeep.Scrubbing) bool { return r.health().Unreadable == 0 })
	r.do(200, "HEAD", "/v2/a/blobs/"+d.String(), nil)
	s.open = func(blobstore.Info) (io.ReadCloser, error) { return nil, syscall.EIO }
	r.scrub(d)
	if err := r.store.Delete(t.Context(), r.stored()[d]); err != nil {
		t.Fatal(err)
	}
	if h := r.health(); h.Unreadable != 0 {
		t.Errorf("deleted: %+v", h)
	}
}

// TestManifestOfWhatIsUnreadable: a manifest whose blobs have to be read to take it says which one can't be.
func TestManifestOfWhatIsUnreadable(t *testing.T) {
	s := &reads{open: func(blobstore.Info) (io.ReadCloser, error) { return nil, syscall.EIO }}
	r := newRig(t, func(r *rig) {
		r.wrap = func(st blobstore.Store) blobstore.Store { s.Store = st; return s }
	})
	config, doc := r.blob("a", []byte("{}")), r.blob("a", []byte(`{"r":8}`))
	m := fmt.Appendf(nil, `{"schemaVersion":2,"mediaType":%q,"config":{"mediaType":"application/vnd.oci.empty.v1+json",`+
		`"digest":%q,"size":2},"layers":[{"mediaType":"application/json","digest":%q,"size":7,"annotations":{`+
		`"org.opencontainers.image.title":"adapter_config.json"}}]}`, manifestType, config, doc)
	for range 2 {
		b := r.do(400, "PUT", "/v2/a/manifests/v1", m, "Content-Type", manifestType)
		if !bytes.Contains(b, []byte("MANIFEST_BLOB_UNKNOWN")) || !bytes.Contains(b, []byte(doc.String())) {
			t.Errorf("%s", b)
		}
	}
	r.do(404, "HEAD", "/v2/a/blobs/"+doc.String(), nil)
}

// TestDamagedAndLeft: damage that can't be set aside, as the registry is read-only, makes it degraded and is listed.
func TestDamagedAndLeft(t *testing.T) {
	r := newRig(t, nil)
	d := identity.Sum([]byte("layer"))
	r.put(201, "a", "v1", r.image("a", []byte("layer")))
	r.rewrite(d, flip(0))
	r.reg.Scrubber().ReadOnly = true
	for range 2 {
		if did, found := r.scrub(); did.Damaged != 1 || found[d].Aside {
			t.Errorf("%+v, %+v", did, found)
		}
		told := r.aside()
		if h := r.health(); h.Status != "degraded" || h.Damaged != 1 || h.Quarantined != 0 || len(told) != 1 ||
			told[0].Lost != upkeep.Damaged || !strings.Contains(told[0].Why, "not set aside: ") {
			t.Errorf("%+v, %+v", h, told)
		}
	}
	r.reg.Scrubber().ReadOnly = false
	r.scrub()
	if h := r.health(); h.Damaged != 0 || h.Quarantined != 1 || len(r.aside()) != 1 {
		t.Errorf("%+v", h)
	}
}

// TestCutIsSuspected: a read of a blob whose file was cut short has it set aside without waiting for the pass.
func TestCutIsSuspected(t *testing.T) {
	r := newRig(t, nil)
	d := r.blob("a", []byte("layer"))
	r.rewrite(d, func(b []byte) []byte { return b[:3] })
	r.do(404, "GET", "/v2/a/blobs/"+d.String(), nil)
	r.pass(0, func(upkeep.Scrubbing) bool { return r.health().Quarantined == 1 })
}

// TestReadIsSuspected: a read for which the store says that the blob is damaged, or gives too few bytes, has the blob
// looked at without waiting for the pass.
func TestReadIsSuspected(t *testing.T) {
	for name, open := range map[string]func() (io.ReadCloser, error){
		"damaged": func() (io.ReadCloser, error) { return nil, blobstore.ErrDamaged },
		"short":   func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader("lay")), nil },
	} {
		t.Run(name, func(t *testing.T) {
			s := &reads{open: func(blobstore.Info) (io.ReadCloser, error) { return nil, nil }}
			r := newRig(t, func(r *rig) {
				r.wrap = func(st blobstore.Store) blobstore.Store { s.Store = st; return aside{s, st.(blobstore.Quarantine)} }
			})
			d := r.blob("a", []byte("layer"))
			s.open = func(blobstore.Info) (io.ReadCloser, error) { return open() }
			if resp, err := wire.Get(r.http.URL + "/v2/a/blobs/" + d.String()); err == nil {
				if b, err := io.ReadAll(resp.Body); resp.StatusCode == 200 && err == nil {
					t.Errorf("%q was sent for the whole blob", b)
				}
				resp.Body.Close()
			}
			r.pass(0, func(upkeep.Scrubbing) bool { return r.health().Quarantined == 1 })
		})
	}
}

// aside is a store that is read badly and sets aside well.
type aside struct {
	blobstore.Store
	blobstore.Quarantine
}

// TestReadOfAnotherCopy: a blob that is pushed again while somebody asks for it is served.
func TestReadOfAnotherCopy(t *testing.T) {
	s := &reads{open: func(blobstore.Info) (io.ReadCloser, error) { return nil, nil }}
	r := newRig(t, func(r *rig) {
		r.wrap = func(st blobstore.Store) blobstore.Store { s.Store = st; return s }
	})
	data := []byte("layer")
	d, opened := r.blob("a", data), 0
	s.open = func(i blobstore.Info) (io.ReadCloser, error) {
		if opened++; opened == 1 {
			u, err := s.Store.Create(t.Context(), d, int64(len(data)))
			if err = errors.Join(err, s.Store.Delete(t.Context(), i)); err == nil {
				_, err = u.Finish(t.Context(), 0, bytes.NewReader(data), d)
			}
			if err != nil {
				t.Error(err)
			}
		}
		return nil, nil
	}
	if got := r.do(200, "GET", "/v2/a/blobs/"+d.String(), nil); !bytes.Equal(got, data) || opened != 2 {
		t.Errorf("%q, opened %d times", got, opened)
	}
}

// stats is a store whose Stat fails.
type stats struct {
	blobstore.Store
	err error
}

func (s *stats) Stat(ctx context.Context, d identity.Digest) (blobstore.Info, error) {
	if s.err != nil {
		return blobstore.Info{}, s.err
	}
	return s.Store.Stat(ctx, d)
}

// TestNotMissing: what can't be found out is not taken for missing.
func TestNotMissing(t *testing.T) {
	s := new(stats)
	r := newRig(t, func(r *rig) {
		r.wrap = func(st blobstore.Store) blobstore.Store { s.Store = st; return s }
	})
	d := identity.Sum([]byte("layer"))
	r.put(201, "a", "v1", r.image("a", []byte("layer")))
	r.remove(d)
	s.err = errors.New("the disk is loose")
	if did, found := r.scrub(); did.Missing != 0 || found[d].Verdict != upkeep.Unreadable {
		t.Errorf("%+v, %v", did, found)
	}
	s.err = blobstore.ErrUnavailable
	if _, err := r.reg.Scrubber().Scrub(t.Context(), upkeep.Order{}); !errors.Is(err, blobstore.ErrUnavailable) {
		t.Error(err)
	}
	if h := r.health(); h.Missing != 0 {
		t.Errorf("%+v", h)
	}
}
