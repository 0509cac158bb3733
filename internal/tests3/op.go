package tests3

import (
	"net/http"
	"strings"
)

// Op is what a request asks of S3, by the name that S3's own reference gives it.
type Op string

// The operations that OpOf tells apart.
const (
	PutObject               Op = "PutObject"
	CopyObject              Op = "CopyObject"
	GetObject               Op = "GetObject"
	HeadObject              Op = "HeadObject"
	DeleteObject            Op = "DeleteObject"
	DeleteObjects           Op = "DeleteObjects"
	CreateMultipartUpload   Op = "CreateMultipartUpload"
	UploadPart              Op = "UploadPart"
	UploadPartCopy          Op = "UploadPartCopy"
	ListParts               Op = "ListParts"
	CompleteMultipartUpload Op = "CompleteMultipartUpload"
	AbortMultipartUpload    Op = "AbortMultipartUpload"
	ListMultipartUploads    Op = "ListMultipartUploads"
	ListObjects             Op = "ListObjects" // both versions
	HeadBucket              Op = "HeadBucket"
	CreateBucket            Op = "CreateBucket"
	DeleteBucket            Op = "DeleteBucket"
	GetBucketLocation       Op = "GetBucketLocation"
	ListBuckets             Op = "ListBuckets"
	Other                   Op = "Other"
)

// OpOf names the operation of a path-style request.
func OpOf(r *http.Request) Op {
	bucket, key, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	switch q := r.URL.Query(); {
	case bucket == "":
		return table(r, "", map[string]Op{"GET": ListBuckets})
	case key == "" && q.Has("uploads"):
		return table(r, "", map[string]Op{"GET": ListMultipartUploads})
	case key == "" && q.Has("location"):
		return table(r, "", map[string]Op{"GET": GetBucketLocation})
	case key == "" && q.Has("delete"):
		return table(r, "", map[string]Op{"POST": DeleteObjects})
	case key == "":
		return table(r, "", map[string]Op{
			"GET": ListObjects, "HEAD": HeadBucket, "PUT": CreateBucket, "DELETE": DeleteBucket,
		})
	case q.Has("uploads"):
		return table(r, "", map[string]Op{"POST": CreateMultipartUpload})
	case q.Has("uploadId"):
		return table(r, UploadPartCopy, map[string]Op{
			"PUT": UploadPart, "GET": ListParts, "POST": CompleteMultipartUpload, "DELETE": AbortMultipartUpload,
		})
	default:
		return table(r, CopyObject, map[string]Op{
			"PUT": PutObject, "GET": GetObject, "HEAD": HeadObject, "DELETE": DeleteObject,
		})
	}
}

// table picks by method; a PUT that names a source is copied.
func table(r *http.Request, copied Op, byMethod map[string]Op) Op {
	op, ok := byMethod[r.Method]
	switch {
	case !ok:
		return Other
	case r.Method == http.MethodPut && copied != "" && r.Header.Get("X-Amz-Copy-Source") != "":
		return copied
	}
	return op
}

// Match chooses requests. A Proxy asks one request at a time, in the order in which they arrive.
type Match func(*http.Request) bool

// Any matches every request.
func Any(*http.Request) bool { return true }

// Is matches requests for one of the operations.
func Is(ops ...Op) Match {
	return func(r *http.Request) bool {
		op := OpOf(r)
		for _, o := range ops {
			if o == op {
				return true
			}
		}
		return false
	}
}

// At matches what m matches and whose decoded path contains part.
func At(part string, m Match) Match {
	return func(r *http.Request) bool { return strings.Contains(r.URL.Path, part) && m(r) }
}

// First matches the first n requests that m matches.
func First(n int, m Match) Match {
	return func(r *http.Request) bool {
		if n == 0 || !m(r) {
			return false
		}
		n--
		return true
	}
}

// Nth matches the n-th request that m matches, counted from 1, and no other.
func Nth(n int, m Match) Match {
	return func(r *http.Request) bool {
		if m(r) {
			n--
			return n == 0
		}
		return false
	}
}
