package upkeep_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"

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

// flipRig is a registry that was stopped when it held images, each with a tag, of which the last three were deleted.
// It returns the layers of those that live, and the file of the index.
func flipRig(t *testing.T) (r *rig, h *hands, layers []identity.Digest, file []byte) {
	h = new(hands)
	r = newRig(t, func(r *rig) { r.clock = h.clock })
	for i := range 40 {
		layer := fmt.Append(nil, "layer ", i)
		m := r.image("team/m", layer)
		r.put(201, "team/m", fmt.Sprint("t", i), m)
		if i < 37 {
			layers = append(layers, identity.Sum(layer))
		} else {
			r.do(202, "DELETE", "/v2/team/m/manifests/"+identity.Sum(m).String(), nil)
		}
	}
	h.forward(week)
	r.stop()
	file, err := os.ReadFile(filepath.Join(r.dir, "index.db"))
	if err != nil {
		t.Fatal(err)
	}
	r.start()
	return r, h, layers, file
}

// begin starts a rig on another file of its index. damaged says that it does not open.
func (r *rig) begin(file []byte) (damaged bool) {
	r.t.Helper()
	path := filepath.Join(r.dir, "index.db")
	if err := os.WriteFile(path, file, 0o600); err != nil {
		r.t.Fatal(err)
	}
	kv, err := boltkv.Open(path, boltkv.Options{})
	if errors.Is(err, index.ErrDamaged) {
		return true
	}
	if err := errors.Join(err, kv.Close()); err != nil {
		r.t.Fatal(err)
	}
	r.start()
	return false
}

// TestDigestFlipped: a bit of a digest in a row of the index that is only a key. The row says that a manifest refers to
// another blob, and nothing says any more that it refers to this one: a collection notices before anything goes, and
// so does a scrub.
func TestDigestFlipped(t *testing.T) {
	r, _, layers, file := flipRig(t)
	tried, found := 0, 0
	for n, d := range layers[:12] {
		row := append([]byte{'b'}, d[:]...) // the blob, and then the repository
		for at := 0; ; at++ {
			i := bytes.Index(file[at:], append(slices.Clone(row), "team/m\x00"...))
			if i < 0 {
				break
			}
			at += i
			spoilt := slices.Clone(file)
			spoilt[at+1+31-n%3] ^= 1 << (n % 8) // near its end, so that the keys stay in order
			r.stop()
			if r.begin(spoilt) {
				r.begin(file)
				continue
			}
			tried++
			if used, err := r.ix.Referred(t.Context(), d); err != nil || used {
				continue // the row was none that is in use
			}
			found++
			r.lacks(d)
		}
	}
	if tried < 10 || found < 10 {
		t.Errorf("tried %d, found %d", tried, found)
	}
}

// lacks checks that what the index has lost is noticed, and that nothing goes.
func (r *rig) lacks(d identity.Digest) {
	r.t.Helper()
	ctx, before := r.t.Context(), len(r.stored())
	for _, dry := range []bool{true, false} {
		failed := r.reg.Collector().Totals().Failed
		did, err := r.reg.Collector().Collect(ctx, upkeep.Terms{Force: true, DryRun: dry})
		if !errors.Is(err, upkeep.ErrLacking) || !strings.Contains(err.Error(), d.String()) ||
			!strings.Contains(err.Error(), "of team/m") || did.Removed.Blobs > 0 || len(r.stored()) != before {
			r.t.Errorf("dry %v: %v, %+v", dry, err, did)
		}
		if !dry && r.reg.Collector().Totals().Failed != failed+1 {
			r.t.Error("it does not count as failed")
		}
	}
	if !strings.Contains(r.log.String(), `level=ERROR msg="the index is damaged, nothing is collected: kiln-registry`) {
		r.t.Error(r.log)
	}
	r.agrees(false)
	if did, err := r.reg.Scrubber().Scrub(ctx, upkeep.Order{}); err != nil || !strings.Contains(did.Lacking, d.String()) {
		r.t.Errorf("%+v, %v", did, err)
	}
	if !strings.Contains(r.log.String(), `level=ERROR msg="the index lacks what is on record: kiln-registry reindex`) {
		r.t.Error(r.log)
	}
	r.agrees(false)
	if err := r.reg.Reindex(ctx); err != nil {
		r.t.Fatal(err)
	}
	if did, err := r.reg.Scrubber().Scrub(ctx, upkeep.Order{}); err != nil || did.Lacking != "" {
		r.t.Errorf("%+v, %v", did, err)
	}
	r.agrees(true)
	if did := r.collect(upkeep.Terms{Force: true, DryRun: true}); did.Unused.Blobs != 3 {
		r.t.Errorf("after a reindex: %+v", did)
	}
}

