// Package s3store keeps blobs, uploads and refs in a bucket of an S3-compatible object store. What it holds, below the
// store's prefix:
//
//	store.json                  says that this is a store, of which format, and which one
//	owner.json                  which process owns the store, see owner.go
//	blobs/HEX/live              which copy of a blob is shown, or that none is, see blob.go
//	blobs/HEX/COPY              the bytes of a copy, or a stub where they are unnamed/ID
//	blobs/HEX/COPY.midstates    its midstates if it has more than 16 MiB, in the form of package lanes
//	unnamed/ID                  the bytes of a copy whose digest was not known when the first of them came
//	uploads/ID                  an open upload, or the receipt of one that became a blob, see session.go
//	tails/ID/OFFSET             its bytes after the last whole part
//	aside/HEX                   why a copy was set aside, see quarantine.go
//	refs/NUMBER                 the refs, a log of objects, see refs.go
//	lost/NUMBER-RANDOM          what was in the place of one of them that did not read, before Options.AcceptLoss
//
// Other keys are left alone. JSON is followed by a checksum on a line of its own. Bytes are verified before a copy is
// shown: the registry hashes what it receives, and the server confirms what it stored by a checksum, or is read back.
package s3store

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store/bucket"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
)

const markerName = "store.json"

// formatName and formatVersion stand in store.json. A store of a higher version is refused.
const (
	formatName    = "kiln-store"
	formatVersion = 1
)

// smallObject is more than any object has that is read into memory whole, besides tails and refs.
const smallObject = 4 << 20

// pieceSize is how much is read and hashed at a time.
const pieceSize = 256 << 10

// Options are choices of Open. The zero Options share the store with other processes.
type Options struct {
	// Notify, if set, is told what an operator should know about the store, one line each.
	Notify func(string)
	// Exclusive owns the store: Open is blobstore.ErrInUse while another process does, and every change is once another
	// process took it, which it can when this one was not heard of for OwnerTTL.
	Exclusive bool
	// AcceptLoss puts objects without refs in the place of those of the log that are missing or can't be read, and keeps
	// what was there below lost/. Dropped says what was left out. It reads the whole log.
	AcceptLoss bool
	// ReadOnly leaves everything in the bucket as it is, but for the claim of an owner: nothing that another process left
	// is tidied up, and every change is blobstore.ErrReadOnly.
	ReadOnly bool
	// PartMemory is how many bytes the parts of all uploads have in memory, besides up to a MiB of each. Uploads wait for
	// one another where it is used up, and are blobstore.ErrUnavailable after half a minute. Zero: DefaultPartMemory.
	PartMemory int64
	// Transport, if set, stands between the client and the network. Only tests set it, and Tries.
	Transport func(http.RoundTripper) http.RoundTripper
	// Tries is how often a request is made that fails for a reason that may pass. Zero means the usual number.
	Tries int

	ttl      time.Duration  // instead of OwnerTTL; zero: that
	patience time.Duration  // instead of partPatience; zero: that
	limits   bucket.Options // but Transport and Tries
}

// DefaultPartMemory is room for 32 parts of the usual size: a push of a large blob uses two where it can, and one where
// others need the rest.
const DefaultPartMemory = 512 << 20

// uncounted is what the buffer of an upload may have besides: most blobs that are no weights need no more.
const uncounted = 1 << 20

// partPatience is how long an upload waits for memory.
const partPatience = 30 * time.Second

// Store is a store in a bucket. It implements blobstore.Store, Uploads, Refs, Quarantine, Segments, Sweeper,
// Linker and Losses.
type Store struct {
	b           *bucket.Bucket
	id          string
	notify      func(string)
	conditional bool // the server has conditional writes
	reading     bool // Options.ReadOnly
	owner       *owner
	closed      atomic.Bool
	pieces      sync.Pool  // *[pieceSize]byte
	parts       sync.Pool  // *[]byte of partMin
	memory      memory     // for parts
	hashes      lanes.Pool // of all uploads
	patience    time.Duration
	partMin     int64 // smallest size of a part but the last; less in tests
	saveEvery   int64 // bytes
	segment     int64 // lanes.SegmentSize, smaller in tests

	mu     sync.Mutex // guards active, ended and aside
	active map[string]*session
	ended  map[string]*receipt      // as far as this process knows
	aside  map[identity.Digest]note // what is set aside, as far as this process knows

	dropped []blobstore.Dropped // by Open

	serial sync.Mutex // held around changes that a server with conditional writes would order
	log    refLog
}

var (
	_ blobstore.Store      = (*Store)(nil)
	_ blobstore.Uploads    = (*Store)(nil)
	_ blobstore.Refs       = (*Store)(nil)
	_ blobstore.Quarantine = (*Store)(nil)
	_ blobstore.Segments   = (*Store)(nil)
	_ blobstore.Sweeper    = (*Store)(nil)
	_ blobstore.Linker     = (*Store)(nil)
	_ blobstore.Losses     = (*Store)(nil)
)

type marker struct {
	Format  string `json:"format"`
	Version int    `json:"version"`
	ID      string `json:"id"`
}

