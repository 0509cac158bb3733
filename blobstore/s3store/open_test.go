package s3store

import (
	"crypto/rand"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store/bucket"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

// TestPlaces: what may be at the place where a store is wanted, and what is said of it.
func TestPlaces(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	says := func(what string, err, is error, words ...string) {
		t.Helper()
		if is != nil {
			s.want(what, err, is)
		}
		for _, w := range words {
			if err == nil || !strings.Contains(err.Error(), w) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%s: %v, want %q in one line", what, err, w)
			}
		}
	}
	at := func(prefix string) Config {
		c := s.via
		c.Prefix = prefix
		return c
	}
	put := func(c Config, name, body string) {
		t.Helper()
		b, err := bucket.Dial(c, bucket.Options{})
		s.must(err)
		_, err = b.Put(s.ctx, b.Key(name), []byte(body), bucket.Condition{})
		s.must(err)
	}
	open := func(c Config) error {
		st, err := Open(s.ctx, c, Options{})
		if err == nil {
			s.must(st.Close())
		}
		return err
	}

	says("nothing", open(at("nothing")), blobstore.ErrNotStore, "s3://"+s.via.Bucket+"/nothing", "it has no store.json")
	put(at("taken"), "else/thing", "x")
	says("open of what is taken", open(at("taken")), blobstore.ErrNotStore, "it has no store.json")
	says("making a store of what is taken", Init(s.ctx, at("taken")), blobstore.ErrNotStore,
		"s3://"+s.via.Bucket+"/taken", "it has no store.json, but taken/else/thing and perhaps more")
	says("making one around it", Init(s.ctx, at("")), blobstore.ErrNotStore, "but ")
	s.must(Init(s.ctx, at("take"))) // beside it
	s.must(Init(s.ctx, at("take")))
	s.must(open(at("take")))

	later, err := seal(marker{formatName, formatVersion + 1, "X"})
	s.must(err)
	put(at("later"), markerName, string(later))
	format := fmt.Sprintf("is a store of format %d: this program knows formats up to %d", formatVersion+1, formatVersion)
	says("a later format", open(at("later")), nil, "s3://"+s.via.Bucket+"/later", format)
	says("making a store over a later format", Init(s.ctx, at("later")), nil, format)

	other, err := seal(marker{"another program", 1, "X"})
	s.must(err)
	for name, body := range map[string]string{
		"empty": "", "junk": "junk", "other": string(other),
		"not-sealed": `{"format":"kiln-store","version":1,"id":"X"}` + "\n",
	} {
		put(at(name), markerName, body)
		says(name, open(at(name)), blobstore.ErrDamaged, "store.json is not what this program writes")
		says(name, Init(s.ctx, at(name)), blobstore.ErrDamaged, "store.json is not what this program writes")
	}

	absent := s.via
	absent.Bucket = "not-there"
	says("no bucket", open(absent), nil, "open store: there is no bucket \"not-there\"")
	says("no bucket", Init(s.ctx, absent), nil, "there is no bucket \"not-there\"")
	s.proxy.On(tests3.Is(tests3.PutObject), tests3.Answer(403, "AccessDenied"))
	says("read only", open(at("take")), nil,
		"open store: these credentials may not s3:PutObject on s3://"+s.via.Bucket+"/take/store.json")
}

// TestIdentity: a store keeps its identity, and two have different ones.
func TestIdentity(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	other := newSite(t).open(Options{})
	first, second := s.open(Options{}), s.past()
	if first.ID() == "" || first.ID() != second.ID() || first.ID() == other.ID() {
		t.Errorf("%q, %q, %q", first.ID(), second.ID(), other.ID())
	}
}