// agrees checks whether the index is said to agree with the records.
func (r *rig) agrees(agrees bool) {
	r.t.Helper()
	h, ok := r.reg.Health(), false
	for _, c := range h.Checks {
		ok = ok || c.Name == "index_agrees_with_records" && c.Pass == agrees
	}
	if !ok || (h.Status == "ok") != agrees {
		r.t.Errorf("want agrees %v: %+v", agrees, h)
	}
}

// TestClaims: a blob stays that a manifest refers to by the store's refs, in whatever order these stand, though the
// index knows nothing of it. A manifest that was deleted keeps nothing, nor does one that only mentions the blob.
func TestClaims(t *testing.T) {
	orphan := []byte("orphan")
	d := identity.Sum(orphan)
	manifest := func(digest, more string) []byte {
		return fmt.Appendf(nil, `{"schemaVersion":2,"mediaType":%q,"config":{`+
			`"mediaType":"application/vnd.oci.empty.v1+json","digest":%q,"size":2},`+
			`"layers":[{"mediaType":"x","digest":"%s","size":%d}]%s}`, manifestType,
			identity.Sum([]byte("{}")), digest, len(orphan), more)
	}
	named := manifest(d.String(), "")
	other := identity.Sum([]byte("other")).String()
	put := func(m []byte, seq uint64) blobstore.Ref {
		of := identity.Sum(m)
		return blobstore.Ref{Repo: "a", Name: of.String(), Digest: of, Seq: seq, MediaType: manifestType, Manifest: m,
			Time: time.Now()}
	}
	gone := func(m []byte, seq uint64) blobstore.Ref {
		ref := put(m, seq)
		ref.Deleted, ref.Manifest = true, nil
		return ref
	}
	for name, c := range map[string]struct {
		refs  []blobstore.Ref
		stays bool
	}{
		"put":                   {[]blobstore.Ref{put(named, 5)}, true},
		"deleted":               {[]blobstore.Ref{put(named, 5), gone(named, 6)}, false},
		"put again":             {[]blobstore.Ref{put(named, 5), gone(named, 6), put(named, 7)}, true},
		"deleted, out of order": {[]blobstore.Ref{gone(named, 6), put(named, 5)}, false},
		"put again, reversed":   {[]blobstore.Ref{put(named, 7), gone(named, 6), put(named, 5)}, true},
		"escaped": {[]blobstore.Ref{put(manifest(`\u0073ha256\u003a`+strings.TrimPrefix(d.String(), "sha256:"), ""), 5)},
			true},
		"mentioned": {[]blobstore.Ref{put(manifest(other, `,"annotations":{"of":"`+d.String()+`"}`), 5)}, false},
		"a tag":     {[]blobstore.Ref{{Repo: "a", Name: "v1", Digest: d, Seq: 5, Time: time.Now()}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			h := new(hands)
			r := newRig(t, func(r *rig) { r.clock = h.clock })
			r.blob("a", orphan)
			h.forward(week)
			if _, err := r.store.Put(t.Context(), c.refs...); err != nil {
				t.Fatal(err)
			}
			did, err := r.reg.Collector().Collect(t.Context(), upkeep.Terms{Force: true})
			if kept := r.kept(d)[0]; kept != c.stays || errors.Is(err, upkeep.ErrLacking) != c.stays || !c.stays && err != nil {
				t.Errorf("kept %v: %v, %+v", kept, err, did)
			}
		})
	}
}

