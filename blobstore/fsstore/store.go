// Package fsstore keeps blobs, uploads and refs in a folder of a local filesystem. One process owns the folder at a
// time. What it holds:
//
//	store.json               says that this is a store, and of which format
//	blobs/sha256/ab/abcd…    one file per blob, mode 0444, named by its digest
//	segments/sha256/ab/…     the midstates of blobs of more than 16 MiB, in the form of package lanes
//	quarantine/abcd…         a damaged blob that was set aside; abcd….json says why; abcd….folder-ID is a folder that
//	                         somebody had put in its place
//	uploads/ID.data          the bytes of an open upload
//	uploads/ID.state         its saved hash state, or alone the receipt of one that became a blob, see state.go
//	refs.log                 the refs, see frame.go
//	refs.log.cut-TIME        bytes of it that read as no refs, and were left out
//	refs.log.damaged-TIME    all of it as it was before Options.AcceptLoss
//	LOCK                     the lock of the owning process
//
// Other files beside these are left alone.
package fsstore

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// The names in a store's folder.
const (
	markerName     = "store.json"
	lockName       = "LOCK"
	refsName       = "refs.log"
	blobsName      = "blobs"
	segmentsName   = "segments"
	hashName       = "sha256"
	quarantineName = "quarantine"
	uploadsName    = "uploads"
)

// formatName and formatVersion stand in store.json. A store of a higher version is refused.
const (
	formatName    = "kiln-store"
	formatVersion = 1
)

// syncEvery is how many bytes an Append lets pass before it syncs them and saves the hash state in the background:
// what a killed process has to hash again is bounded by about twice this.
const syncEvery = 64 << 20

// reserveStep is how much disk space an upload takes ahead of what comes, at most.
const reserveStep = 16 << 20

// Options are choices of Open. The zero Options are the usual ones.
type Options struct {
	// Notify, if set, is told what an operator should know about how the store was found, one line each.
	Notify func(string)
	// AcceptLoss makes a log of refs that is damaged one of those refs that can still be read, wherever they are in it,
	// and keeps the damaged one aside. Dropped says what was left out. Positions of before are void: an index has to be
	// made anew. A log that is not damaged stays as it is.
	AcceptLoss bool
	// ReadOnly leaves everything in the folder as it is, but for the lock: nothing is brought into order, and every change
	// is blobstore.ErrReadOnly. What a process that was killed had not acknowledged may be shown, and be gone after a
	// power failure.
	ReadOnly bool
	// Disk is how files are changed. Only tests set it.
	Disk durable.Disk
}

// Store is a store in a folder. It implements blobstore.Store, Uploads, Refs, Quarantine, Segments
// and Losses.
type Store struct {
	dir     string
	disk    durable.Disk
	reading bool // Options.ReadOnly
	boot    string
	lock    *durable.Lock
	refs    *refLog
	closed  atomic.Bool
	pieces  pieces
	hashes  lanes.Pool // of all uploads
	names   names
	shelves [256]shelfState // of blobs/sha256/XX
	lobby   durable.Group   // syncs of uploads
	mu      sync.Mutex      // guards busy
	busy    map[string]bool // uploads that Append, Commit, Abort or Resume works on
	every   int64           // syncEvery, smaller in tests
	segment int64           // lanes.SegmentSize, smaller in tests
}

// pieceSize is how many bytes of an upload are read, written and hashed at a time. It is twice durable.PieceSize: uploads
// that come in together are woken half as often, and the system takes larger pages. Twice as much again was slower.
const pieceSize = 2 * durable.PieceSize

// piece is a buffer of bulk data.
type piece [pieceSize]byte

// idlePieces is how many pieces are kept for the uploads to come: those of eight at a time.
const idlePieces = 16

// pieces are the buffers of uploads. Their memory is not Go's: on a server that holds little else, the collector would
// let twice as much garbage grow beside them. It is safe for concurrent use.
type pieces struct {
	mu     sync.Mutex
	idle   []*piece
	mapped map[*piece][]byte // where each lies
}

// get returns a piece that is given back with put.
func (p *pieces) get() *piece {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.idle) - 1; n >= 0 {
		b := p.idle[n]
		p.idle = p.idle[:n]
		return b
	}
	mem, err := unix.Mmap(-1, 0, pieceSize+lanes.Slack, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil { // too many mappings, or no memory: then that of Go says so
		return (*piece)(lanes.Buffer(pieceSize))
	}
	b := (*piece)(lanes.Within(mem))
	p.mapped[b] = mem
	return b
}

