package s3store

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/kiln-registry/kiln-registry/blobstore/storetest"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

func TestMain(m *testing.M) {
	minio.DefaultRetryUnit, minio.DefaultRetryCap = time.Millisecond, 8*time.Millisecond
	testlanes.Use(tests3.M{M: m}).Run()
}

// medium is a store in a bucket of a real server. The requests that change something can be made to fail.
type medium struct {
	storetest.Faults
	Config
	part      int64                                     // size of a part; 0: the usual one
	transport func(http.RoundTripper) http.RoundTripper // between the faults and the network; nil: nothing
}

// signIn puts the credentials of the server that all tests share into the environment.
var signIn sync.Once

// place makes an empty store in a new bucket.
func place(t testing.TB) Config {
	t.Helper()
	server := tests3.Shared(t)
	signIn.Do(func() {
		os.Setenv("AWS_ACCESS_KEY_ID", server.AccessKey)
		os.Setenv("AWS_SECRET_ACCESS_KEY", server.SecretKey)
	})
	return storeAt(t, server.Endpoint(), server.Bucket(t))
}

func storeAt(t testing.TB, endpoint, bucket string) Config {
	t.Helper()
	c, err := Parse("s3://" + bucket + "/some/prefix?addressing=path&endpoint=http://" + endpoint)
	if err != nil {
		t.Fatal(err)
	}
	if err := Init(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	return c
}

func newMedium(t testing.TB) storetest.Medium { return &medium{Config: place(t)} }

func (m *medium) Open(t testing.TB) (storetest.Store, error) {
	st, err := Open(context.WithoutCancel(t.Context()), m.Config, Options{Transport: m.wrap, Tries: 1})
	if err != nil {
		return nil, err
	}
	st.segment = m.SegmentSize()
	if m.part > 0 {
		st.partMin, st.saveEvery = m.part, 2*m.part
	}
	return st, nil
}

// SegmentSize is one that gives small blobs midstates.
func (m *medium) SegmentSize() int64 { return 64 << 10 }

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (m *medium) wrap(rt http.RoundTripper) http.RoundTripper {
	if m.transport != nil {
		rt = m.transport(rt)
	}
	return roundTripper(func(r *http.Request) (resp *http.Response, err error) {
		if r.Method == http.MethodGet || r.Method == http.MethodHead {
			return rt.RoundTrip(r)
		}
		if r.Method == http.MethodPut && m.Full() {
			return fullBucket(r)
		}
		err = m.Do(func() (err error) {
			resp, err = rt.RoundTrip(r)
			return err
		})
		if err != nil && resp != nil {
			resp.Body.Close()
			resp = nil
		}
		return resp, err
	})
}

// fullBucket answers as a server does that has no space for what a request sends.
func fullBucket(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return nil, err
		}
		r.Body.Close()
	}
	w := httptest.NewRecorder()
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(http.StatusInsufficientStorage)
	w.WriteString("<Error><Code>InsufficientStorage</Code><Message>the bucket is full</Message></Error>")
	return w.Result(), nil
}

func (m *medium) Kill(t testing.TB, st storetest.Store) {
	if err := st.Close(); err != nil { // which writes nothing in a store that is shared
		t.Fatal(err)
	}
}

// Check looks at every key: a blob that is shown has its bytes, bytes that are not shown belong to an open upload, and
// so do tails and multipart uploads.
func (m *medium) Check(t testing.TB) {
	st, err := Open(context.Background(), m.Config, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	ctx := context.Background()
	if _, err := st.Sweep(ctx, time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	open := map[string]state{}
	for u, err := range st.Uploads(ctx) {
		if err != nil {
			t.Fatal(err)
		}
		if open[u.ID], err = st.loadState(ctx, u.ID); err != nil {
			t.Errorf("upload %s: %v", u.ID, err)
		}
	}
	shown := map[string]bool{}
	for i, err := range st.List(ctx, identity.Digest{}) {
		if err != nil {
			t.Fatal(err)
		}
		shown[i.Generation] = true
		if o, err := st.b.Head(ctx, st.bytesKey(i.Digest, i.Generation)); err != nil || o.Size != i.Size {
			t.Errorf("blob %s: its bytes: %v, %v", i.Digest, o.Size, err)
		}
	}
	aside := map[string]bool{}
	for a, err := range st.Aside(ctx) {
		if err != nil {
			t.Fatal(err)
		}
		shown[a.Generation], aside[a.Digest.Hex()] = true, true
	}
	prefix := st.b.Key("")
	for o, err := range st.b.List(ctx, prefix, "", 0) {
		if err != nil {
			t.Fatal(err)
		}
		key := strings.Split(strings.TrimPrefix(o.Key, prefix), "/")
		name := strings.TrimSuffix(key[len(key)-1], midstatesMark)
		switch {
		case key[0] == markerName, key[0] == ownerName, key[0] == refsName, key[0] == uploadsName, name == liveName:
		case key[0] == asideName && aside[name]:
		case key[0] == tailsName && open[key[1]].Hash != nil:
		case key[0] == blobsName && (shown[name] || open[strings.TrimPrefix(name, unnamedMark)].Hash != nil):
		case key[0] == unnamedName && (shown[unnamedMark+name] || open[name].Hash != nil):
		default:
			t.Errorf("%s is left behind", o.Key)
		}
	}
	for m, err := range st.b.Multiparts(ctx, prefix) {
		if err != nil {
			t.Fatal(err)
		}
		if open[keyCopy(m.Key)].Multipart != m.ID {
			t.Errorf("multipart upload of %s is left behind", m.Key)
		}
	}
}

func TestStore(t *testing.T) {
	t.Parallel()
	storetest.Run(t, newMedium)
}

// TestStoreInParts runs the fault grid with an upload of two parts: where the first is sent, and where it is there.
func TestStoreInParts(t *testing.T) {
	t.Parallel()
	make := func(t testing.TB) storetest.Medium { return &medium{Config: place(t), part: partOf} }
	for name, c := range map[string]struct {
		received int
		actions  []string
	}{
		"first":  {partOf - 500, []string{"append", "finish"}},
		"second": {partOf + 500, []string{"append", "finish", "commit", "abort", "mismatch"}},
	} {
		t.Run(name, func(t *testing.T) {
			sizes := storetest.Sizes{Upload: partOf + 1000, Received: c.received}
			storetest.RunFaults(t, sizes, make, c.actions...)
		})
	}
}
