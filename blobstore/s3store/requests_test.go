package s3store

import (
	"net/http"
	"strings"

	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

// The requests of the store, by what they are about.
var (
	markerPut  = keyed("/blobs/", "/live", tests3.PutObject)
	markerGet  = keyed("/blobs/", "/live", tests3.GetObject)
	bytesPut   = but(markerPut, keyed("/blobs/", "", tests3.PutObject))
	bytesGet   = but(markerGet, either(keyed("/blobs/", "", tests3.GetObject), keyed("/unnamed/", "", tests3.GetObject)))
	bytesHead  = either(keyed("/blobs/", "", tests3.HeadObject), keyed("/unnamed/", "", tests3.HeadObject))
	bytesGone  = either(keyed("/blobs/", "", tests3.DeleteObject), keyed("/unnamed/", "", tests3.DeleteObject))
	statePut   = keyed("/uploads/", "", tests3.PutObject)
	stateGet   = keyed("/uploads/", "", tests3.GetObject)
	stateGone  = keyed("/uploads/", "", tests3.DeleteObject)
	tailPut    = keyed("/tails/", "", tests3.PutObject)
	tailGet    = keyed("/tails/", "", tests3.GetObject)
	tailGone   = keyed("/tails/", "", tests3.DeleteObject)
	refsPut    = keyed("/refs/", "", tests3.PutObject)
	refsGet    = keyed("/refs/", "", tests3.GetObject)
	refsLooked = keyed("/refs/", "", tests3.HeadObject)
	ownerPut   = keyed("/owner.json", "", tests3.PutObject)
	ownerGet   = keyed("/owner.json", "", tests3.GetObject)
	storeGet   = keyed("/store.json", "", tests3.GetObject)
	begin      = tests3.Is(tests3.CreateMultipartUpload)
	partPut    = tests3.Is(tests3.UploadPart)
	complete   = tests3.Is(tests3.CompleteMultipartUpload)
	abort      = tests3.Is(tests3.AbortMultipartUpload)
	list       = tests3.Is(tests3.ListObjects)
	multiparts = tests3.Is(tests3.ListMultipartUploads)
)

var reset = tests3.Reset()

// keyed matches requests whose path holds part and ends in end.
func keyed(part, end string, op tests3.Op) tests3.Match {
	is := tests3.At(part, tests3.Is(op))
	return func(r *http.Request) bool { return strings.HasSuffix(r.URL.Path, end) && is(r) }
}

func but(not, match tests3.Match) tests3.Match {
	return func(r *http.Request) bool { return match(r) && !not(r) }
}

func either(some ...tests3.Match) tests3.Match {
	return func(r *http.Request) bool {
		for _, m := range some {
			if m(r) {
				return true
			}
		}
		return false
	}
}