// put takes a piece back that nobody reads or writes any more.
func (p *pieces) put(b *piece) {
	p.mu.Lock()
	defer p.mu.Unlock()
	mem, ok := p.mapped[b]
	switch {
	case !ok:
	case len(p.idle) < idlePieces:
		p.idle = append(p.idle, b)
	default:
		delete(p.mapped, b)
		_ = unix.Munmap(mem) // it fails for what was not mapped
	}
}

// drop gives the memory back of those that nobody has.
func (p *pieces) drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, b := range p.idle {
		_ = unix.Munmap(p.mapped[b]) // as in put
		delete(p.mapped, b)
	}
	p.idle = nil
}

type shelfState struct {
	syncs durable.Group
	mu    sync.Mutex // guards made
	made  bool       // the folder is there, durably
}

var (
	_ blobstore.Store      = (*Store)(nil)
	_ blobstore.Uploads    = (*Store)(nil)
	_ blobstore.Refs       = (*Store)(nil)
	_ blobstore.Quarantine = (*Store)(nil)
	_ blobstore.Segments   = (*Store)(nil)
	_ blobstore.Losses     = (*Store)(nil)
)

// Init makes the folder dir, which may be missing or empty, a store. It is durable on return. It does nothing if dir is
// a store already, and returns blobstore.ErrNotStore if it holds anything else, or lies inside of another store.
func Init(dir string) error { return initOn(durable.Disk{}, dir) }

func initOn(disk durable.Disk, dir string) error {
	if outer := around(dir); outer != "" && errors.Is(checkMarker(dir), blobstore.ErrNotStore) {
		return fmt.Errorf("%s: %w: it would be inside of the store %s", dir, blobstore.ErrNotStore, outer)
	}
	if err := disk.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make store %s: %w", dir, err)
	}
	switch err := checkMarker(dir); {
	case err == nil:
		return nil
	case !errors.Is(err, blobstore.ErrNotStore):
		return err
	}
	if err := checkEmpty(dir); err != nil {
		return err
	}
	lock, err := durable.Acquire(filepath.Join(dir, lockName))
	if err != nil {
		return fmt.Errorf("make store %s: %w", dir, err)
	}
	err = build(disk, dir)
	if err = errors.Join(err, lock.Release()); err != nil {
		return fmt.Errorf("make store %s: %w", dir, err)
	}
	return nil
}

// around returns the store that a folder, which may be missing, lies inside of; empty: none.
func around(dir string) (outer string) {
	path, err := filepath.Abs(dir)
	if err != nil {
		return ""
	}
	for real := false; path != filepath.Dir(path); {
		if !real { // what is above a link is above what it leads to
			if to, err := filepath.EvalSymlinks(path); err == nil {
				path, real = to, true
			}
		}
		path = filepath.Dir(path)
		if err := checkMarker(path); err == nil {
			return path
		}
	}
	return ""
}

// build writes everything that a new store has, the marker last.
func build(disk durable.Disk, dir string) error {
	for _, sub := range []string{filepath.Join(blobsName, hashName), uploadsName} {
		if err := disk.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return err
		}
	}
	if err := disk.WriteFile(filepath.Join(dir, refsName), newLogHeader(), 0o644); err != nil {
		return err
	}
	marker, err := json.Marshal(marker{formatName, formatVersion})
	if err != nil {
		return err
	}
	return disk.WriteFile(filepath.Join(dir, markerName), append(marker, '\n'), 0o644)
}

type marker struct {
	Format  string `json:"format"`
	Version int    `json:"version"`
}

// checkMarker says whether dir is a store that this program can use.
func checkMarker(dir string) error {
	b, err := os.ReadFile(filepath.Join(dir, markerName))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return fmt.Errorf("%s: %w: %s", dir, blobstore.ErrNotStore, describe(dir))
	} else if err != nil {
		return fmt.Errorf("open store: %w", err)
	}
	var m marker
	if err := json.Unmarshal(b, &m); err != nil || m.Format != formatName || m.Version < 1 {
		return fmt.Errorf("%s: %w: %s is not what this program writes", dir, blobstore.ErrDamaged, markerName)
	}
	if m.Version > formatVersion {
		return fmt.Errorf("%s is a store of format %d: this program knows formats up to %d", dir, m.Version, formatVersion)
	}
	return nil
}

