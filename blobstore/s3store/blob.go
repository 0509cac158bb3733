package s3store

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"iter"
	"path"
	"strings"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store/bucket"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
)

const (
	blobsName   = "blobs"
	unnamedName = "unnamed"
	liveName    = "live"
)

// A copy is named by the upload that made it. One that was begun before its digest was known lies under unnamed/ID, and
// its name has this before the ID; beside the marker it has a stub then, so that a listing shows it.
const unnamedMark = "u"

// live is what the marker of a blob says that is shown. A marker is never deleted, as that could hit one that was put
// meanwhile: that none is shown, it says by hiddenSize random letters. No two markers are the same, so that a request
// that comes late never finds the one that it was to replace.
type live struct {
	Copy string `json:"copy"`
	Size int64  `json:"size"`
	Salt string `json:"salt"` // random
}

// hiddenSize is less than any marker has that shows a copy, and so can be told in a listing.
const hiddenSize = 26 // of rand.Text

func (st *Store) blobKey(d identity.Digest, name string) string {
	return st.b.Key(blobsName, d.Hex(), name)
}

// bytesKey returns where the bytes of a copy are.
func (st *Store) bytesKey(d identity.Digest, name string) string {
	if id, ok := strings.CutPrefix(name, unnamedMark); ok {
		return st.b.Key(unnamedName, id)
	}
	return st.blobKey(d, name)
}

// keyCopy returns the upload whose bytes are at key.
func keyCopy(key string) string { return path.Base(key) }

// readLive reads the marker of a blob. The copy is empty if none is shown. bucket.ErrAbsent if there never was one;
// with blobstore.ErrDamaged the object is returned as it is.
func (st *Store) readLive(ctx context.Context, d identity.Digest) (l live, o bucket.Object, err error) {
	o, err = st.b.Get(ctx, st.blobKey(d, liveName), smallObject, func(body []byte) error {
		l = live{}
		if hidden := len(body) == hiddenSize && validID(string(body)); hidden {
			return nil
		}
		if unseal(body, &l) != nil || !validCopy(l.Copy) || l.Size < 0 {
			return fmt.Errorf("%w: marker of blob %s is not what this program writes", blobstore.ErrDamaged, d)
		}
		return nil
	})
	if err != nil {
		l = live{}
	}
	return l, o, err
}

func validCopy(name string) bool { return validID(strings.TrimPrefix(name, unnamedMark)) }

// Stat implements blobstore.Store.
func (st *Store) Stat(ctx context.Context, d identity.Digest) (blobstore.Info, error) {
	l, o, err := st.readLive(ctx, d)
	if errors.Is(err, bucket.ErrAbsent) || err == nil && l.Copy == "" {
		err = blobstore.ErrNotFound
		if _, ok := st.asideOf(d); ok {
			err = blobstore.ErrQuarantined
		}
	}
	if err != nil {
		return blobstore.Info{}, fmt.Errorf("stat blob %s: %w", d, err)
	}
	return blobstore.Info{Digest: d, Size: l.Size, Created: o.Modified, Generation: l.Copy}, nil
}

// Open implements blobstore.Store. The reader ends at the end of the blob also when n goes past it; it is an error if
// off does. An answer of the server that breaks off is gone on with by another request.
func (st *Store) Open(ctx context.Context, i blobstore.Info, off, n int64) (io.ReadCloser, error) {
	r, err := st.openRange(ctx, i, off, n)
	if errors.Is(err, bucket.ErrAbsent) {
		err = blobstore.ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("open blob %s: %w", i.Digest, err)
	}
	return r, nil
}

func (st *Store) openRange(ctx context.Context, i blobstore.Info, off, n int64) (*reader, error) {
	if err := st.shows(ctx, i); err != nil {
		return nil, err
	}
	if off < 0 || off > i.Size {
		return nil, fmt.Errorf("offset %d is outside of its %d bytes", off, i.Size)
	}
	if n < 0 || n > i.Size-off {
		n = i.Size - off
	}
	r := &reader{st: st, ctx: ctx, key: st.bytesKey(i.Digest, i.Generation), size: i.Size, at: off, end: off + n}
	if n == 0 {
		return r, nil
	}
	return r, r.request()
}

