package fsstore

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"math"
	"os"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// session is one call's hold on an upload. Between calls nothing of an upload is in memory.
type session struct {
	st    *Store
	id    string
	data  *durable.File
	state *durable.File
	hash  *lanes.Recorder // of the first size bytes of data, but for what feed has put off
	feed  *lanes.Feed     // of hash; nil but in receive
	size  int64           // of data

	reserved int64 // the disk space that was taken for data ends here, if that is more than size
	saved    slot  // the current slot: always durable, except the one that Create made
	at       int   // which one it is
	first    slot  // the current one when the call began; it covers everything that was there then

	failed error // why saving failed; nothing more is saved then

	ended *receipt // what the upload became; then it has no data, no hash and no slots
}

// open takes an upload for one call and brings it into order: afterwards size, hash and the data file agree.
func (st *Store) open(ctx context.Context, id string) (*session, error) {
	if err := st.take(id); err != nil {
		return nil, err
	}
	s := &session{st: st, id: id, hash: lanes.NewRecorder(st.segment)}
	err := s.load(ctx)
	switch {
	case err == nil:
		s.first = s.saved
		return s, nil
	case errors.Is(err, fs.ErrNotExist):
		err = blobstore.ErrUploadUnknown
	case errors.Is(err, blobstore.ErrDamaged):
		// Nothing in it can be used again, and the client can send it again.
		err = fmt.Errorf("%w: dropped: %w", blobstore.ErrUploadUnknown, errors.Join(err, st.drop(id)))
	}
	s.close()
	return nil, err
}

func (s *session) close() {
	for _, f := range []*durable.File{s.data, s.state} {
		if f != nil {
			f.Close() // nothing to lose: what has to be durable is synced
		}
	}
	s.st.give(s.id)
}

func (s *session) load(ctx context.Context) (err error) {
	path := s.st.uploadPath(s.id, uploadData)
	if fi, err := os.Lstat(path); err == nil && fi.Mode().Perm()&0o200 == 0 {
		// A commit was about to name it, and did not.
		if err := os.Chmod(path, 0o600); err != nil {
			return err
		}
	}
	s.data, err = s.st.disk.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return s.loadReceipt()
	} else if err != nil {
		return err
	}
	if s.state, err = s.st.disk.OpenFile(s.st.uploadPath(s.id, uploadState), os.O_RDWR, 0); err != nil {
		return err
	}
	size, err := s.data.Size()
	if err != nil {
		return err
	}
	slots, err := readSlots(s.state)
	if err != nil {
		return err
	}
	at, stale, err := choose(slots, size)
	if err != nil {
		return err
	}
	s.at, s.saved, s.size = at, *slots[at], slots[at].Covered
	if err := s.hash.UnmarshalBinary(s.saved.Hash[:s.saved.HashLen]); err != nil {
		return fmt.Errorf("%w: saved hash state of an upload: %w", blobstore.ErrDamaged, err)
	}
	if stale {
		s.saved.Count = slots[1-at].Count
	}
	return s.catchUp(ctx, size, stale)
}

// loadReceipt is load for an upload without a data file. A state file that is no receipt, or one of a blob that is gone,
// goes.
func (s *session) loadReceipt() error {
	if _, err := os.Lstat(s.st.uploadPath(s.id, uploadState)); err != nil {
		return err
	}
	r, ok := s.st.receipt(s.id)
	if !ok {
		return errors.Join(fs.ErrNotExist, s.st.drop(s.id))
	}
	s.ended, s.size = &r, r.size
	return nil
}

// catchUp deals with the bytes after the saved state: under the same boot they are what was received, and are hashed;
// under another nothing is known about them, and they go. A stale slot is overwritten before new bytes can come that
// would make it look current.
func (s *session) catchUp(ctx context.Context, size int64, stale bool) error {
	if size > s.size && !s.st.sameBoot(&s.saved) {
		if err := s.data.Truncate(s.size); err != nil {
			return err
		}
		size = s.size
	}
	if size == s.size && !stale {
		return nil
	}
	if err := s.hashTo(ctx, size); err != nil {
		return err
	}
	if stale {
		s.failed = s.persistNow()
	}
	return s.save()
}

// sameBoot says whether a slot was written under this run of the kernel.
func (st *Store) sameBoot(sl *slot) bool {
	var boot [36]byte
	copy(boot[:], st.boot)
	return boot == sl.Boot
}

func (s *session) hashTo(ctx context.Context, size int64) error {
	piece := s.st.pieces.get()
	defer s.st.pieces.put(piece)
	for s.size < size && ctx.Err() == nil {
		n, err := s.data.ReadAt(piece[:min(pieceSize, size-s.size)], s.size)
		if err != nil && !errors.Is(err, io.EOF) || n == 0 {
			return fmt.Errorf("hash what was received: %w", err)
		}
		s.st.hashes.Write(s.hash, piece[:n])
		s.size += int64(n)
	}
	return ctx.Err()
}

