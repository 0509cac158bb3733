package s3store

import (
	"net/http"
	"strings"
	"testing"

	"github.com/minio/minio-go/v7/pkg/signer"

	"github.com/kiln-registry/kiln-registry/blobstore/storetest"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

func conditional(r *http.Request) bool {
	return r.Header.Get("If-Match") != "" || r.Header.Get("If-None-Match") != ""
}

// unconditional makes a server one that knows no conditional writes and says nothing of it: it signs requests again
// without their conditions.
func unconditional(t testing.TB) func(http.RoundTripper) http.RoundTripper {
	s := tests3.Shared(t)
	return func(rt http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if !conditional(r) {
				return rt.RoundTrip(r)
			}
			r = r.Clone(r.Context())
			r.Header.Del("If-Match")
			r.Header.Del("If-None-Match")
			r.Header.Del("Authorization")
			return rt.RoundTrip(signer.SignV4(*r, s.AccessKey, s.SecretKey, "", s.Region))
		})
	}
}

// TestPlainStore runs the suite on a server without conditional writes.
func TestPlainStore(t *testing.T) {
	t.Parallel()
	storetest.Run(t, func(t testing.TB) storetest.Medium {
		return &medium{Config: place(t), transport: unconditional(t)}
	})
}

// TestPlainServer: whether the server refuses conditions or passes over them, the store works, and its operator is told
// what that means.
func TestPlainServer(t *testing.T) {
	t.Parallel()
	for name, refuses := range map[string]bool{"refuses": true, "passes over": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			var told []string
			o := Options{Exclusive: true, Notify: func(line string) { told = append(told, line) }}
			if refuses {
				s.proxy.On(conditional, tests3.Answer(501, "NotImplemented"))
			} else {
				o.Transport = unconditional(t)
			}
			s.via.Prefix, s.direct.Prefix = "another", "another"
			s.must(Init(s.ctx, s.via))
			s.must(Init(s.ctx, s.via))
			w := newWork(s, s.open(o))
			w.do()
			w.check()
			if len(told) != 1 || !strings.Contains(told[0], "has no conditional writes") ||
				!strings.Contains(told[0], s.via.String()) {
				t.Errorf("told %q", told)
			}
		})
	}
}
