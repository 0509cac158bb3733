package s3store

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store/bucket"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
)

const (
	uploadsName = "uploads"
	tailsName   = "tails"
)

// saveEvery is how many bytes an Append lets pass before it saves the state of the upload on the way: what a killed
// process has to be sent again is bounded by that and two parts.
const saveEvery = 64 << 20

// state is what uploads/ID says of an upload: where it is, and all that going on with it takes. The bytes that it
// covers are stored before it is.
type state struct {
	Hint      identity.Digest `json:"hint,omitzero"`      // what Create was told
	Announced int64           `json:"announced"`          // bytes to come in all; negative when not known
	Target    identity.Digest `json:"target,omitzero"`    // under which the copy is shown in the end; zero: not known yet
	Unnamed   bool            `json:"unnamed,omitempty"`  // the copy's bytes are at unnamed/ID
	Multipart string          `json:"multipart,omitzero"` // the server's name of the multipart upload; empty: not begun
	Parts     []bucket.Part   `json:"parts,omitempty"`
	Parted    int64           `json:"parted"`              // bytes in parts
	Tails     []tail          `json:"tails,omitempty"`     // the bytes after the last part
	Size      int64           `json:"size"`                // bytes in parts and tails
	Hash      []byte          `json:"hash"`                // saved state of identity.NewHash over them
	Midstates []byte          `json:"midstates,omitempty"` // one at each edge of a segment in them; empty: not all are known
	Ended     bool            `json:"ended,omitempty"`     // what is left of the upload is only to be removed
	Became    identity.Digest `json:"became,omitzero"`     // the blob of which another copy is shown than that of the upload
	Whole     int64           `json:"whole,omitempty"`     // the size of that
	Writer    string          `json:"writer"`              // the session that saved it
}

// tail is an object that holds bytes after the last part.
type tail struct {
	Name string `json:"name"`
	Size int64  `json:"size"`
	CRC  uint32 `json:"crc32c"`
}

// receipt is what an upload became, and what is left of it.
//
// That an upload has ended stands in the marker of the blob, which names its copy, or else, where another copy is shown,
// in its state. So that it is never gone on with when that copy is gone, its state goes before the copy does.
type receipt struct {
	digest identity.Digest
	size   int64
	state  state
	etag   string
}

// session is one call's hold on an upload. Between calls nothing of an upload is in memory, but what it became.
type session struct {
	st   *Store
	id   string
	name string       // of this session, to know its own saves again
	size atomic.Int64 // bytes received
	hash *lanes.Recorder
	feed *lanes.Feed // of hash; nil but in receive. What it has put off is in buf
	// The midstates from the start of the blob on, in order, as far as hash was asked for them.
	noted []byte
	buf   []byte // the bytes after the last part; those of the tails first
	crc   uint32 // of buf
	next  []byte // empty: the buffer of the part after this one, when it was used before
	n     int    // the part that buf will be, counted from 0

	// Of the memory for parts this is taken, for buf and for the other buffer, which is next or the part on its way.
	taken, takenNext int64

	// While a part is on its way the goroutine that sends it owns these.
	cur   state // at the end of the last part that is stored, or as it was found
	saved state // what uploads/ID says
	etag  string

	sending chan error // the part on its way; nil when there is none
	failed  error      // why a part could not be sent

	ended *receipt // what the upload became
}

func (st *Store) stateKey(id string) string { return st.b.Key(uploadsName, id) }

// validID says whether id can be one of ours. It is what keeps a request from naming other keys.
func validID(id string) bool {
	return len(id) == len(rand.Text()) && !slices.ContainsFunc([]byte(id), func(c byte) bool {
		return (c < 'A' || c > 'Z') && (c < '2' || c > '7')
	})
}

func (st *Store) loadState(ctx context.Context, id string) (s state, err error) {
	s, _, err = st.readState(ctx, id)
	return s, err
}