// check compares what was received with what was promised and what is asked for.
func (s *session) check(want identity.Digest) error {
	if a := s.saved.Announced; a >= 0 && a != s.size {
		return fmt.Errorf("%w: received %d bytes, announced were %d", blobstore.ErrSizeMismatch, s.size, a)
	}
	if got := identity.DigestOf(s.hash); got != want {
		return fmt.Errorf("%w: received %s, asked for %s", blobstore.ErrDigestMismatch, got, want)
	}
	if hint := s.saved.Hint; !hint.IsZero() && hint != want {
		return fmt.Errorf("%w: announced was %s, asked for %s", blobstore.ErrDigestMismatch, hint, want)
	}
	return nil
}

// receive stores and hashes what r has, and saves the state on the way. Size, hash and the data file agree on return,
// whatever the error. What went wrong with saving is for save to say.
func (s *session) receive(ctx context.Context, r io.Reader) (err error) {
	p := pair{st: s.st}
	defer p.give()
	s.feed = s.st.hashes.Feed(s.hash)
	defer func() {
		s.feed.Close()
		err = errors.Join(err, s.release())
	}()
	bg := background{s: s}
	defer bg.wait()
	announced, room := s.saved.Announced, int64(math.MaxInt64) // a save in the background writes saved
	if announced >= 0 {
		room = announced - s.size
	}
	for bg.step() {
		if err := ctx.Err(); err != nil {
			return err
		}
		piece := p.free()
		n, rerr := blobstore.Fill(r, piece[:max(1, min(pieceSize, room))])
		if room -= int64(n); room < 0 {
			return fmt.Errorf("%w: more than the announced %d bytes", blobstore.ErrSizeMismatch, announced)
		}
		if p.held, err = s.write(piece[:n], announced); err != nil {
			return err
		}
		if rerr == io.EOF {
			return nil
		} else if rerr != nil {
			return rerr
		}
	}
	return nil
}

// write stores b and hashes what was stored of it, maybe later: then held is true, and b must stay as it is until the
// next one is written or feed is flushed. After an error the file ends where the hash does. The upload was announced
// with that many bytes; negative: it was not.
func (s *session) write(b []byte, announced int64) (held bool, err error) {
	if len(b) == 0 {
		return false, nil
	}
	s.reserve(int64(len(b)), announced)
	n, err := s.data.WriteAt(b, s.size)
	held = s.feed.Write(b[:n])
	s.size += int64(n)
	if err != nil {
		err = errors.Join(err, s.data.Truncate(s.size))
	}
	return held, err
}

// reserve takes disk space for the next bytes of an upload that was announced with a size, some at a time, as that makes
// writing and syncing cheaper. A full disk is for the write to find.
func (s *session) reserve(n, announced int64) {
	if announced < 0 || s.size+n <= s.reserved {
		return
	}
	if s.reserved = min(s.size+max(n, reserveStep), announced); s.reserved-s.size > n {
		_ = s.data.ReserveNext(s.size, s.reserved-s.size)
	}
}

// release gives back what was reserved and not used.
func (s *session) release() error {
	if s.reserved <= s.size {
		return nil
	}
	s.reserved = 0
	return s.data.Truncate(s.size)
}

// pair is the buffers of one receive: the one that is filled, and another while the bytes of the first one are not yet
// hashed.
type pair struct {
	st   *Store
	both [2]*piece
	held bool // both[0] is
}

// free returns the buffer to fill next.
func (p *pair) free() *piece {
	if p.held {
		p.both[0], p.both[1] = p.both[1], p.both[0]
	}
	if p.both[0] == nil {
		p.both[0] = p.st.pieces.get()
	}
	return p.both[0]
}

// give gives the buffers back when everything is hashed.
func (p *pair) give() {
	for _, b := range p.both {
		if b != nil {
			p.st.pieces.put(b)
		}
	}
}

func (sl *slot) setHash(h identity.Hash) error {
	b, err := h.MarshalBinary()
	if err != nil {
		return err
	}
	if len(b) > len(sl.Hash) {
		return fmt.Errorf("hash state has %d bytes, room is for %d", len(b), len(sl.Hash))
	}
	sl.HashLen = uint16(copy(sl.Hash[:], b))
	return nil
}

// point returns the save that says where the upload is now. It follows on s.saved, and must be made or given up before
// the next one.
func (s *session) point() (sv save, err error) {
	sv.slot = s.saved
	sv.Covered = s.size
	copy(sv.Boot[:], s.st.boot)
	first, noted := s.hash.Take()
	for i := range noted {
		sv.noted = append(sv.noted, noted[i][:]...)
	}
	sv.at = statesAt + (first-1)*stateSize
	sv.Sum = crc32.Update(sv.Sum, castagnoli, sv.noted)
	return sv, sv.setHash(s.hash)
}