// TestRefsUnread: where the refs can't be read, or the index is found damaged, nothing goes.
func TestRefsUnread(t *testing.T) {
	h := new(hands)
	r := newRig(t, func(r *rig) { r.clock = h.clock })
	r.put(201, "a", "v1", r.image("a", []byte("one")))
	d := r.blob("a", []byte("orphan"))
	h.forward(week)
	c := r.reg.Collector()
	broken := errors.New("the index is broken")
	c.Checked = func(context.Context) error { return broken }
	if did, err := c.Collect(t.Context(), upkeep.Terms{Force: true}); !errors.Is(err, broken) || did.Found.Blobs > 0 {
		t.Errorf("%v, %+v", err, did)
	}
	c.Checked = nil
	if err := os.WriteFile(filepath.Join(r.dir, "refs.log"), make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	did, err := c.Collect(t.Context(), upkeep.Terms{Force: true})
	if !errors.Is(err, blobstore.ErrRefsDamaged) || did.Removed.Blobs > 0 || !r.kept(d)[0] {
		t.Errorf("%v, %+v", err, did)
	}
}

// TestScrubFindsLoss: rows that are gone from the index are found by a scrub, whatever they say, and it says so until a
// scrub finds nothing any more. One scrub may find more than is named.
func TestScrubFindsLoss(t *testing.T) {
	r := newRig(t, nil)
	for i := range 600 {
		r.put(201, "team/m", fmt.Sprint("t", i), r.image("team/m", fmt.Append(nil, i)))
	}
	scrub := func(want string) {
		t.Helper()
		did, err := r.reg.Scrubber().Scrub(t.Context(), upkeep.Order{})
		if err != nil || !strings.Contains(did.Lacking, want) || (did.Lacking == "") != (want == "") {
			t.Errorf("want %q: %+v, %v", want, did, err)
		}
		r.agrees(want == "")
	}
	scrub("")
	var rows [][2][]byte
	tags := []byte("tteam/m\x00")
	err := r.kv.Update(t.Context(), func(x index.Txn) error {
		for k, v := range x.Range(tags, append(tags, 0xff)) {
			rows = append(rows, [2][]byte{bytes.Clone(k), bytes.Clone(v)})
		}
		return x.Delete(rows[100][0])
	})
	if err != nil {
		t.Fatal(err)
	}
	scrub("the last change of the tag: " + string(rows[100][0][len(tags):]) + " of team/m")
	all := func(do func(x index.Txn, row [2][]byte) error) {
		t.Helper()
		err := r.kv.Update(t.Context(), func(x index.Txn) error {
			for _, row := range rows {
				if err := do(x, row); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	all(func(x index.Txn, row [2][]byte) error { return x.Delete(row[0]) })
	scrub("and at least")
	all(func(x index.Txn, row [2][]byte) error { return x.Put(row[0], row[1]) })
	scrub("")
	if n := strings.Count(r.log.String(), "the index lacks what is on record"); n != 17 {
		t.Errorf("%d lines", n)
	}
}

// TestCountFlipped: a bit of the number of rows of a page of the index. Rows are gone by it, and no other row shows it.
// It is found when the file is opened; where it is not, no blob of a manifest goes.
func TestCountFlipped(t *testing.T) {
	r, _, layers, file := flipRig(t)
	size, tried := os.Getpagesize(), 0
	for page := 2; page < len(file)/size; page++ {
		at := page*size + 8
		count := binary.NativeEndian.Uint16(file[at+2:])
		if binary.NativeEndian.Uint16(file[at:]) != 2 || count < 2 {
			continue
		}
		for bit := range 7 {
			spoilt := slices.Clone(file)
			binary.NativeEndian.PutUint16(spoilt[at+2:], count^1<<bit)
			r.stop()
			if tried++; r.begin(spoilt) {
				r.begin(file)
				continue
			}
			_, err := r.reg.Collector().Collect(t.Context(), upkeep.Terms{Force: true})
			if err != nil && !errors.Is(err, upkeep.ErrLacking) {
				t.Errorf("page %d, bit %d: %v", page, bit, err)
			}
			if kept := r.kept(layers...); slices.Contains(kept, false) {
				t.Fatalf("page %d, bit %d: kept %v", page, bit, kept)
			}
		}
	}
	if tried < 20 {
		t.Errorf("tried %d", tried)
	}
}
