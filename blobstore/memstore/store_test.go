package memstore

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/storetest"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
)

func TestMain(m *testing.M) { testlanes.Use(m).Run() }

// medium lets the suite end one Store and begin the next on the same content, and fail changes.
type medium struct {
	storetest.Faults
	st *Store
}

func newMedium(testing.TB) storetest.Medium {
	m := &medium{st: New()}
	m.st.segment = m.SegmentSize()
	m.st.Fault = func(op Op, do func() error) error {
		if (op == OpCreate || op == OpAppend || op == OpPut) && m.Full() {
			return blobstore.ErrNoSpace
		}
		return m.Do(do)
	}
	return m
}

// SegmentSize is one that gives small blobs midstates.
func (m *medium) SegmentSize() int64 { return 37 << 10 }

func (m *medium) Open(testing.TB) (storetest.Store, error) {
	m.st = m.st.Reopen()
	return m.st, nil
}

func (m *medium) Kill(t testing.TB, st storetest.Store) {
	if err := st.Close(); err != nil {
		t.Fatal(err)
	}
}

func (m *medium) Check(t testing.TB) {
	if err := m.st.Check(); err != nil {
		t.Error(err)
	}
}

func TestStore(t *testing.T) { storetest.Run(t, newMedium) }

// TestCheck shows that the store finds what is wrong with it.
func TestCheck(t *testing.T) {
	for _, c := range []struct {
		what  string
		spoil func(st *Store, u *session)
	}{
		{"blob", func(st *Store, _ *session) {
			for _, b := range st.blobs {
				b.data[0] ^= 1
			}
		}},
		{"midstates", func(st *Store, _ *session) {
			for _, b := range st.blobs {
				b.midstates = []byte("x")
			}
		}},
		{"quarantine", func(st *Store, _ *session) {
			for d := range st.blobs {
				st.aside[d] = &aside{}
			}
		}},
		{"upload", func(_ *Store, u *session) { u.hash.Write([]byte{0}) }},
		{"refs", func(st *Store, _ *session) { st.refs[0].Manifest[0] ^= 1 }},
	} {
		st, u := filled(t)
		if err := st.Check(); err != nil {
			t.Fatal(err)
		}
		c.spoil(st, st.uploads[u.ID()])
		if err := st.Check(); !errors.Is(err, blobstore.ErrDamaged) {
			t.Errorf("%s: %v, want ErrDamaged", c.what, err)
		}
	}
}

// filled returns a store with a blob, an upload and a ref.
func filled(t *testing.T) (*Store, blobstore.Upload) {
	t.Helper()
	st := New()
	var last blobstore.Upload
	for _, commit := range []bool{true, false} {
		u, err := st.Create(t.Context(), identity.Digest{}, -1)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := u.Append(t.Context(), 0, strings.NewReader("some bytes")); err != nil {
			t.Fatal(err)
		}
		if last = u; commit {
			if _, err := u.Commit(t.Context(), identity.Sum([]byte("some bytes"))); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := st.Put(t.Context(), blobstore.Ref{Repo: "r", Manifest: []byte("{}")}); err != nil {
		t.Fatal(err)
	}
	return st, last
}

// TestPushOverDamage: whoever pushes the right bytes over a copy that has rotted heals it.
func TestPushOverDamage(t *testing.T) {
	st, b := New(), []byte("some bytes")
	d := identity.Sum(b)
	for range 2 {
		u, err := st.Create(t.Context(), d, int64(len(b)))
		if err != nil {
			t.Fatal(err)
		}
		i, err := u.Finish(t.Context(), 0, bytes.NewReader(b), d)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(st.Check(), u.Abort(t.Context())); err != nil {
			t.Fatal(err)
		}
		st.blobs[d].data[0]++
		if _, err := st.Open(t.Context(), i, 0, -1); !errors.Is(err, blobstore.ErrDamaged) {
			t.Errorf("open of what has rotted: %v", err)
		}
	}
}