// TestDamage: what was changed in the bucket for good is found, and what can be healed by another push is.
func TestDamage(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	st := s.open(Options{})
	b := noise(1, 3000)
	i, err := s.push(st, b, pushing{})
	s.must(err)
	for n := range 3 {
		_, err = st.Put(s.ctx, ref(n+1))
		s.must(err)
	}
	damage := func(key string) {
		t.Helper()
		o, err := st.b.Get(s.ctx, key, smallObject, nil)
		s.must(err)
		o.Body[len(o.Body)/2] ^= 4
		_, err = st.b.Put(s.ctx, key, o.Body, bucket.Condition{})
		s.must(err)
	}

	damage(st.blobKey(i.Digest, liveName))
	_, err = st.Stat(s.ctx, i.Digest)
	s.want("stat with a damaged marker", err, blobstore.ErrDamaged)
	s.want("delete with a damaged marker", st.Delete(s.ctx, i), blobstore.ErrDamaged)
	u, err := st.Create(s.ctx, i.Digest, -1)
	s.must(err)
	_, err = s.send(st, u.ID(), b, pushing{})
	s.must(err)
	s.holds(st, b)
	s.clean()

	lost, err := st.Stat(s.ctx, i.Digest)
	s.must(err)
	s.must(st.b.Remove(s.ctx, st.bytesKey(lost.Digest, lost.Generation)))
	_, err = st.Open(s.ctx, lost, 0, -1)
	s.want("open of a copy whose bytes are gone", err, blobstore.ErrNotFound)
	u, err = st.Create(s.ctx, i.Digest, -1)
	s.must(err)
	_, err = s.send(st, u.ID(), b, pushing{})
	s.must(err)
	s.holds(st, b)
	s.clean()

	u, err = st.Create(s.ctx, i.Digest, -1)
	s.must(err)
	damage(st.stateKey(u.ID()))
	n := 0
	for range st.Uploads(s.ctx) {
		n++
	}
	if n != 1 {
		t.Errorf("%d uploads are listed", n)
	}
	_, err = st.Resume(s.ctx, u.ID())
	s.want("resume of a damaged upload", err, blobstore.ErrUploadUnknown)
	s.clean()

	damage(st.refsKey(2))
	for _, err = range st.Since(s.ctx, 0) {
	}
	s.want("damaged refs", err, blobstore.ErrDamaged)
	s.must(st.b.Remove(s.ctx, st.refsKey(1)))
	for _, err = range st.Since(s.ctx, 0) {
	}
	s.want("refs of which the first are gone", err, blobstore.ErrRefsDamaged)
	all := refs(t, s.mended(2))
	if len(all) != 1 || all[0].Seq != 3 {
		t.Errorf("refs after the loss: %+v", all)
	}
	if all := refs(t, s.mended(0)); len(all) != 1 {
		t.Errorf("refs later: %+v", all)
	}
	if _, err := st.b.Put(s.ctx, st.refsKey(1<<63), []byte("x"), bucket.Condition{}); err != nil {
		t.Fatal(err)
	}
	_, err = Open(s.ctx, s.direct, Options{AcceptLoss: true})
	s.want("open with a key far behind the log", err, blobstore.ErrRefsDamaged)
}

// mended opens the store and accepts the loss of so many objects of the log.
func (s *site) mended(lost int) *Store {
	s.Helper()
	var told []string
	st, err := Open(s.ctx, s.direct, Options{AcceptLoss: true, Notify: func(line string) { told = append(told, line) }})
	s.must(err)
	s.Cleanup(func() { st.Close() })
	if got := st.Dropped(); len(got) != lost || len(told) != lost {
		s.Errorf("dropped %v, told %q, want %d", got, told, lost)
	}
	return st
}

// TestReadOnly: a store that is opened for reading only is left as it was, but for who owns it.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	st := s.past()
	b := noise(1, 3000)
	i, err := s.push(st, b, pushing{})
	s.must(err)
	_, err = st.Put(s.ctx, ref(1))
	s.must(err)
	left := map[string]string{} // ids of uploads
	for _, what := range []string{"open", "damaged", "ended"} {
		u, err := st.Create(s.ctx, identity.Digest{}, -1)
		s.must(err)
		_, err = u.Append(s.ctx, 0, strings.NewReader("some"))
		s.must(err)
		left[what] = u.ID()
	}
	ended, err := st.begin(s.ctx, left["ended"], false)
	s.must(err)
	s.must(ended.end(s.ctx))
	ended.close()
	_, err = st.b.Put(s.ctx, st.stateKey(left["damaged"]), []byte("damaged"), bucket.Condition{})
	s.must(err)
	_, err = st.b.Begin(s.ctx, st.blobKey(i.Digest, rand.Text()))
	s.must(err)
	keys := func() (all []string) {
		for o, err := range st.b.List(s.ctx, st.b.Key(""), "", 0) {
			s.must(err)
			if !strings.HasSuffix(o.Key, ownerName) {
				all = append(all, fmt.Sprint(o.Key, o.Modified, o.Size))
			}
		}
		for m, err := range st.b.Multiparts(s.ctx, st.b.Key("")) {
			s.must(err)
			all = append(all, m.Key)
		}
		return all
	}
	before := keys()

	st, err = Open(s.ctx, s.direct, Options{ReadOnly: true, Exclusive: true})
	s.must(err)
	s.holds(st, b)
	u, err := st.Resume(s.ctx, left["open"])
	s.must(err)
	for _, what := range []string{"damaged", "ended"} {
		_, err := st.Resume(s.ctx, left[what])
		s.want("resume of what is "+what, err, blobstore.ErrUploadUnknown)
	}
	_, created := st.Create(s.ctx, identity.Digest{}, -1)
	_, put := st.Put(s.ctx, ref(2))
	_, appended := u.Append(s.ctx, 4, strings.NewReader("x"))
	_, committed := u.Commit(s.ctx, identity.Sum([]byte("some")))
	for what, err := range map[string]error{
		"create": created, "put": put, "append": appended, "commit": committed, "abort": u.Abort(s.ctx),
		"delete": st.Delete(s.ctx, i), "set aside": st.SetAside(s.ctx, i, "why"),
	} {
		s.want(what, err, blobstore.ErrReadOnly)
	}
	s.must(st.Close())
	if after := keys(); !slices.Equal(before, after) {
		t.Errorf("changed: %q, was %q", after, before)
	}
}