// reader reads a range of an object.
type reader struct {
	st      *Store
	ctx     context.Context
	key     string
	size    int64 // of the object
	at, end int64
	body    io.ReadCloser
	tries   int // since the last byte
}

// request asks for what is left.
func (r *reader) request() error {
	body, size, err := r.st.b.Range(r.ctx, r.key, r.at, r.end-r.at)
	if err != nil {
		return err
	}
	if size != r.end-r.at {
		body.Close()
		return fmt.Errorf("%w: %s gave %d bytes of %d", blobstore.ErrDamaged, r.key, size, r.end-r.at)
	}
	r.body = body
	return nil
}

func (r *reader) Read(b []byte) (n int, err error) {
	for n == 0 && len(b) > 0 {
		if r.at == r.end {
			return 0, io.EOF
		}
		if r.body == nil {
			if err := r.request(); err != nil {
				return 0, fmt.Errorf("read blob: %w", err)
			}
		}
		n, err = r.body.Read(b[:min(int64(len(b)), r.end-r.at)])
		r.at += int64(n)
		if n > 0 {
			r.tries = 0
		}
		if err == nil || r.at == r.end {
			continue
		}
		// The answer ended before the range did.
		r.Close()
		if r.tries++; r.tries >= bucket.Attempts {
			return n, fmt.Errorf("%w: read blob: %s broke off at byte %d of %d: %w",
				blobstore.ErrUnavailable, r.key, r.at, r.size, err)
		}
		if err := r.st.b.Pause(r.ctx, r.tries); err != nil {
			return n, err
		}
	}
	return n, nil
}

// WriteTo implements io.WriterTo.
func (r *reader) WriteTo(w io.Writer) (written int64, err error) {
	piece := r.st.pieces.Get().(*[pieceSize]byte)
	defer r.st.pieces.Put(piece)
	return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, piece[:])
}

func (r *reader) Close() error {
	if r.body == nil {
		return nil
	}
	err := r.body.Close()
	r.body = nil
	return err
}

// Delete implements blobstore.Store. The copy is hidden first and its bytes go then; if that fails, asking again for
// the same copy finds them.
func (st *Store) Delete(ctx context.Context, i blobstore.Info) error {
	if err := st.delete(ctx, i); err != nil {
		return fmt.Errorf("delete blob %s, copy %.80q: %w", i.Digest, i.Generation, err)
	}
	return nil
}

func (st *Store) delete(ctx context.Context, i blobstore.Info) error {
	if !validCopy(i.Generation) {
		return blobstore.ErrNotFound
	}
	if err := st.change(ctx); err != nil {
		return err
	}
	if err := st.dropReceipt(ctx, i); err != nil {
		return err
	}
	hidden, err := st.hide(ctx, i)
	if err != nil {
		return err
	}
	if n, ok := st.asideOf(i.Digest); ok && n.Copy == i.Generation {
		return st.release(ctx, i.Digest)
	}
	if err := st.removeCopy(ctx, i.Digest, i.Generation, i.Size); err != nil {
		return err
	}
	if !hidden {
		return blobstore.ErrNotFound
	}
	return nil
}

// dropReceipt removes what is left of the upload that made a copy, which must not become the same copy another time.
func (st *Store) dropReceipt(ctx context.Context, i blobstore.Info) error {
	id := strings.TrimPrefix(i.Generation, unnamedMark)
	if err := st.b.Remove(ctx, st.stateKey(id)); err != nil {
		return err
	}
	st.setEnded(id, nil)
	return nil
}