// Config says where a store is and how to reach it.
type Config = bucket.Config

// Parse reads the URL of a store, s3://bucket/prefix?endpoint=https://host:port, see bucket.Parse.
func Parse(url string) (Config, error) { return bucket.Parse(url) }

// Init makes the place, which must be empty, a store. It is durable on return. It does nothing if it is a store
// already, and returns blobstore.ErrNotStore if it holds anything else. It does not make the bucket.
func Init(ctx context.Context, c Config) error {
	b, err := bucket.Dial(c, bucket.Options{})
	if err != nil {
		return err
	}
	defer b.CloseIdle()
	if err := checkAround(ctx, c); err != nil {
		return err
	}
	if _, _, err = readMarker(ctx, b); !errors.Is(err, blobstore.ErrNotStore) {
		return err
	}
	if err := checkEmpty(ctx, b); err != nil {
		return err
	}
	body, err := seal(marker{formatName, formatVersion, rand.Text()})
	if err != nil {
		return err
	}
	_, err = b.Put(ctx, b.Key(markerName), body, bucket.Condition{Absent: true})
	switch {
	case errors.Is(err, bucket.ErrConflict):
		_, _, err = readMarker(ctx, b)
	case errors.Is(err, errors.ErrUnsupported):
		_, err = b.Put(ctx, b.Key(markerName), body, bucket.Condition{})
	}
	if err != nil {
		return fmt.Errorf("make store %s: %w", c, err)
	}
	return nil
}

// checkAround refuses a place inside of another store, as far as the credentials let it look.
func checkAround(ctx context.Context, c Config) error {
	for outer := c; outer.Prefix != ""; {
		outer.Prefix = outer.Prefix[:max(0, strings.LastIndex(outer.Prefix, "/"))]
		b, err := bucket.Dial(outer, bucket.Options{})
		if err != nil {
			return err
		}
		_, _, err = readMarker(ctx, b)
		b.CloseIdle()
		if err == nil {
			return fmt.Errorf("%s: %w: it would be inside of the store %s", c, blobstore.ErrNotStore, outer)
		} else if errors.Is(err, blobstore.ErrUnavailable) || ctx.Err() != nil {
			return err
		}
	}
	return nil
}

func checkEmpty(ctx context.Context, b *bucket.Bucket) error {
	prefix := b.Prefix
	if prefix != "" {
		prefix += "/"
	}
	for o, err := range b.List(ctx, prefix, "", 1) {
		if err != nil {
			return fmt.Errorf("make store: %w", err)
		}
		return fmt.Errorf("%s: %w: it has no %s, but %s and perhaps more",
			b.Config, blobstore.ErrNotStore, markerName, o.Key)
	}
	return nil
}

// readMarker reads store.json.
func readMarker(ctx context.Context, b *bucket.Bucket) (m marker, o bucket.Object, err error) {
	o, err = b.Get(ctx, b.Key(markerName), smallObject, func(body []byte) error {
		if unseal(body, &m) != nil || m.Format != formatName || m.Version < 1 || m.ID == "" {
			return fmt.Errorf("%s: %w: %s is not what this program writes", b.Config, blobstore.ErrDamaged, markerName)
		}
		return nil
	})
	switch {
	case errors.Is(err, bucket.ErrAbsent):
		return m, o, fmt.Errorf("%s: %w: it has no %s", b.Config, blobstore.ErrNotStore, markerName)
	case err == nil && m.Version > formatVersion:
		return m, o, fmt.Errorf("%s is a store of format %d: this program knows formats up to %d",
			b.Config, m.Version, formatVersion)
	}
	return m, o, err
}

