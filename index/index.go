// Package index answers what a registry holds: which manifest a name points to, which manifests of a repository refer
// to a subject, and what was made from the base model of a given aggregate. It is a view: everything in it can be
// rebuilt from the refs and manifests of a blob store.
package index

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"
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
	// ErrUnavailable: the engine does not answer now. It may later.
	ErrUnavailable = errors.New("the index is not available")
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
	Name         string            // what the artifact calls itself; at most 1 KiB
	Facts        []byte            // JSON of api.Facts, at most 64 KiB; empty: none
	Links        []Link            // what it names, at most 256; Get and Find return them in order and each once
	State        api.ContentState  // how the aggregate was derived
	Aggregate    identity.Aggregate
	Evidence     api.Evidence
	// Bases are those from which the artifact was made beside Aggregate, by the same Evidence: it is listed under each. At
	// most 16, in an order of their own.
	Bases      []identity.Aggregate
	ShardCount int
	TotalSize  uint64          // bytes of the shards
	Packaging  identity.Digest // over the names and digests of the non-weight files; equal means the same packaging
	Subject    identity.Digest
	Seq        uint64    // of the put, per repository
	Created    time.Time // when the registry accepted it
	// BoundBy is the bind statement from which Aggregate and Evidence are, where a listing by aggregate lists the record
	// by one; zero: they are the record's own. Put has none.
	BoundBy identity.Digest
	// Relation is that of the link for which a listing by target lists the record. Put has none.
	Relation string
}

// Link is one thing that an artifact names.
type Link struct {
	Relation string          `json:"relation"` // one of the relations of package api
	Target   identity.Digest `json:"target"`   // a digest of content, a NameTarget or an AggregateTarget
}