// hide makes the marker show nothing if it shows this copy.
func (st *Store) hide(ctx context.Context, i blobstore.Info) (hidden bool, err error) {
	defer st.ordered()()
	body := rand.Text()
	for tries := 0; ; tries++ {
		l, o, err := st.readLive(ctx, i.Digest)
		if errors.Is(err, bucket.ErrAbsent) || err == nil && l.Copy != i.Generation {
			return string(o.Body) == body, nil
		} else if err != nil {
			return false, err
		}
		// Asked again with the marker at hand: an owner that lost the store meanwhile must not hide what the new one relies
		// on.
		if err := st.change(ctx); err != nil {
			return false, err
		}
		_, err = st.putIf(ctx, st.blobKey(i.Digest, liveName), []byte(body), bucket.Condition{ETag: o.ETag})
		if err == nil || !errors.Is(err, bucket.ErrConflict) || tries >= bucket.Attempts {
			return err == nil, err
		}
		if err := st.stillOwner(ctx); err != nil {
			return false, err
		}
		if err := st.b.Pause(ctx, tries); err != nil {
			return false, err
		}
	}
}

// bar sees to it that a copy which is not shown never will be, also if a marker that shows it is still on its way: it
// replaces the marker that this one was to replace.
func (st *Store) bar(ctx context.Context, d identity.Digest, copy string) (shown bool, err error) {
	if _, err := st.b.Head(ctx, st.bytesKey(d, copy)); err != nil {
		if errors.Is(err, bucket.ErrAbsent) {
			err = nil // bytes are there before any marker is sent
		}
		return false, err
	}
	defer st.ordered()()
	for tries := 0; ; tries++ {
		l, o, err := st.readLive(ctx, d)
		only := bucket.Condition{ETag: o.ETag}
		switch {
		case errors.Is(err, bucket.ErrAbsent):
			only = bucket.Condition{Absent: true}
		case err != nil:
			return false, err
		case l.Copy != "":
			return l.Copy == copy, nil
		}
		_, err = st.putIf(ctx, st.blobKey(d, liveName), []byte(rand.Text()), only)
		if !errors.Is(err, bucket.ErrConflict) || tries >= bucket.Attempts {
			return false, err
		}
		if err := st.b.Pause(ctx, tries); err != nil {
			return false, err
		}
	}
}

// removeCopy removes the bytes of a copy that is not shown, and midstates if a copy of that size may have any.
func (st *Store) removeCopy(ctx context.Context, d identity.Digest, name string, size int64) (err error) {
	if lanes.Edges(size, st.segment) > 0 {
		err = st.b.Remove(ctx, st.blobKey(d, name+midstatesMark))
	}
	err = and(err, st.b.Remove(ctx, st.bytesKey(d, name)))
	if strings.HasPrefix(name, unnamedMark) {
		err = and(err, st.b.Remove(ctx, st.blobKey(d, name)))
	}
	return err
}

// midstatesMark is what the name of a copy's midstates has after that of the copy. They are put before the copy is shown,
// and without any condition: all that can be right are the same.
const midstatesMark = ".midstates"

// putMidstates stores those of the upload, if all were recorded, for its copy. The copy can do without.
func (s *session) putMidstates(ctx context.Context, d identity.Digest) {
	end, err := s.point()
	if err != nil {
		return
	}
	if form, err := blobstore.FormMidstates(end.midstates, d, end.size, s.st.segment); err == nil && form != nil {
		_, _ = s.st.b.Put(ctx, s.st.blobKey(d, s.copyName()+midstatesMark), form, bucket.Condition{})
	}
}

// copyOf describes the copy that i names. blobstore.ErrNotFound also if another one is shown.
func (st *Store) copyOf(ctx context.Context, i blobstore.Info) (blobstore.Info, error) {
	now, err := st.Stat(ctx, i.Digest)
	if err == nil && now.Generation != i.Generation {
		err = blobstore.ErrNotFound
	}
	return now, err
}

// Segments implements blobstore.Segments. A copy has none if it was stored by a program that knew nothing of midstates,
// if the server didn't take them, or if it is larger than 512 GiB and came in several requests.
func (st *Store) Segments(ctx context.Context, i blobstore.Info) ([]byte, error) {
	now, err := st.copyOf(ctx, i)
	var o bucket.Object
	if err == nil {
		o, err = st.b.Get(ctx, st.blobKey(i.Digest, i.Generation+midstatesMark), int64(lanes.MaxBytes), func(form []byte) error {
			return blobstore.FitMidstates(form, now, st.segment)
		})
	}
	if errors.Is(err, bucket.ErrAbsent) {
		err = blobstore.ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("midstates of blob %s, copy %.80q: %w", i.Digest, i.Generation, err)
	}
	return o.Body, nil
}