// midstates returns those of the whole upload, whose digest is d, in the form that a store keeps. It returns nil if it
// has none, or if some were not recorded. The session can't be saved afterwards.
func (s *session) midstates(d identity.Digest) ([]byte, error) {
	if lanes.Edges(s.size, s.st.segment) == 0 {
		return nil, nil
	}
	sv, err := s.point()
	if err != nil {
		return nil, err
	}
	b := make([]byte, sv.at-statesAt, sv.at-statesAt+int64(len(sv.noted)))
	if _, err := s.state.ReadAt(b, statesAt); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if b = append(b, sv.noted...); crc32.Checksum(b, castagnoli) != sv.Sum {
		return nil, nil
	}
	return blobstore.FormMidstates(b, d, s.size, s.st.segment)
}

// begins checks that an append starts where the upload ends.
func (s *session) begins(off int64) error {
	if off != s.size {
		return fmt.Errorf("%w: it has %d bytes, not %d", blobstore.ErrOffset, s.size, off)
	}
	return nil
}

// sync makes everything that was received durable without saving the state, which is not needed by an upload that ends.
func (s *session) sync() error {
	if s.failed == nil && s.saved.Count > 0 && s.saved.Covered == s.size {
		return nil
	}
	if s.failed == nil {
		s.failed = s.data.Sync()
	}
	if s.failed == nil {
		return nil
	}
	return s.save()
}

// seal writes down that the upload becomes d, and makes that durable as far as it has to be, see state.go, and
// everything that was received.
func (s *session) seal(d identity.Digest) error {
	if err := writeReceipt(s.state, 1-s.at, receipt{d, s.size}); err != nil {
		return err
	}
	if s.saved.Count == 0 || s.saved.Covered == s.size {
		return s.sync()
	}
	noted := make(chan error, 1)
	go func() { noted <- s.state.Sync() }()
	return errors.Join(s.sync(), <-noted)
}

// save makes everything that was received durable, and then the state. If that fails, now or earlier in the background,
// the upload goes back to the last state that was saved: after a failed sync nothing is known about the bytes after it.
func (s *session) save() error {
	if s.failed == nil && s.saved.Count > 0 && s.saved.Covered == s.size {
		return nil
	}
	if s.failed == nil {
		s.failed = s.persistNow()
	}
	if s.failed == nil {
		return nil
	}
	s.size = s.saved.Covered
	return fmt.Errorf("save what was received: %w", errors.Join(s.failed, s.data.Truncate(s.size)))
}

// keep is the end of a call that failed with err, or in the background: what was received is saved, or given back if
// there was no space for all of it. It returns what went wrong, all of it.
func (s *session) keep(err error) error {
	if !noSpace(err) {
		err = errors.Join(err, s.save())
	}
	if noSpace(err) {
		err = errors.Join(err, s.back())
	}
	return err
}

// back makes the upload what it was when the call began, and frees the space that was taken since. Bytes go after the
// slot that covers them is no longer the current one. Where a slot can't be written in place, as some file systems take
// space for that too, the upload keeps what was saved on the way.
func (s *session) back() error {
	if s.saved.Count != s.first.Count {
		if err := s.data.Truncate(s.saved.Covered); err != nil {
			return err
		}
		sv := save{slot: s.first}
		sv.Count = s.saved.Count + 1
		if err := writeSave(s.state, 1-s.at, &sv); err != nil {
			s.size = s.saved.Covered
			return err
		}
		s.saved, s.at = sv.slot, 1-s.at
	}
	s.size = s.first.Covered
	return s.data.Truncate(s.size)
}

func noSpace(err error) bool { return errors.Is(full(err), blobstore.ErrNoSpace) }

func (s *session) persistNow() error {
	sv, err := s.point()
	if err != nil {
		return err
	}
	return s.persist(sv)
}

// persist syncs the data and then saves sv, which covers no more than what was written before the call. It uses no
// field of s that receiving changes.
func (s *session) persist(sv save) error {
	if err := s.data.Sync(); err != nil {
		return err
	}
	if s.saved.Count == 0 {
		dir := s.st.uploadPath("", "")
		if err := s.st.lobby.Do(func() error { return s.st.disk.SyncDir(dir) }); err != nil {
			return err
		}
	}
	sv.Count = s.saved.Count + 1
	if err := writeSave(s.state, 1-s.at, &sv); err != nil {
		return err
	}
	s.saved, s.at = sv.slot, 1-s.at
	return nil
}

// background saves the state while receiving goes on, one save at a time.
type background struct {
	s    *session
	done chan error // of the save in progress; nil when there is none
}

// step begins a save if enough was received since the last one. It returns false when one has failed.
func (b *background) step() bool {
	if b.done != nil {
		select {
		case b.s.failed = <-b.done:
			b.done = nil
		default:
			return true
		}
	}
	if b.s.failed != nil || b.s.size-b.s.saved.Covered < b.s.st.every {
		return b.s.failed == nil
	}
	b.s.feed.Flush()
	sv, err := b.s.point()
	if err != nil {
		b.s.failed = err
		return false
	}
	b.done = make(chan error, 1)
	go func(done chan<- error) { done <- b.s.persist(sv) }(b.done)
	return true
}

// wait returns when no save is in progress.
func (b *background) wait() {
	if b.done != nil {
		b.s.failed, b.done = <-b.done, nil
	}
}
