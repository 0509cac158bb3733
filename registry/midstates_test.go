package registry_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// large returns bytes of several segments, which differ by seed.
func large(seed byte) []byte {
	b := make([]byte, 2*lanes.SegmentSize+12345)
	for i := range b {
		b[i] = seed ^ byte(i>>3) ^ byte(i>>13)
	}
	return b
}

// midstates returns those of a blob, which must be held, as a client gets them, after checking the blob with them.
func (s *server) midstates(b []byte) []byte {
	s.t.Helper()
	d := identity.Sum(b)
	a := s.want(200, "GET", api.PathMidstates(d), nil)
	states, err := lanes.Parse(a.body)
	if err != nil {
		s.t.Fatal(err)
	}
	if states.Digest != d || states.Size != int64(len(b)) {
		s.t.Errorf("they are of %s, %d bytes", states.Digest, states.Size)
	}
	for i := range states.Len() {
		off, n := states.Range(i)
		if err := states.Verify(i, b[off:off+n]); err != nil {
			s.t.Error(err)
		}
	}
	return a.body
}

func (s *server) segmentsPath(d identity.Digest) string {
	return filepath.Join(s.dir, "segments", "sha256", d.Hex()[:2], d.Hex())
}

// TestMidstates: midstates are recorded by a push and served to whoever may pull the blob, and nobody else learns that
// the blob is there.
func TestMidstates(t *testing.T) {
	s := newServer(t)
	b := large(1)
	d := s.blob("secret/model", b)
	form := s.midstates(b)
	path := api.PathMidstates(d)
	head := s.want(200, "HEAD", path, nil)
	if len(head.body) != 0 || head.header.Get("Content-Type") != api.MediaTypeMidstates ||
		head.header.Get("Content-Length") != "168" || len(form) != 168 {
		t.Errorf("%v, GET has %d bytes", head, len(form))
	}
	small := s.blob("secret/model", bytes.Repeat([]byte("s"), lanes.SegmentSize))
	if a := s.want(404, "GET", api.PathMidstates(small), nil); a.code() != api.CodeMidstatesUnknown {
		t.Error("of one segment:", a)
	}
	if a := s.want(400, "GET", "/v1/blobs/sha256:abc/midstates", nil); a.code() != api.CodeDigestInvalid {
		t.Error(a)
	}
	s.want(405, "PUT", path, form)
	secrets := s.guard(map[string]string{
		"reader": "secret/model pull", "other": "open/** pull,push", "pusher": "secret/model push",
		"anonymous": "open/model pull",
	})
	nowhere := identity.Sum([]byte("nowhere"))
	for who, sees := range map[string]bool{"reader": true, "other": false, "": false} {
		s.token = secrets[who]
		a := s.do("GET", path, nil)
		unknown := s.want(404, "GET", api.PathMidstates(nowhere), nil)
		if sees && (a.status != 200 || !bytes.Equal(a.body, form)) {
			t.Errorf("%s: %v", who, a)
		}
		same := strings.ReplaceAll(string(unknown.body), nowhere.String(), d.String()) == string(a.body)
		if !sees && (a.status != 404 || a.code() != api.CodeBlobUnknown || !same) {
			t.Errorf("%s: %v, and of what is nowhere %v", who, a, unknown)
		}
		if a := s.do("GET", api.PathMidstates(small), nil); !sees && a.code() != api.CodeBlobUnknown {
			t.Errorf("%s: of one segment: %v", who, a)
		}
	}
	s.token = secrets["pusher"] // who may pull from nowhere
	s.want(403, "GET", path, nil)
	s.token = secrets["other"] // who has the bytes as well, from now on
	s.blob("open/model", b)
	s.want(200, "GET", path, nil)
	s.token = ""
	s.want(200, "GET", path, nil)
}