// describe says in words what is at dir instead of a store.
func describe(dir string) string {
	found, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "there is no such folder"
	case err != nil:
		return err.Error()
	case len(found) == 0:
		return "the folder is empty"
	}
	var some []string
	for _, e := range found[:min(3, len(found))] {
		some = append(some, e.Name())
	}
	more := ""
	if n := len(found) - len(some); n > 0 {
		more = fmt.Sprintf(" and %d more", n)
	}
	return fmt.Sprintf("it has no %s, but %s%s", markerName, strings.Join(some, ", "), more)
}

// checkEmpty refuses a folder that holds anything but what an Init leaves behind that was killed.
func checkEmpty(dir string) error {
	found, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("make store: %w", err)
	}
	for _, e := range found {
		if !leftover(dir, e) {
			return fmt.Errorf("%s: %w: %s", dir, blobstore.ErrNotStore, describe(dir))
		}
	}
	return nil
}

func leftover(dir string, e fs.DirEntry) bool {
	switch name := e.Name(); name {
	case lockName, "lost+found":
		return true
	case refsName:
		st, err := e.Info()
		return err == nil && st.Size() <= logHeaderSize
	case blobsName, uploadsName:
		files := 0
		err := filepath.WalkDir(filepath.Join(dir, name), func(_ string, e fs.DirEntry, err error) error {
			if err == nil && !e.IsDir() {
				files++
			}
			return err
		})
		return err == nil && files == 0
	default:
		return strings.HasPrefix(name, durable.TempPrefix(refsName)) ||
			strings.HasPrefix(name, durable.TempPrefix(markerName))
	}
}

func shelf(dir string, first byte) string {
	return filepath.Join(dir, blobsName, hashName, fmt.Sprintf("%02x", first))
}

// Open opens the store in dir and takes its lock. The error is blobstore.ErrNotStore if there is none,
// blobstore.ErrDamaged if its records do not read back, blobstore.ErrRefsDamaged if those are refs, and
// durable.ErrLocked, with the process, if it is in use. All that the store shows is durable on return, also what a
// killed process had not yet acknowledged.
func Open(dir string, o Options) (*Store, error) {
	if err := checkMarker(dir); err != nil {
		return nil, err
	}
	lock, err := durable.Acquire(filepath.Join(dir, lockName))
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	st := &Store{
		dir: dir, disk: o.Disk, lock: lock, busy: map[string]bool{}, reading: o.ReadOnly,
		every: syncEvery, segment: lanes.SegmentSize,
	}
	st.hashes.Soon = blobstore.Soon
	st.pieces.mapped = map[*piece][]byte{}
	if err := st.recover(o); err != nil {
		lock.Release()
		return nil, fmt.Errorf("open store %s: %w", dir, err)
	}
	return st, nil
}

// recover brings what an earlier process left into order.
func (st *Store) recover(o Options) (err error) {
	notify := o.Notify
	if notify == nil {
		notify = func(string) {}
	}
	if st.boot, err = st.disk.BootID(); err != nil {
		return err
	}
	if outer := around(st.dir); outer != "" {
		notify(fmt.Sprintf("%s lies inside of the store %s: move it out of there", st.dir, outer))
	}
	if !o.ReadOnly {
		if err := st.tidy(notify); err != nil {
			return err
		}
	}
	if st.refs, err = openLog(st.disk, filepath.Join(st.dir, refsName), o); err != nil {
		return err
	}
	for _, d := range st.refs.dropped {
		notify(d.String())
	}
	return nil
}

// tidy makes durable what the folder shows, and removes what a killed process left.
func (st *Store) tidy(notify func(string)) error {
	if err := st.syncShelves(); err != nil {
		return err
	}
	if err := st.sweep(notify); err != nil {
		return err
	}
	return st.sweepAside()
}

// change is asked before everything that changes the store.
func (st *Store) change() error {
	if st.reading {
		return blobstore.ErrReadOnly
	}
	return nil
}

// Dropped implements blobstore.Losses.
func (st *Store) Dropped() []blobstore.Dropped { return slices.Clone(st.refs.dropped) }