// KeepSegments implements blobstore.Segments. What it puts of a copy that is removed meanwhile is left to Sweep.
func (st *Store) KeepSegments(ctx context.Context, i blobstore.Info, form []byte) error {
	err := st.change(ctx)
	if err == nil {
		i, err = st.copyOf(ctx, i)
	}
	if err == nil {
		err = blobstore.FitMidstates(form, i, st.segment)
	}
	if err == nil {
		_, err = st.b.Put(ctx, st.blobKey(i.Digest, i.Generation+midstatesMark), form, bucket.Condition{})
	}
	if err != nil {
		return fmt.Errorf("keep midstates of blob %s, copy %.80q: %w", i.Digest, i.Generation, err)
	}
	return nil
}

// ordered stands in for conditional writes, within this process, where the server has none.
func (st *Store) ordered() (done func()) {
	if st.conditional {
		return func() {}
	}
	st.serial.Lock()
	return st.serial.Unlock
}

// putIf is put under a condition, if the server knows any.
func (st *Store) putIf(ctx context.Context, key string, body []byte, only bucket.Condition) (etag string, err error) {
	if !st.conditional {
		only = bucket.Condition{}
	}
	return st.b.Put(ctx, key, body, only)
}

// publish shows a copy of d whose bytes are stored and verified, unless another one is shown already, and returns what
// is shown then. It is durable.
func (st *Store) publish(ctx context.Context, d identity.Digest, copy string, size int64) (blobstore.Info, error) {
	defer st.ordered()()
	show, only := live{Copy: copy, Size: size}, bucket.Condition{Absent: true} // as it is for nearly all blobs
	for tries := 0; ; tries++ {
		var err error
		if tries > 0 || !st.conditional {
			show, only, err = st.vacancy(ctx, d, live{Copy: copy, Size: size})
		}
		if err == nil && only != (bucket.Condition{}) {
			err = st.show(ctx, d, show, only)
		}
		if err == nil {
			err = st.release(ctx, d)
		}
		if err == nil {
			return st.Stat(ctx, d)
		}
		if !errors.Is(err, bucket.ErrConflict) || tries >= bucket.Attempts {
			return blobstore.Info{}, err
		}
		if err := st.b.Pause(ctx, tries); err != nil {
			return blobstore.Info{}, err
		}
	}
}

// rely describes a blob that is shown and whose bytes are there, and puts its marker anew, so that whoever was about to
// hide it finds that somebody relies on it.
func (st *Store) rely(ctx context.Context, d identity.Digest) (i blobstore.Info, err error) {
	if err := st.change(ctx); err != nil {
		return i, err
	}
	defer st.ordered()()
	for tries := 0; ; tries++ {
		show, only, err := st.vacancy(ctx, d, live{})
		if err == nil && show.Copy == "" {
			err = blobstore.ErrNotFound
		}
		if err == nil {
			err = st.show(ctx, d, show, only)
		}
		if err == nil {
			return st.Stat(ctx, d)
		}
		if !errors.Is(err, bucket.ErrConflict) || tries >= bucket.Attempts {
			return i, err
		}
		if err := st.b.Pause(ctx, tries); err != nil {
			return i, err
		}
	}
}

// show puts a marker.
func (st *Store) show(ctx context.Context, d identity.Digest, l live, only bucket.Condition) error {
	l.Salt = rand.Text()
	body, err := seal(l)
	if err != nil {
		return err
	}
	_, err = st.putIf(ctx, st.blobKey(d, liveName), body, only)
	return err
}