func (st *Store) readState(ctx context.Context, id string) (s state, o bucket.Object, err error) {
	if !validID(id) {
		return s, o, blobstore.ErrUploadUnknown
	}
	o, err = st.b.Get(ctx, st.stateKey(id), smallObject, func(body []byte) error {
		if s = (state{}); unseal(body, &s) != nil || !s.sound() {
			return fmt.Errorf("%w: state of upload %s is not what this program writes", blobstore.ErrDamaged, id)
		}
		return nil
	})
	if errors.Is(err, bucket.ErrAbsent) {
		err = blobstore.ErrUploadUnknown
	}
	if err != nil {
		s = state{}
	}
	return s, o, err
}

// sound says whether the numbers of a state agree.
func (s *state) sound() bool {
	sum, room := s.Parted, partSize(len(s.Parts), s.Announced, partMin)
	for _, t := range s.Tails {
		if t.Size < 0 || t.Size > room || !validID(t.Name) {
			return false
		}
		sum += t.Size
		room -= t.Size
	}
	return s.Parted >= 0 && s.Parted <= bucket.MaxObject && s.Announced <= bucket.MaxObject && sum == s.Size &&
		(s.Multipart != "" || len(s.Parts) == 0) &&
		(s.Announced < 0 || s.Size <= s.Announced)
}

// begin takes an upload for one call. The bytes of its tails come with it if they are wanted.
func (st *Store) begin(ctx context.Context, id string, bytes bool) (*session, error) {
	s := &session{st: st, id: id, name: rand.Text(), hash: lanes.NewRecorder(st.segment)}
	if err := st.take(s); err != nil {
		return nil, err
	}
	if s.ended = st.endedAs(id); s.ended != nil {
		s.cur, s.saved, s.etag = s.ended.state, s.ended.state.clone(), s.ended.etag
		s.size.Store(s.ended.size)
		return s, nil
	}
	err := s.load(ctx, bytes)
	if err == nil && s.cur.Ended {
		err = and(blobstore.ErrUploadUnknown, s.drop(ctx))
	}
	if errors.Is(err, blobstore.ErrDamaged) {
		// Nothing in it can be used again, and the client can send it again.
		err = fmt.Errorf("%w: dropped: %w", blobstore.ErrUploadUnknown, and(err, s.drop(ctx)))
	}
	if err != nil {
		st.give(s)
		return nil, err
	}
	return s, nil
}

// findEnded says what an upload became whose state this is; nil: it has not ended. It is remembered.
func (st *Store) findEnded(ctx context.Context, id string, s state, etag string) (*receipt, error) {
	if r := st.endedAs(id); r != nil {
		return r, nil
	}
	r := &receipt{s.Became, s.Whole, s, etag}
	if s.Became.IsZero() {
		if s.Ended || s.Target.IsZero() {
			return nil, nil
		}
		l, _, err := st.readLive(ctx, s.Target)
		switch {
		case errors.Is(err, bucket.ErrAbsent), errors.Is(err, blobstore.ErrDamaged), // a marker that the end replaces
			err == nil && strings.TrimPrefix(l.Copy, unnamedMark) != id:
			return nil, nil
		case err != nil:
			return nil, err
		}
		r.digest, r.size = s.Target, l.Size
	}
	st.setEnded(id, r)
	return r, nil
}