// TestMidstatesOfDeleted: what was taken out of every repository has none, and what is damaged has none either.
func TestMidstatesOfDeleted(t *testing.T) {
	s := newServer(t)
	b := large(2)
	d := s.blob("a", b)
	s.want(202, "DELETE", api.PathBlob("a", d), nil)
	if a := s.want(404, "GET", api.PathMidstates(d), nil); a.code() != api.CodeBlobUnknown {
		t.Error(a)
	}
	s.blob("b", b)
	form := s.midstates(b)
	i, err := s.store.Stat(t.Context(), d)
	if err == nil {
		err = s.store.SetAside(t.Context(), i, "a test wants it so")
	}
	if err != nil {
		t.Fatal(err)
	}
	if a := s.want(404, "GET", api.PathMidstates(d), nil); a.code() != api.CodeBlobUnknown {
		t.Error("in quarantine:", a)
	}
	s.blob("a", b)
	if !bytes.Equal(s.midstates(b), form) {
		t.Error("other midstates once it is healed")
	}
}

// TestMidstatesDamaged: midstates that can't be used count as none, which is noticed; the next scrub puts right ones in
// their place.
func TestMidstatesDamaged(t *testing.T) {
	s := newServer(t)
	b := large(3)
	d := s.blob("a", b)
	form := s.midstates(b)
	path := s.segmentsPath(d)
	s.blob("a", large(4))
	other := s.midstates(large(4))
	for name, spoil := range map[string]func() error{
		"empty":      func() error { return os.WriteFile(path, nil, 0o600) },
		"cut":        func() error { return os.WriteFile(path, form[:len(form)-1], 0o600) },
		"longer":     func() error { return os.WriteFile(path, append(slices.Clone(form), 0), 0o600) },
		"flipped":    func() error { return os.WriteFile(path, flipped(form, 100), 0o600) },
		"of another": func() error { return os.WriteFile(path, other, 0o600) },
		"a folder":   func() error { return os.MkdirAll(filepath.Join(path, "some", "more"), 0o700) },
		"a link":     func() error { return os.Symlink("/dev/zero", path) },
	} {
		if err := errors.Join(os.Remove(path), spoil()); err != nil {
			t.Fatal(err)
		}
		s.log.Reset()
		if a := s.want(404, "GET", api.PathMidstates(d), nil); a.code() != api.CodeMidstatesUnknown {
			t.Errorf("%s: %v", name, a)
		}
		if !strings.Contains(s.log.String(), "midstates damaged") {
			t.Errorf("%s: the log says %q", name, s.log)
		}
		if got := s.want(200, "GET", api.PathBlob("a", d), nil).body; !bytes.Equal(got, b) {
			t.Errorf("%s: the blob has other bytes", name)
		}
		did, err := s.reg.Scrubber().Scrub(t.Context(), upkeep.Order{Digests: []identity.Digest{d}})
		if err != nil || did.Midstates != 1 || did.Damaged != 0 {
			t.Errorf("%s: %+v, %v", name, did, err)
		}
		if !bytes.Equal(s.midstates(b), form) {
			t.Errorf("%s: other midstates after the scrub", name)
		}
	}
}

func flipped(b []byte, at int) []byte {
	b = slices.Clone(b)
	b[at] ^= 1
	return b
}

// TestClientMidstates: the client gets what the registry has, and its errors.
func TestClientMidstates(t *testing.T) {
	s := newServer(t)
	b := large(5)
	d := s.blob("a", b)
	c, err := client.New(strings.TrimPrefix(s.http.URL, "http://"), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got, err := c.Midstates(t.Context(), d, lanes.FormSize(int64(len(b)))); err != nil || !bytes.Equal(got, s.midstates(b)) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if _, err := c.Midstates(t.Context(), s.blob("a", []byte("small")), 100); !errors.Is(err, api.ErrMidstatesUnknown) {
		t.Error(err)
	}
	if _, err := c.Midstates(t.Context(), identity.Sum([]byte("x")), 100); !errors.Is(err, api.ErrBlobUnknown) {
		t.Error(err)
	}
}
