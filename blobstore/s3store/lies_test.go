package s3store

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/minio/minio-go/v7"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

// TestChangedAnswers: a bit of an answer changes on its way. Once or twice it is asked for again; when it goes on, what
// it says is never believed.
func TestChangedAnswers(t *testing.T) {
	t.Parallel()
	for class, match := range map[string]tests3.Match{
		"marker": markerGet, "state": stateGet, "tail": tailGet, "refs": refsGet,
	} {
		for _, at := range []int64{0, 33} {
			t.Run(fmt.Sprintf("%s at %d", class, at), func(t *testing.T) {
				t.Parallel()
				testChangedAnswers(newSite(t), match, at)
			})
		}
	}
}

func testChangedAnswers(s *site, match tests3.Match, at int64) {
	w := newWork(s, s.open(Options{}))
	w.blobs = [][]byte{noise(1, 3000), noise(2, 4000)}
	twice := s.proxy.On(tests3.First(2, match), tests3.FlipAnswer(at))
	for _, b := range w.blobs {
		_, err := w.push(w.st, b, pushing{step: 1500})
		w.must(err)
	}
	w.must(w.put(w.refs...))
	if got := compact(refs(w, w.st)); len(got) != len(w.refs) {
		w.Errorf("%d refs, want %d", len(got), len(w.refs))
	}
	if twice.Hits() != 2 {
		w.Errorf("%d answers were changed", twice.Hits())
	}
	always := s.proxy.On(match, tests3.FlipAnswer(at))
	other := noise(5, 4000)
	_, pushed := w.push(w.st, other, pushing{step: 1500})
	var read error
	for _, err := range w.st.Since(w.ctx, 0) {
		if read = err; err != nil {
			break
		}
	}
	if err := errors.Join(pushed, read); !errors.Is(err, blobstore.ErrDamaged) &&
		!errors.Is(err, blobstore.ErrUploadUnknown) {
		w.Errorf("with answers that are always changed: pushed %v, read %v", pushed, read)
	}
	always.Off()
	_, err := w.push(w.st, other, pushing{step: 1500})
	w.must(err)
	w.blobs = append(w.blobs, other)
	w.check()
}

// TestChangedMarkerOfStore: nothing is done to a store of which store.json does not read.
func TestChangedMarkerOfStore(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	rule := s.proxy.On(storeGet, tests3.FlipAnswer(12))
	_, err := Open(s.ctx, s.via, Options{})
	s.want("open", err, blobstore.ErrDamaged)
	s.want("make a store", Init(s.ctx, s.via), blobstore.ErrDamaged)
	if n := s.proxy.Count(tests3.PutObject); n != 0 {
		t.Errorf("%d objects were put", n)
	}
	rule.Off()
	s.open(Options{})
}

const (
	wrongCRC = "AAAAAA=="
	wrongSHA = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="
	wrongTag = `"00000000000000000000000000000000"`
)

var checksumElement = regexp.MustCompile("<ChecksumCRC32C>[^<]*</ChecksumCRC32C>")

// completeSays makes the answer to a completed upload say another checksum, or none.
func completeSays(sum string) tests3.Fault {
	return tests3.EditAnswer(func(h http.Header, body []byte) []byte {
		h.Del("X-Amz-Checksum-Crc32c")
		if sum != "" {
			sum = "<ChecksumCRC32C>" + sum + "</ChecksumCRC32C>"
		}
		return checksumElement.ReplaceAll(body, []byte(sum))
	})
}