// vacancy returns what a marker is to show, mine or another copy that is shown already and whose bytes are there, and
// the condition under which it may be put. A marker is put anew also for the other copy, so that whoever was about to
// hide it finds that somebody relies on it. The zero condition means that the marker shows mine.
func (st *Store) vacancy(
	ctx context.Context, d identity.Digest, mine live,
) (show live, only bucket.Condition, err error) {
	l, o, err := st.readLive(ctx, d)
	switch {
	case errors.Is(err, bucket.ErrAbsent):
		return mine, bucket.Condition{Absent: true}, nil
	case err != nil && !errors.Is(err, blobstore.ErrDamaged):
		return mine, only, err
	case l.Copy == mine.Copy:
		return mine, only, nil
	}
	only.ETag = o.ETag
	if n, ok := st.asideOf(d); l.Copy == "" || ok && n.Copy == l.Copy { // hidden, or about to be
		return mine, only, nil
	}
	i, err := st.b.Head(ctx, st.bytesKey(d, l.Copy))
	switch {
	case err == nil && i.Size == l.Size:
		return l, only, nil
	case err != nil && !errors.Is(err, bucket.ErrAbsent):
		return mine, bucket.Condition{}, err
	}
	return mine, only, nil
}

// List implements blobstore.Store. A page of the server's listing holds some 500 blobs; a blob of which several copies
// are there, or one whose name was not known in time, takes another request.
func (st *Store) List(ctx context.Context, after identity.Digest) iter.Seq2[blobstore.Info, error] {
	return func(yield func(blobstore.Info, error) bool) {
		start := ""
		if !after.IsZero() {
			start = after.Hex()
		}
		err := st.groups(ctx, start, func(g group) (more bool, err error) {
			i, err := st.describe(ctx, g)
			if errors.Is(err, blobstore.ErrNotFound) {
				return true, nil
			} else if err != nil {
				return false, err
			}
			return yield(i, nil), nil
		})
		if err != nil {
			yield(blobstore.Info{}, fmt.Errorf("list blobs: %w", err))
		}
	}
}

// describe returns what List yields of a group, or blobstore.ErrNotFound.
func (st *Store) describe(ctx context.Context, g group) (i blobstore.Info, err error) {
	if g.marker.Key == "" || g.marker.Size == hiddenSize {
		return i, blobstore.ErrNotFound
	}
	if g.shown() && len(g.copies) == 1 && !strings.HasPrefix(keyCopy(g.copies[0].Key), unnamedMark) {
		o := g.copies[0]
		return blobstore.Info{
			Digest: g.digest, Size: o.Size, Created: g.marker.Modified, Generation: keyCopy(o.Key),
		}, nil
	}
	return st.Stat(ctx, g.digest)
}

// group is what a listing says about one blob.
type group struct {
	digest identity.Digest
	marker bucket.Entry // zero if there is none
	copies []bucket.Entry
	states []bucket.Entry // midstates of copies
}

// shown says whether one of the copies is.
func (g *group) shown() bool { return g.marker.Size > hiddenSize }

func (g *group) add(name string, o bucket.Entry) {
	switch {
	case name == liveName:
		g.marker = o
	case validCopy(name):
		g.copies = append(g.copies, o)
	case strings.HasSuffix(name, midstatesMark) && validCopy(strings.TrimSuffix(name, midstatesMark)):
		g.states = append(g.states, o)
	}
}

// groups calls fn with what there is of each blob whose digest in hexadecimal comes after another, in ascending order.
func (st *Store) groups(ctx context.Context, after string, fn func(g group) (more bool, err error)) error {
	prefix := st.b.Key(blobsName) + "/"
	start := ""
	if after != "" {
		start = prefix + after + "/~" // behind every key of that blob
	}
	var g group
	for o, err := range st.b.List(ctx, prefix, start, 0) {
		if err != nil {
			return err
		}
		hex, name, _ := strings.Cut(strings.TrimPrefix(o.Key, prefix), "/")
		d, err := identity.ParseDigest("sha256:" + hex)
		if err != nil {
			continue // not of a blob
		}
		if d != g.digest {
			if more, err := fn(g); err != nil || !more {
				return err
			}
			g = group{digest: d}
		}
		g.add(name, o)
	}
	_, err := fn(g)
	return err
}