func (st *Store) take(s *session) error {
	if !validID(s.id) {
		return blobstore.ErrUploadUnknown
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.active[s.id] != nil {
		return blobstore.ErrUploadBusy
	}
	st.active[s.id] = s
	return nil
}

func (st *Store) give(s *session) {
	st.memory.give(s.taken + s.takenNext)
	s.taken, s.takenNext = 0, 0
	st.mu.Lock()
	defer st.mu.Unlock()
	delete(st.active, s.id)
}

func (s *session) load(ctx context.Context, tails bool) error {
	found, o, err := s.st.readState(ctx, s.id)
	if err != nil {
		return err
	}
	s.cur, s.saved, s.etag, s.n = found, found.clone(), o.ETag, len(found.Parts)
	s.size.Store(found.Size)
	if err := s.hash.UnmarshalBinary(found.Hash); err != nil {
		return fmt.Errorf("%w: saved hash state of upload %s: %w", blobstore.ErrDamaged, s.id, err)
	}
	if int64(len(found.Midstates)) == found.Size/s.st.segment*stateSize {
		s.noted = slices.Clip(found.Midstates)
	}
	if !tails || found.Ended {
		return nil
	}
	whole := s.partSize()
	if found.Announced >= 0 {
		whole = min(whole, found.Announced-found.Parted)
	}
	if err := s.reserve(ctx, found.Size-found.Parted, whole); err != nil {
		return err
	}
	s.buf = make([]byte, 0, found.Size-found.Parted)
	for _, t := range found.Tails {
		o, err := s.st.b.Get(ctx, s.tailKey(t.Name), t.Size, func(body []byte) error {
			if int64(len(body)) != t.Size || crc32.Checksum(body, castagnoli) != t.CRC {
				return fmt.Errorf("%w: the last bytes of upload %s are not as they were received", blobstore.ErrDamaged, s.id)
			}
			return nil
		})
		if errors.Is(err, bucket.ErrAbsent) {
			return fmt.Errorf("%w: the last bytes of upload %s are not there", blobstore.ErrDamaged, s.id)
		} else if err != nil {
			return err
		}
		s.buf = append(s.buf, o.Body...)
	}
	s.crc = crc32.Checksum(s.buf, castagnoli)
	return nil
}

func (s *session) tailKey(name string) string { return s.st.b.Key(tailsName, s.id, name) }

func (s *state) clone() state {
	c := *s
	c.Parts, c.Tails = slices.Clone(s.Parts), slices.Clone(s.Tails)
	return c
}

// close ends the call.
func (s *session) close() {
	s.wait()
	for _, b := range [][]byte{s.buf, s.next} {
		if int64(cap(b)) == s.st.partMin {
			b = b[:0]
			s.st.parts.Put(&b)
		}
	}
	s.st.give(s)
}

// begins checks that an append starts where the upload ends.
func (s *session) begins(off int64) error {
	if has := s.size.Load(); off != has {
		return fmt.Errorf("%w: it has %d bytes, not %d", blobstore.ErrOffset, has, off)
	}
	return nil
}

// check compares what was received with what was promised and what is asked for.
func (s *session) check(want identity.Digest) error {
	if a, has := s.cur.Announced, s.size.Load(); a >= 0 && a != has {
		return fmt.Errorf("%w: received %d bytes, announced were %d", blobstore.ErrSizeMismatch, has, a)
	}
	if got := identity.DigestOf(s.hash); got != want {
		return fmt.Errorf("%w: received %s, asked for %s", blobstore.ErrDigestMismatch, got, want)
	}
	said := s.cur.Hint
	if s.cur.Multipart != "" && !s.cur.Unnamed {
		said = s.cur.Target // where the bytes are, they can't be shown as anything else
	}
	if !said.IsZero() && said != want {
		return fmt.Errorf("%w: announced was %s, asked for %s", blobstore.ErrDigestMismatch, said, want)
	}
	return nil
}

// receive hashes what r has and sends it part by part, one part being sent while the next one comes in. The hash covers
// parts and buf on return, whatever the error; what went wrong with sending is in failed.
func (s *session) receive(ctx context.Context, r io.Reader) error {
	announced, room := s.cur.Announced, int64(math.MaxInt64)
	if announced >= 0 {
		room = announced - s.size.Load()
	}
	s.feed = s.st.hashes.Feed(s.hash)
	defer s.feed.Close()
	for s.flush(ctx) {
		if err := ctx.Err(); err != nil {
			return err
		}
		if room == 0 {
			return atEnd(r, announced)
		}
		n, err := s.fill(ctx, r, room)
		room -= int64(n)
		piece := s.buf[len(s.buf)-n:]
		s.crc = crc32.Update(s.crc, castagnoli, piece)
		s.feed.Write(piece) // it stays as it is until the next flush
		s.size.Add(int64(n))
		if err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
	return nil
}

// atEnd reads on to see that nothing comes after the announced bytes.
func atEnd(r io.Reader, announced int64) error {
	var more [1]byte
	switch n, err := blobstore.Fill(r, more[:]); {
	case n > 0:
		return fmt.Errorf("%w: more than the announced %d bytes", blobstore.ErrSizeMismatch, announced)
	case err == io.EOF:
		return nil
	default:
		return err
	}
}

// flush begins to send buf if it is a whole part and the upload goes on behind it. It returns false once a part could
// not be sent.
func (s *session) flush(ctx context.Context) bool {
	if int64(len(s.buf)) < s.partSize() || s.size.Load() == s.cur.Announced {
		return s.failed == nil
	}
	if s.wait(); s.failed != nil {
		return false
	}
	if s.st.memory.wanted() { // by others: one buffer must do
		s.st.memory.give(s.takenNext)
		s.next, s.takenNext = nil, 0
	}
	s.feed.Flush()
	b, taken, crc := s.buf, s.taken, s.crc
	end, err := s.point()
	if err != nil {
		s.failed = err
		return false
	}
	s.buf, s.taken, s.next, s.takenNext, s.crc = s.next[:0], s.takenNext, nil, 0, 0
	s.n++
	done := make(chan error, 1)
	s.sending = done
	go func() {
		err := s.send(context.WithoutCancel(ctx), b, crc, end)
		s.next, s.takenNext = b[:0], taken
		done <- err
	}()
	return true
}

// wait returns when no part is on its way.
func (s *session) wait() {
	if s.sending != nil {
		if err := <-s.sending; s.failed == nil {
			s.failed = err
		}
		s.sending = nil
	}
}

// save makes durable what was received, as far as parts could be sent: the bytes after the last part as a tail, and
// then the state. On return size is what is durable.
func (s *session) save(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx) // what was received is kept also for a client that is gone
	s.wait()
	err := s.failed
	if err == nil {
		err = s.saveTail(ctx)
	}
	// Parts before one that failed are worth keeping.
	if more := s.saveState(ctx); more != nil {
		err = and(err, more)
	}
	s.size.Store(s.saved.Size)
	if err != nil {
		return fmt.Errorf("save what was received: %w", err)
	}
	return nil
}

// saveTail stores the bytes of buf that no tail holds yet.
func (s *session) saveTail(ctx context.Context) error {
	held := s.cur.Size - s.cur.Parted
	if held == int64(len(s.buf)) {
		return nil
	}
	end, err := s.point()
	if err != nil {
		return err
	}
	body := s.buf[held:]
	t := tail{rand.Text(), int64(len(body)), crc32.Checksum(body, castagnoli)}
	if err := s.st.change(ctx); err != nil {
		return err
	}
	if _, err := s.st.b.Put(ctx, s.tailKey(t.Name), body, bucket.Condition{}); err != nil {
		return err
	}
	s.cur.Tails = append(s.cur.Tails, t)
	s.cur.reach(end)
	return nil
}

// stateSize is the size of a midstate.
const stateSize = int64(len(lanes.State{}))

// maxSavedStates is how many bytes of midstates a state has at most, those of 512 GiB, so that it stays a small object.
// A larger upload that goes on in another session has none.
const maxSavedStates = 1 << 20

// point is where an upload was, and what its hash and midstates were there.
type point struct {
	size            int64
	hash, midstates []byte
}

// point returns where the upload is.
func (s *session) point() (p point, err error) {
	first, noted := s.hash.Take()
	for i := range noted {
		if (first-1+int64(i))*stateSize == int64(len(s.noted)) { // else some are missing
			s.noted = append(s.noted, noted[i][:]...)
		}
	}
	p.size, p.midstates = s.size.Load(), s.noted
	p.hash, err = s.hash.MarshalBinary()
	return p, err
}

// reach says that everything up to p is stored.
func (s *state) reach(p point) {
	s.Size, s.Hash, s.Midstates = p.size, p.hash, nil
	if len(p.midstates) <= maxSavedStates {
		s.Midstates = p.midstates
	}
}

// saveState makes uploads/ID say what cur does. blobstore.ErrUploadBusy if another process goes on with the upload.
func (s *session) saveState(ctx context.Context) error {
	if s.etag != "" && s.same() {
		return nil
	}
	if err := s.st.change(ctx); err != nil {
		return err
	}
	s.cur.Writer = s.name
	body, err := seal(s.cur)
	if err != nil {
		return err
	}
	for tries := 0; ; tries++ {
		etag, err := s.st.putIf(ctx, s.st.stateKey(s.id), body, bucket.Condition{Absent: s.etag == "", ETag: s.etag})
		if err == nil {
			before := s.saved.Tails
			s.etag, s.saved = etag, s.cur.clone()
			s.dropTails(ctx, before)
			return nil
		}
		if !errors.Is(err, bucket.ErrConflict) && !errors.Is(err, bucket.ErrAbsent) || tries > 1 {
			return err
		}
		// It may be this session's own, from a try of which the answer was lost.
		found, o, err := s.st.readState(ctx, s.id)
		if err != nil {
			return err
		}
		if found.Writer != s.name {
			return blobstore.ErrUploadBusy
		}
		s.etag = o.ETag
	}
}

// dropTails removes those that the state no longer names, as their bytes are in a part by now. What can't be removed is
// left to Sweep.
func (s *session) dropTails(ctx context.Context, before []tail) {
	for _, t := range before {
		if !slices.Contains(s.saved.Tails, t) && s.st.b.Remove(ctx, s.tailKey(t.Name)) != nil {
			return
		}
	}
}

func (s *session) same() bool {
	a, b := &s.cur, &s.saved
	return a.Size == b.Size && a.Parted == b.Parted && a.Multipart == b.Multipart && a.Target == b.Target &&
		a.Unnamed == b.Unnamed && a.Ended == b.Ended && a.Became == b.Became && len(a.Tails) == len(b.Tails)
}

// drop removes an upload and its bytes. A copy that is shown stays.
func (s *session) drop(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	s.wait()
	if err := s.st.change(ctx); err != nil {
		return err
	}
	if s.ended != nil {
		s.st.setEnded(s.id, nil)
		return s.clear(ctx)
	}
	if err := s.end(ctx); err != nil {
		return err
	}
	if s.cur.Multipart != "" {
		if err := s.st.b.Abort(ctx, s.copyKey(), s.cur.Multipart); err != nil {
			return err
		}
	}
	if err := s.dropCopy(ctx); err != nil {
		return err
	}
	return s.clear(ctx)
}

// end says in uploads/ID that nobody may go on with the upload, so that one that is removed by half is none. A state
// that does not read is as good for that.
func (s *session) end(ctx context.Context) error {
	if s.etag == "" {
		return nil
	}
	s.cur.Ended = true
	return s.saveState(ctx)
}

// dropCopy removes the bytes that were stored for the upload unless they are shown.
func (s *session) dropCopy(ctx context.Context) error {
	if s.cur.Target.IsZero() {
		if s.cur.Unnamed {
			return s.st.b.Remove(ctx, s.copyKey())
		}
		return nil
	}
	shown, err := s.st.bar(ctx, s.cur.Target, s.copyName())
	if err != nil || shown {
		return err
	}
	return s.st.removeCopy(ctx, s.cur.Target, s.copyName(), max(s.size.Load(), s.cur.Announced))
}

// clear removes what is left of an upload that has ended, uploads/ID last. Tails that were put but never noted are left
// to Sweep.
func (s *session) clear(ctx context.Context) error {
	tails := s.cur.Tails
	if len(s.saved.Tails) > len(tails) {
		tails = s.saved.Tails
	}
	if len(tails) > 0 {
		if err := s.end(ctx); err != nil {
			return err
		}
	}
	for _, t := range tails {
		if err := s.st.b.Remove(ctx, s.tailKey(t.Name)); err != nil {
			return err
		}
	}
	return s.st.b.Remove(ctx, s.st.stateKey(s.id))
}

// copyName is the name of the copy that the upload makes.
func (s *session) copyName() string {
	if s.cur.Unnamed {
		return unnamedMark + s.id
	}
	return s.id
}

func (s *session) copyKey() string { return s.st.bytesKey(s.cur.Target, s.copyName()) }