// and returns both errors, those that there are, in one line.
func and(err, another error) error {
	if err == nil || another == nil {
		return errors.Join(err, another)
	}
	return fmt.Errorf("%w; %w", err, another)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// seal returns v as JSON and the CRC-32C of that, each on a line. What was sealed is never taken for something else
// because a bit of it changed.
func seal(v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return fmt.Appendf(b, "\n%08x\n", crc32.Checksum(b, castagnoli)), nil
}

// unseal reads what seal returned. The zero v becomes what was sealed.
func unseal(body []byte, v any) error {
	line, sum, _ := bytes.Cut(body, []byte("\n"))
	if string(sum) != fmt.Sprintf("%08x\n", crc32.Checksum(line, castagnoli)) {
		return errors.New("its checksum does not match")
	}
	return json.Unmarshal(line, v)
}

// Open opens a store. The error is blobstore.ErrNotStore if there is none, blobstore.ErrInUse if another process owns
// it, and blobstore.ErrUnavailable if the server can't be reached.
func Open(ctx context.Context, c Config, o Options) (*Store, error) {
	o.limits.Transport, o.limits.Tries = o.Transport, o.Tries
	b, err := bucket.Dial(c, o.limits)
	if err != nil {
		return nil, err
	}
	st := &Store{
		b: b, notify: o.Notify, active: map[string]*session{}, ended: map[string]*receipt{},
		aside: map[identity.Digest]note{}, partMin: partMin, saveEvery: saveEvery, reading: o.ReadOnly,
		segment: lanes.SegmentSize, patience: cmp.Or(o.patience, partPatience),
	}
	st.memory.all = cmp.Or(o.PartMemory, DefaultPartMemory)
	st.memory.left = st.memory.all
	if st.notify == nil {
		st.notify = func(string) {}
	}
	st.hashes.Soon = blobstore.Soon
	st.pieces.New = func() any { return new([pieceSize]byte) }
	st.parts.New = func() any { b := lanes.Buffer(int(st.partMin))[:0]; return &b }
	if err := st.open(ctx, o); err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	return st, nil
}

func (st *Store) open(ctx context.Context, o Options) error {
	m, found, err := readMarker(ctx, st.b)
	if err != nil {
		return err
	}
	st.id = m.ID
	if st.conditional, err = st.probe(ctx, found); err != nil {
		return err
	}
	if !st.conditional {
		st.notify(fmt.Sprintf("%s has no conditional writes: nothing keeps two registries from writing to %s at a time",
			st.b.Endpoint, st.b.Config))
	}
	if err := st.loadAside(ctx); err != nil {
		return err
	}
	if o.Exclusive {
		if st.owner, err = st.acquire(ctx, cmp.Or(o.ttl, OwnerTTL)); err != nil {
			return err
		}
		if !o.ReadOnly {
			err = st.settle(ctx)
		}
	}
	if err == nil && o.AcceptLoss && !o.ReadOnly {
		err = st.mend(ctx)
	}
	if err != nil && st.owner != nil {
		err = and(err, st.owner.release())
	}
	return err
}

// settle makes sure of a store that this process has just come to own.
func (st *Store) settle(ctx context.Context) error {
	if st.owner.inherited {
		// Refs that the last owner has still on their way meet this object, of no refs, and then see who owns the store.
		if _, err := st.putObject(ctx, nil); err != nil {
			return err
		}
	}
	// Only the owner of a store knows that nobody else is about to note what they began just now.
	_, err := st.sweepMultiparts(ctx, time.Now().Add(time.Hour))
	return err
}

// probe says whether the server honours conditions, by putting store.json under two that don't hold. If it doesn't, the
// same bytes are there again.
func (st *Store) probe(ctx context.Context, m bucket.Object) (bool, error) {
	for _, only := range []bucket.Condition{{Absent: true}, {ETag: "0123456789abcdef0123456789abcdef"}} {
		_, err := st.b.Put(ctx, st.b.Key(markerName), m.Body, only)
		switch {
		case errors.Is(err, bucket.ErrConflict):
		case err == nil, errors.Is(err, errors.ErrUnsupported):
			return false, nil
		default:
			return false, err
		}
	}
	return true, nil
}

// memory is a number of bytes that are shared out in the order in which they were asked for.
type memory struct {
	all int64

	mu   sync.Mutex
	left int64
	line []*turn
}

// turn is somebody who waits.
type turn struct {
	n    int64
	come chan struct{}
}

// take waits for n bytes for a while, or not at all, and says whether it has them.
func (m *memory) take(ctx context.Context, n int64, patience time.Duration) bool {
	m.mu.Lock()
	if len(m.line) == 0 && m.left >= n {
		m.left -= n
		m.mu.Unlock()
		return true
	}
	if patience == 0 {
		m.mu.Unlock()
		return false
	}
	t := &turn{n, make(chan struct{})}
	m.line = append(m.line, t)
	m.mu.Unlock()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-t.come:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	at := slices.Index(m.line, t)
	if at < 0 {
		return true // just now
	}
	m.line = slices.Delete(m.line, at, at+1)
	m.serve()
	return false
}

func (m *memory) give(n int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.left += n
	m.serve()
}

func (m *memory) serve() {
	for len(m.line) > 0 && m.line[0].n <= m.left {
		m.left -= m.line[0].n
		close(m.line[0].come)
		m.line = m.line[1:]
	}
}

// wanted says whether somebody waits.
func (m *memory) wanted() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.line) > 0
}

// Lost is closed when another process took the store. It is nil if the store is shared.
func (st *Store) Lost() <-chan struct{} {
	if st.owner == nil {
		return nil
	}
	return st.owner.gone
}

// endedAs returns what an upload became, as far as this process knows.
func (st *Store) endedAs(id string) *receipt {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.ended[id]
}

func (st *Store) setEnded(id string, r *receipt) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if r == nil {
		delete(st.ended, id)
	} else {
		st.ended[id] = r
	}
}

// ID returns what tells this store from all others, also after it was moved to another bucket.
func (st *Store) ID() string { return st.id }

// Close gives the store back. No other call may be running or follow.
func (st *Store) Close() error {
	if st.closed.Swap(true) {
		return nil
	}
	st.b.CloseIdle()
	if st.owner == nil {
		return nil
	}
	return st.owner.release()
}

// change is asked before everything that changes the store.
func (st *Store) change(ctx context.Context) error {
	if st.reading {
		return blobstore.ErrReadOnly
	}
	if st.owner != nil {
		if err := st.owner.check(); err != nil {
			return err
		}
	}
	return ctx.Err()
}