// Op is one change. Exactly the ops of this package implement it.
type Op interface {
	check() error
	apply(*change) error
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

// Query selects records and decides the key order that is walked: exactly one of Aggregate, Unbound, Target and Repo,
// which goes with each of the others, too. Records come group by group, a group being a kind, for a Target a relation
// and for a Subject an artifact type; in a group repository after repository in byte order, and newest first within
// one. Other combinations are errors.
type Query struct {
	Aggregate identity.Aggregate // what was made from that base, and the base itself
	Unbound   bool               // artifacts of a known kind, no bases, of which nothing says from what base they are
	Kind      api.Kind           // only with Aggregate or Unbound; empty: every kind, in byte order
	Name      string             // only with Aggregate or Unbound: what calls itself so
	Evidence  api.Evidence       // only with Aggregate: what is bound by that evidence; a base has its own

	Target   identity.Digest // what links to that
	Relation string          // only with Target; empty: every relation, in byte order

	Repo         string          // this repository only
	Subject      identity.Digest // only with Repo, and none of the above
	ArtifactType string          // only with Subject; empty: every type, type after type in a fixed order

	Since time.Time // only what was accepted then or later; zero: all
	// See says which repositories the caller may pull from; nil: all.
	See func(repo string) bool
	// Next returns the first repository, not before one, that the caller may perhaps see; found is false if there is
	// none. With it the walk goes past what See refuses by one seek for each such answer; without it, by one for each
	// repository. It may return the repository that it was given also where See refuses that.
	Next  func(repo string) (next string, found bool)
	After string // where to go on: Cursor of the last record seen, or the next of a page; empty: from the start
}

// MaxKeyBytes is the longest key that every engine takes.
const MaxKeyBytes = 2048

// KV is an ordered key-value engine. Keys are compared as bytes; they have 1 to MaxKeyBytes bytes. Any number of goroutines
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

// Prefetcher is a Txn to which a Get is a message to another machine. Prefetch asks for many keys, there or not, with one.
type Prefetcher interface {
	Prefetch(keys ...[]byte) error
}

// seqBlock is how many sequence numbers of a repository are made durable at once. What is left of a block when the
// process ends is never issued. Numbers ascend only over the callers of one Index: an engine shared by several
// processes needs blocks of one.
const seqBlock = 64

// Index answers what a registry holds. There is one implementation, over any KV. Any number of goroutines may use one.
// What it returns is the caller's to keep and change.
type Index struct {
	kv       KV
	limits   limits
	renewed  int
	mu       sync.Mutex // guards counters
	counters map[string]*counter
}

// counter issues the sequence numbers of one repository.
type counter struct {
	mu    sync.Mutex
	next  uint64 // to be issued, if it is within limit
	limit uint64 // the last number that was made durable
	seen  uint64 // the highest number that an op carried
}

// New opens the index in kv, and makes an empty one if kv is empty. It finishes a Reset that was interrupted, and resets
// an index of an earlier format; see Renewed. Closing the Index closes kv; after an error kv is still open. ErrDamaged,
// ErrFormat.
func New(ctx context.Context, kv KV) (*Index, error) {
	ix := &Index{kv: kv, limits: limits{rows: 256, bytes: 1 << 20, steps: 4096}, counters: make(map[string]*counter)}
	var mark []byte
	err := kv.View(ctx, func(x Txn) error {
		b, err := tx{x}.load(stateKey(stateReset))
		mark = bytes.Clone(b)
		return err
	})
	if err == nil && mark != nil {
		err = ix.resume(ctx, mark)
	}
	if err == nil {
		err = ix.renew(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("open index: %w", err)
	}
	return ix, nil
}

// Renewed returns the number of the earlier format in which New found the index, which is empty then and to be rebuilt
// from the store; 0 if it was of this program's format, or new.
func (ix *Index) Renewed() (format int) { return ix.renewed }

// renew brings the KV to this program's key layout.
func (ix *Index) renew(ctx context.Context) error {
	was, err := ix.format(ctx)
	if err != nil || was == formatVersion {
		return err
	}
	ix.renewed = int(was)
	return ix.Reset(ctx)
}

// format returns the version of the key layout, and writes it into an empty KV. ErrFormat if it is a later one.
func (ix *Index) format(ctx context.Context) (version byte, err error) {
	err = ix.kv.View(ctx, func(x Txn) error {
		t := tx{x}
		b, err := t.load(stateKey(stateFormat))
		switch {
		case err != nil:
			return err
		case b == nil:
			return t.onlySequences()
		case len(b) != 1 || b[0] == 0 || b[0] > formatVersion:
			return fmt.Errorf("%w: it has format %x, this program knows %d", ErrFormat, b, formatVersion)
		}
		version = b[0]
		return nil
	})
	if err != nil || version != 0 {
		return version, err
	}
	return formatVersion, ix.kv.Update(ctx, func(x Txn) error {
		return tx{x}.store(stateKey(stateFormat), []byte{formatVersion})
	})
}

func (t tx) onlySequences() error {
	return t.walk([]byte{}, nil, func(k, _ []byte) ([]byte, error) {
		if k[0] == tableSequence {
			return after([]byte{tableSequence}), nil
		}
		return nil, fmt.Errorf("%w: rows without a format", ErrDamaged)
	})
}

// Close closes the KV. It waits for the changes that were accepted.
func (ix *Index) Close() error { return ix.kv.Close() }

// Reset drops everything but the sequence counters, so that the index can be rebuilt from refs. Nobody may use the
// index meanwhile. If it is interrupted, the next New finishes it.
func (ix *Index) Reset(ctx context.Context) error {
	err := ix.kv.Update(ctx, func(x Txn) error { return tx{x}.store(stateKey(stateReset), nil) })
	if err == nil {
		err = ix.drop(ctx, nothing)
	}
	if err == nil {
		_, err = ix.format(ctx)
	}
	if err != nil {
		return fmt.Errorf("reset index: %w", err)
	}
	return nil
}

// Empty is Reset but for what no refs bring back: the LinkBlobs, the uploads and the notes of these names stay, as far
// as they read back.
func (ix *Index) Empty(ctx context.Context, notes ...string) error {
	mark := "\x01" + strings.Join(notes, "\x00")
	err := ix.kv.Update(ctx, func(x Txn) error { return tx{x}.store(stateKey(stateReset), []byte(mark)) })
	if err == nil {
		err = ix.drop(ctx, staying(notes).has)
	}
	if err != nil {
		return fmt.Errorf("empty index: %w", err)
	}
	return nil
}

// resume finishes a Reset or an Empty of which the mark was left.
func (ix *Index) resume(ctx context.Context, mark []byte) error {
	if len(mark) == 0 {
		return ix.drop(ctx, nothing)
	}
	return ix.drop(ctx, staying(strings.Split(string(mark[1:]), "\x00")).has)
}

// drop deletes all rows but the sequences and those that stay, some thousands at a time. Reset's mark has the last key
// of all and so goes last.
func (ix *Index) drop(ctx context.Context, stays func(t tx, k, v []byte) (bool, error)) error {
	for at := []byte{}; at != nil; {
		var next []byte
		err := ix.kv.Update(ctx, func(x Txn) error {
			var keys [][]byte
			t, seen := tx{x}, 0
			next = nil
			err := t.walk(at, nil, func(k, v []byte) ([]byte, error) {
				if k[0] == tableSequence {
					return after([]byte{tableSequence}), nil
				}
				if seen++; seen > ix.limits.steps {
					next = bytes.Clone(k)
					return nil, errStop
				}
				stay, err := stays(t, k, v)
				if !stay {
					keys = append(keys, bytes.Clone(k))
				}
				return nil, err
			})
			return cmp.Or(err, t.deleteAll(keys))
		})
		if err != nil {
			return err
		}
		at = next
	}
	return nil
}

func nothing(tx, []byte, []byte) (bool, error) { return false, nil }

// staying are the names of the notes that an Empty leaves.
type staying []string

// has says whether a row stays: one that does not read back, or without the other half of its pair, does not.
func (s staying) has(t tx, k, v []byte) (bool, error) {
	switch k[0] {
	case tableState:
		name, isNote := strings.CutPrefix(string(k[1:]), stateNote)
		is := string(k[1:])
		return is == stateFormat || is == stateRemoval || isNote && slices.Contains(s, name), nil
	case tableGone, tableHolder, tableOwed, tableReplica:
		return true, nil
	}
	p := split(k)
	var row, pair key
	switch k[0] {
	case tableLease, tableExpiry:
		if k[0] == tableExpiry {
			p.time()
		}
		d, repo := p.sum(), p.text()
		l, found, err := t.lease(leaseKey(d, repo))
		if p.err() != nil || err != nil || !found {
			return false, nil
		}
		row, pair = leaseKey(d, repo), expiryKey(l.until, d, repo)
	case tableUpload, tableUploadExpiry:
		if k[0] == tableUploadExpiry {
			p.time()
		}
		u, found, err := t.upload(p.rest())
		if p.err() != nil || err != nil || !found {
			return false, nil
		}
		row, pair = uploadKey(u.ID), uploadExpiryKey(u)
	}
	if !bytes.Equal(k, row) && !bytes.Equal(k, pair) {
		return false, nil
	}
	return t.has(pair)
}

// NextSeq issues the next sequence number of a repository: higher than every number that it issued before, in this or
// an earlier process, and than every number that an applied op carried. Numbers start at 1 and have gaps.
func (ix *Index) NextSeq(ctx context.Context, repo string) (uint64, error) {
	if err := checkText("repository", repo); err != nil {
		return 0, err
	}
	c := ix.counter(repo)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.next <= c.seen {
		c.next = c.seen + 1
	}
	if c.next > c.limit {
		if err := c.reserve(ctx, ix.kv, repo); err != nil {
			return 0, fmt.Errorf("number a change of %s: %w", repo, err)
		}
	}
	c.next++
	return c.next - 1, nil
}

// reserve makes a block of numbers durable, all above what was made durable before.
func (c *counter) reserve(ctx context.Context, kv KV, repo string) error {
	var last uint64
	err := kv.Update(ctx, func(x Txn) error {
		t := tx{x}
		n, err := t.number(sequenceKey(repo))
		if err != nil {
			return err
		}
		last = max(n, c.seen)
		return t.store(sequenceKey(repo), encodeNumber(last+seqBlock))
	})
	if err == nil {
		c.next, c.limit = last+1, last+seqBlock
	}
	return err
}

func (ix *Index) counter(repo string) *counter {
	ix.mu.Lock()
	defer ix.mu.Unlock()
	c := ix.counters[repo]
	if c == nil {
		c = new(counter)
		ix.counters[repo] = c
	}
	return c
}

// saw keeps NextSeq above a number that an op carries.
func (ix *Index) saw(repo string, seq uint64) {
	c := ix.counter(repo)
	c.mu.Lock()
	c.seen = max(c.seen, seq)
	c.mu.Unlock()
}

// Checkpoint returns the highest position that a Checkpoint op carried; 0 if there was none.
func (ix *Index) Checkpoint(ctx context.Context) (position uint64, err error) {
	err = ix.view(ctx, func(t tx) (err error) {
		position, err = t.number(stateKey(stateCheckpoint))
		return err
	})
	return position, err
}

// Note returns what a Note op keeps under a name; nil: nothing.
func (ix *Index) Note(ctx context.Context, name string) (value []byte, err error) {
	err = ix.view(ctx, func(t tx) error {
		b, err := t.load(stateKey(stateNote + name))
		value = bytes.Clone(b)
		return err
	})
	return value, err
}

// ManifestPart copies to p what the manifest d of some repository has from off on, and returns how much that is. It is
// for those who got the manifest before and do not hold all of it in memory: its bytes are not compared with d. ErrNotFound
// if it is gone.
func (ix *Index) ManifestPart(ctx context.Context, d identity.Digest, off int, p []byte) (n int, err error) {
	err = ix.view(ctx, func(t tx) error {
		b, err := t.load(contentKey(d, partBytes))
		if err == nil && len(b) < off {
			err = fmt.Errorf("bytes of manifest %s: %w", d, ErrNotFound)
		}
		if err == nil {
			n = copy(p, b[off:])
		}
		return err
	})
	return n, err
}