// TestLies: a server that says that it stored something else is not believed, nor is what it may have stored shown.
func TestLies(t *testing.T) {
	t.Parallel()
	type lie struct {
		match tests3.Match
		fault tests3.Fault
	}
	crc := tests3.AnswerHeader("X-Amz-Checksum-Crc32c", wrongCRC)
	sha := tests3.AnswerHeader("X-Amz-Checksum-Sha256", wrongSHA)
	tag, none := tests3.AnswerHeader("Etag", wrongTag), tests3.Answer(404, "NoSuchKey")
	for name, c := range map[string]struct {
		size  int
		lies  []lie
		works bool // all the same
	}{
		"checksum of a part":                {partOf + 9, []lie{{partPut, crc}}, false},
		"tag of a part":                     {partOf + 9, []lie{{partPut, tag}}, false},
		"checksum of parts":                 {partOf + 9, []lie{{complete, completeSays(wrongCRC)}}, true},
		"checksum of parts, also later":     {partOf + 9, []lie{{complete, completeSays(wrongCRC)}, {bytesHead, crc}}, false},
		"no parts are there":                {partOf + 9, []lie{{complete, completeSays("")}, {bytesHead, none}}, false},
		"parts are of no upload":            {partOf + 9, []lie{{complete, tests3.Answer(404, "NoSuchUpload")}}, false},
		"parts are wrong":                   {partOf + 9, []lie{{complete, tests3.Answer(400, "InvalidPart")}}, false},
		"checksum of what is less":          {900, []lie{{bytesPut, sha}}, false},
		"tag of what is less":               {900, []lie{{bytesPut, tag}}, true},
		"bytes of what is less are refused": {900, []lie{{bytesPut, tests3.FlipRequest(800)}}, false},
		"bytes of a part are refused":       {partOf + 9, []lie{{partPut, tests3.FlipRequest(partOf / 2)}}, false},
		"tag of a state":                    {partOf + 9, []lie{{statePut, tag}}, true},
		"tag of a state that is read":       {partOf + 9, []lie{{stateGet, tag}}, false},
		"tag of a marker":                   {900, []lie{{markerPut, tag}}, true},
		"checksum of a marker":              {900, []lie{{markerPut, sha}}, true},
		"marker is refused":                 {900, []lie{{markerPut, tests3.FlipRequest(30)}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			s.rounds = 3
			st, b := s.open(Options{}), noise(1, c.size)
			how := pushing{named: true, step: c.size/2 + 1}
			var rules []*tests3.Rule
			for _, l := range c.lies {
				rules = append(rules, s.proxy.On(l.match, l.fault))
			}
			_, err := s.push(st, b, how)
			if works := err == nil; works != c.works {
				t.Errorf("push: %v", err)
			}
			if n := s.whole(); n > 0 && !c.works {
				t.Errorf("%d blobs are shown", n)
			}
			for _, r := range rules {
				if r.Hits() == 0 {
					t.Error("no request met the lie")
				}
				r.Off()
			}
			_, err = s.push(st, b, how)
			s.must(err)
			s.holds(st, b)
			s.clean()
		})
	}
}

// silent is a server that says no checksum of anything.
func silent(p *tests3.Proxy, meanwhile func(key string)) {
	quiet := func(r *http.Request) tests3.Fault {
		return tests3.EditAnswer(func(h http.Header, body []byte) []byte {
			for name := range h {
				if strings.HasPrefix(name, "X-Amz-Checksum-") {
					h.Del(name)
				}
			}
			_, key, _ := strings.Cut(r.URL.Path[1:], "/")
			if complete(r) || bytesPut(r) {
				meanwhile(key)
			}
			return checksumElement.ReplaceAll(body, nil)
		})
	}
	p.On(either(complete, partPut, bytesHead, tests3.Is(tests3.PutObject)), func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { quiet(r)(next).ServeHTTP(w, r) })
	})
}

// TestNoChecksums: where the server confirms nothing, what it stored is read back before it is shown.
func TestNoChecksums(t *testing.T) {
	t.Parallel()
	for name, size := range map[string]int{"whole": 3000, "in parts": partOf + 3000} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			st, b, spoil := s.open(Options{}), noise(1, size), true
			client := tests3.Shared(t).Client(t)
			silent(s.proxy, func(key string) {
				if !spoil {
					return
				}
				wrong := bytes.Clone(b)
				wrong[size-7] ^= 1
				_, err := client.PutObject(s.ctx, s.direct.Bucket, key, bytes.NewReader(wrong), int64(size),
					minio.PutObjectOptions{})
				if err != nil {
					t.Error(err)
				}
			})
			u, err := st.Create(s.ctx, identity.Sum(b), -1)
			s.must(err)
			_, err = u.Finish(s.ctx, 0, bytes.NewReader(b), identity.Sum(b))
			s.want("finish of what was stored wrongly", err, blobstore.ErrUploadUnknown)
			if n := s.whole(); n != 0 {
				t.Errorf("%d blobs are shown", n)
			}
			spoil = false
			before := s.proxy.Count(tests3.GetObject)
			_, err = s.push(st, b, pushing{named: true})
			s.must(err)
			if n := s.proxy.Count(tests3.GetObject) - before; n < 4 { // of the state, twice of the marker, and of the bytes
				t.Errorf("%d objects were read: the blob was not", n)
			}
			s.holds(st, b)
			s.clean()
		})
	}
}

// TestUnknownLength: a server, or what is before it, may send answers without their length.
func TestUnknownLength(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.proxy.On(either(storeGet, stateGet, markerGet, tailGet, refsGet), func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			next.ServeHTTP(unsized{w}, r)
		})
	})
	st, b := s.open(Options{}), noise(1, 2000)
	_, err := s.push(st, b, pushing{step: 700})
	s.must(err)
	s.holds(st, b)
	_, err = st.Put(s.ctx, ref(1))
	s.must(err)
	if n := len(refs(t, st)); n != 1 {
		t.Errorf("%d refs", n)
	}
}

type unsized struct{ http.ResponseWriter }

func (u unsized) WriteHeader(status int) {
	u.Header().Del("Content-Length")
	u.ResponseWriter.WriteHeader(status)
	_ = http.NewResponseController(u.ResponseWriter).Flush() // or a small answer would get its length all the same
}

func (u unsized) Write(b []byte) (int, error) { return u.ResponseWriter.Write(b) }

var _ io.Writer = unsized{}