// syncShelves makes every name of a blob durable.
func (st *Store) syncShelves() error {
	root := filepath.Join(st.dir, blobsName, hashName)
	if err := st.disk.MkdirAll(root, 0o755); err != nil {
		return err
	}
	for i := range st.shelves {
		dir := shelf(st.dir, byte(i))
		if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := st.disk.SyncDir(dir); err != nil {
			return err
		}
		st.shelves[i].made = true
	}
	return st.disk.SyncDir(root)
}

// sweep removes the halves of uploads that a killed process was creating or dropping, and makes the saved states of the
// others durable, and receipts.
func (st *Store) sweep(notify func(string)) error {
	dir := filepath.Join(st.dir, uploadsName)
	if err := st.disk.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	halves := map[string]string{uploadData: uploadState, uploadState: uploadData}
	err := st.eachUploadFile(context.Background(), func(id, ext string) error {
		path, other := st.uploadPath(id, ext), st.uploadPath(id, halves[ext])
		if ext == uploadSegments { // of a commit that did not come to its end
			return st.disk.Remove(path)
		}
		_, err := os.Lstat(other)
		_, ended := st.receipt(id)
		switch {
		case errors.Is(err, fs.ErrNotExist) && (ext == uploadData || !ended):
			notify(fmt.Sprintf("removed %s: %s is not there", filepath.Base(path), filepath.Base(other)))
			return st.disk.Remove(path)
		case err != nil && !errors.Is(err, fs.ErrNotExist) || ext == uploadData:
			return err
		}
		err = st.syncFile(path)
		if errors.Is(err, durable.ErrNotRegular) {
			notify("left alone: " + err.Error())
			err = nil
		}
		return err
	})
	if err != nil {
		return err
	}
	return st.disk.SyncDir(dir)
}

func (st *Store) syncFile(path string) error {
	f, err := st.disk.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// ID returns what tells this store from all others, also after its folder was moved.
func (st *Store) ID() string { return hex.EncodeToString(st.refs.salt) }

// Close gives the store back. No other call may be running or follow.
func (st *Store) Close() error {
	if st.closed.Swap(true) {
		return nil
	}
	st.pieces.drop()
	return errors.Join(st.refs.close(), st.lock.Release())
}

// Put implements blobstore.Refs.
func (st *Store) Put(ctx context.Context, refs ...blobstore.Ref) (blobstore.Position, error) {
	if err := st.change(); err != nil {
		return 0, fmt.Errorf("put refs: %w", err)
	}
	return st.refs.put(ctx, refs)
}

// full marks an error that means that the disk or the quota is used up.
func full(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fmt.Errorf("%w: %w", blobstore.ErrNoSpace, err)
	}
	return err
}

// names guards the names of blobs. At most one call at a time changes the blob of a digest, and a name that is not yet
// durable is hidden from readers.
type names struct {
	mu sync.Mutex
	m  map[identity.Digest]*name
}

type name struct {
	sync.Mutex
	users  int
	hidden bool // guarded by names.mu
}

// lock waits for the digest's turn and returns what gives it back.
func (ns *names) lock(d identity.Digest) (unlock func()) {
	ns.mu.Lock()
	if ns.m == nil {
		ns.m = map[identity.Digest]*name{}
	}
	n := ns.m[d]
	if n == nil {
		n = &name{}
		ns.m[d] = n
	}
	n.users++
	ns.mu.Unlock()
	n.Lock()
	return func() {
		n.Unlock()
		ns.mu.Lock()
		defer ns.mu.Unlock()
		if n.users--; n.users == 0 && !n.hidden {
			delete(ns.m, d)
		}
	}
}

// hide says whether readers see the blob of d from now on. The caller holds the lock of d.
func (ns *names) hide(d identity.Digest, hidden bool) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	ns.m[d].hidden = hidden
}

func (ns *names) isHidden(d identity.Digest) bool {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	n := ns.m[d]
	return n != nil && n.hidden
}

// page is how many names a listing holds in memory at a time.
const page = 4096

// smallest keeps the page smallest strings that it is shown, in ascending order after sort.
type smallest []string

func (s *smallest) add(name string) {
	if *s = append(*s, name); len(*s) >= 2*page {
		s.trim()
	}
}

func (s *smallest) trim() {
	slices.Sort(*s)
	*s = (*s)[:min(page, len(*s))]
}
