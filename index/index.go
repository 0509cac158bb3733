// Package index answers what a registry holds: which manifest a name points to, which manifests of a repository refer
// to a subject, and what was made from the base model of a given aggregate. It is a view: everything in it can be
// rebuilt from the refs and manifests of a blob store.
package index

import (
	"context"
	"errors"
	"iter"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

var (
	// ErrNotFound: the index has no such record.
	ErrNotFound = errors.New("not in the index")
	// ErrReferred: a manifest of the repository refers to the blob.
	ErrReferred = errors.New("a manifest refers to it")
	// ErrInUse: the engine's file is held by another process.
	ErrInUse = errors.New("index is in use by another process")
	// ErrDamaged: the index does not read back as it was written; rebuild it from the store.
	ErrDamaged = errors.New("index is damaged")
	// ErrFormat: the index was written by a later program, with another key layout; rebuild it from the store.
	ErrFormat = errors.New("index is of another version")
	// ErrCursor: a cursor was not made for this query.
	ErrCursor = errors.New("not a cursor of this query")
)

// Record is one manifest of one repository, as the registry understood it when it was put.
type Record struct {
	Repo         string
	Digest       identity.Digest // of the manifest
	MediaType    string
	Size         int64 // bytes of the manifest
	ArtifactType string
	Annotations  map[string]string // of the manifest
	Kind         api.Kind          // empty: not an artifact that this project knows
	State        api.ContentState  // how the aggregate was derived
	Aggregate    identity.Aggregate
	Evidence     api.Evidence
	ShardCount   int
	TotalSize    uint64          // bytes of the shards
	Packaging    identity.Digest // over the names and digests of the non-weight files; equal means the same packaging
	Subject      identity.Digest
	Seq          uint64    // of the put, per repository
	Created      time.Time // when the registry accepted it
}

// Op is one change. Exactly the ops of this package implement it.
type Op interface {
	check() error
	apply(tx) error
}

// PutManifest records a manifest in a repository, and the blobs it refers to, which makes them visible there. It is
// skipped when the index knows a later change (Seq) of the same digest in that repository. Manifest and Shards are
// kept once for all repositories that hold the digest.
type PutManifest struct {
	Record
	Manifest []byte            // exact bytes
	Refers   []identity.Digest // blobs that the repository was seen to hold, in any order
	Lists    []identity.Digest // manifests that it lists, in any order, held or not; always the same of one digest
	Shards   identity.Manifest // the base's shard manifest; zero when the artifact is no base
}

// DeleteManifest drops a manifest from a repository, with the tags that pointed to it before Seq.
type DeleteManifest struct {
	Repo   string
	Digest identity.Digest
	Seq    uint64
}

// PutTag points a tag to a manifest. It is skipped when the index knows a later change (Seq) of the tag.
type PutTag struct {
	Repo, Tag string
	Digest    identity.Digest
	Seq       uint64
}

// DeleteTag drops a tag.
type DeleteTag struct {
	Repo, Tag string
	Seq       uint64
}

// LinkBlob makes a blob visible in a repository until the given time, or for as long as a manifest of the repository
// refers to it. It is how an uploaded or mounted blob is known before its manifest comes. It never shortens an earlier
// LinkBlob. Size is in bytes.
type LinkBlob struct {
	Repo   string
	Digest identity.Digest
	Size   int64
	Until  time.Time
}

// UnlinkBlob takes a blob out of a repository. Apply returns ErrReferred while a manifest of the repository refers
// to it; it is no error if the blob was not visible.
type UnlinkBlob struct {
	Repo   string
	Digest identity.Digest
}

// PutUpload remembers whose upload an id is and when it expires.
type PutUpload struct{ Upload }

// DeleteUpload forgets an upload.
type DeleteUpload struct{ ID string }

// Note keeps a few bytes under a name, for those who look after the registry. Without a Value there is none of that
// name. Reset forgets them.
type Note struct {
	Name  string
	Value []byte
}

// Checkpoint says that every ref up to a position of the store is in the index. It never moves backwards.
type Checkpoint struct{ Position uint64 }

// Upload is an open upload: the store keeps its bytes, the index whose it is.
type Upload struct {
	ID      string
	Repo    string
	Caller  string
	Digest  identity.Digest // announced; zero when not known
	Size    int64           // announced, bytes; negative when not known
	Expires time.Time
}

// Query selects records and decides the key order that is walked: by Aggregate if that is set, else by Repo and Subject
// if Subject is set, else by Repo. Records come repository after repository in byte order, and newest first within one;
// where several kinds or artifact types are walked, one after the other. Other combinations are errors.
type Query struct {
	Aggregate    identity.Aggregate
	Kind         api.Kind        // only with Aggregate; empty: every kind, in byte order of the kind
	Repo         string          // this repository only; needed unless Aggregate is set
	Subject      identity.Digest // only with Repo
	ArtifactType string          // only with Subject; empty: every type, type after type in a fixed order
	// See says which repositories the caller may pull from; nil: all. One that it refuses costs one seek.
	See   func(repo string) bool
	After string // Cursor of the last record seen; empty: from the start
}

// KV is an ordered key-value engine. Keys are compared as bytes; they have 1 to 32,768 bytes. Any number of goroutines
// may use one. An engine that finds its data damaged returns ErrDamaged and does not panic.
type KV interface {
	// View runs fn on one consistent state. It is closed before View returns: fn must not do network or disk work of its
	// own, and it must not open another transaction.
	View(ctx context.Context, fn func(Txn) error) error
	// Update runs fn and makes its writes durable, all or none, as if updates ran one after another. fn may be run more
	// than once, also after it returned nil, so it must have no effect outside the transaction; a failing or panicking fn
	// has no effect and does not disturb other updates. Concurrent updates share one sync. Once ctx is done an update
	// that still waits its turn is dropped; one that ran is finished. After an error of the engine it is not known
	// whether the writes were kept.
	Update(ctx context.Context, fn func(Txn) error) error
	// Close waits for the updates that were accepted. Later calls get an error.
	Close() error
}

// Txn is one transaction of a KV. It is used by one goroutine, and what it returns is only valid until it ends and must
// not be changed. What is passed to it is copied. Once the engine failed in a transaction, View or Update returns that
// error whatever fn returns: that is how Range reports one.
type Txn interface {
	Get(key []byte) ([]byte, error) // nil: no such key
	Put(key, value []byte) error    // only in Update
	Delete(key []byte) error        // only in Update; no error if there is no such key
	// Range yields the pairs with from <= key < to in ascending order; a nil to means to the end. The range must not be
	// changed while it is walked.
	Range(from, to []byte) iter.Seq2[[]byte, []byte]
}
