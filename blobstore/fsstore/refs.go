package fsstore

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"iter"
	"math"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// refLog is refs.log, open. Puts that wait at the same time are written and synced together.
type refLog struct {
	disk    durable.Disk
	f       *durable.File
	salt    []byte
	group   durable.Group
	dropped []blobstore.Dropped // by openLog
	reading bool                // nothing is written

	mu      sync.Mutex // guards queue and end
	queue   []*frame
	end     int64 // everything before it is durable, nothing after it was acknowledged
	damaged error // the log could not be brought back to end after a write that failed; used by flush only
	open    bool  // the last frame is one that no later frame proves; used by flush and close only
}

// emptyPayload is that of a frame without refs.
var emptyPayload = []byte{0}

// frame is a Put that waits.
type frame struct {
	payload []byte
	refs    int
	after   blobstore.Position
	err     error
}

// openLog opens the log at path, and cuts off the end of a write that was never acknowledged.
func openLog(disk durable.Disk, path string, o Options) (*refLog, error) {
	f, err := disk.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%w: it has no %s", blobstore.ErrDamaged, refsName)
	} else if err != nil {
		return nil, err
	}
	l := &refLog{disk: disk, f: f, reading: o.ReadOnly}
	if o.AcceptLoss && !o.ReadOnly {
		err = l.mend()
	}
	if err == nil {
		err = l.recover()
	}
	if err != nil {
		l.f.Close()
		return nil, err
	}
	return l, nil
}

func (l *refLog) recover() error {
	size, err := l.readHeader()
	if err != nil {
		return err
	}
	if l.end, err = l.findEnd(size); err != nil {
		return err
	}
	if l.end < size {
		if err := l.cut(size); err != nil {
			return err
		}
	}
	if l.reading {
		return nil
	}
	return l.f.Sync()
}

// readHeader reads the header and returns the size of the file. blobstore.ErrRefsDamaged if that is damaged, but the
// first frame told what it says.
func (l *refLog) readHeader() (size int64, err error) {
	if size, err = l.f.Size(); err != nil {
		return 0, err
	}
	b := make([]byte, logHeaderSize)
	n, err := l.f.ReadAt(b, 0)
	if err != nil && err != io.EOF {
		return 0, err
	}
	l.salt, err = parseLogHeader(b[:n])
	if !errors.Is(err, blobstore.ErrDamaged) {
		return size, err
	}
	first, readErr := l.firstHead(size)
	if first == nil {
		return size, errors.Join(err, readErr)
	}
	l.salt = findSalt(b, first)
	return size, fmt.Errorf("%w: %s is broken at byte 0, but goes on at byte %d", blobstore.ErrRefsDamaged, refsName,
		logHeaderSize)
}

// firstHead returns the head of the first frame if that is whole, as far as can be said without the salt.
func (l *refLog) firstHead(size int64) ([]byte, error) {
	b := make([]byte, frameHead)
	if size < logHeaderSize+frameHead {
		return nil, nil
	}
	if _, err := l.f.ReadAt(b, logHeaderSize); err != nil {
		return nil, err
	}
	h := decodeHead(b)
	if string(b[:4]) != frameMagic || h.synced != logHeaderSize || h.length > blobstore.MaxRefsBytes ||
		logHeaderSize+h.size() > size {
		return nil, nil
	}
	payload := make([]byte, h.length)
	if _, err := l.f.ReadAt(payload, logHeaderSize+frameHead); err != nil {
		return nil, err
	}
	if _, err := blobstore.DecodeRefs(payload); err != nil || crc32.Checksum(payload, castagnoli) != h.body {
		return nil, nil
	}
	return b, nil
}

// cut drops what is behind the end, and keeps it aside: it may be more than an unfinished write.
func (l *refLog) cut(size int64) error {
	d := blobstore.Dropped{Where: fmt.Sprintf("%s from byte %d on", refsName, l.end), Bytes: size - l.end}
	if l.reading {
		d.Kept = refsName
		l.dropped = append(l.dropped, d)
		return nil
	}
	aside := l.aside("cut")
	err := l.copyAside(aside, size)
	switch full := full(err); {
	case err == nil:
		d.Kept = filepath.Base(aside)
	case !errors.Is(full, blobstore.ErrNoSpace): // it is most likely what found no space
		return err
	}
	l.dropped = append(l.dropped, d)
	return l.f.Truncate(l.end)
}

// aside names a file for what is left out.
func (l *refLog) aside(what string) string {
	return l.f.Name() + "." + what + "-" + time.Now().UTC().Format("20060102T150405.000000000Z")
}

func (l *refLog) copyAside(path string, size int64) error {
	f, err := l.disk.CreateTemp(path, 0o644)
	if err != nil {
		return err
	}
	from := struct{ io.Reader }{io.NewSectionReader(l.f, l.end, size-l.end)}
	if _, err := io.CopyBuffer(struct{ io.Writer }{f}, from, make([]byte, durable.PieceSize)); err != nil {
		return errors.Join(err, f.Discard())
	}
	return f.PublishNew(path)
}

// mend puts a log in the place of this one that has only the frames that can be read, if there is damage.
func (l *refLog) mend() error {
	size, err := l.readHeader()
	if errors.Is(err, blobstore.ErrRefsDamaged) {
		l.dropped = append(l.dropped, blobstore.Dropped{Where: "the header of " + refsName, Bytes: logHeaderSize})
	} else if err != nil {
		return err
	}
	good, err := l.scan(size)
	if err != nil || len(l.dropped) == 0 {
		return err
	}
	path, aside := l.f.Name(), l.aside("damaged")
	for i := range l.dropped {
		l.dropped[i].Kept = filepath.Base(aside)
	}
	f, err := l.disk.CreateTemp(path, 0o644)
	if err != nil {
		return err
	}
	if err := l.rewrite(f, good); err != nil {
		return errors.Join(err, f.Discard())
	}
	if err := l.disk.Link(path, aside); err != nil {
		return errors.Join(err, f.Discard())
	}
	if err := f.Publish(path); err != nil {
		return err
	}
	l.f.Close()
	l.f, err = l.disk.OpenFile(path, os.O_RDWR, 0)
	return err
}

// scan returns where the frames are that can be read, and notes what is between them. An end that reads as nothing is
// for recover, unless there is other damage.
func (l *refLog) scan(size int64) (good []int64, err error) {
	drop := func(from, to int64) {
		where := fmt.Sprintf("%s from byte %d on", refsName, from)
		l.dropped = append(l.dropped, blobstore.Dropped{Where: where, Bytes: to - from})
	}
	for at := int64(logHeaderSize); at < size; {
		r := l.reader(at, size)
		payload, err := r.next()
		if err == nil {
			_, err = blobstore.DecodeRefs(payload)
		} else if !errors.Is(err, blobstore.ErrDamaged) {
			return nil, err
		}
		if err == nil {
			good = append(good, at)
			at = r.offset
			continue
		}
		next, err := l.findHead(at+1, size, func(head) bool { return true })
		if err != nil {
			return nil, err
		}
		if next == 0 {
			if len(l.dropped) > 0 {
				drop(at, size)
			}
			break
		}
		drop(at, next)
		at = next
	}
	return good, nil
}

// rewrite makes f a log with the frames of this one that are at these offsets. It is not synced.
func (l *refLog) rewrite(f *durable.File, good []int64) error {
	w := bufio.NewWriterSize(f, durable.PieceSize)
	w.Write(logHeader(l.salt)) // an error of any Write is that of Flush
	at := int64(logHeaderSize)
	put := func(payload []byte) {
		h := head{length: uint32(len(payload)), synced: at, body: crc32.Checksum(payload, castagnoli)}
		w.Write(h.append(nil, at, l.salt))
		w.Write(payload)
		at += h.size()
	}
	for _, from := range good {
		payload, err := l.reader(from, math.MaxInt64).next()
		if err != nil {
			return err
		}
		put(payload)
	}
	put(emptyPayload) // which proves that those before it were durable
	return w.Flush()
}

// findEnd returns where the last whole frame ends. It reads those frames only that were perhaps never synced, so that it
// takes no longer for a long log: damage in the others shows when they are read.
func (l *refLog) findEnd(size int64) (int64, error) {
	synced, err := l.lastSynced(size)
	if err != nil {
		return 0, err
	}
	end := synced
	b := make([]byte, frameHead)
	for end < size {
		n, err := l.f.ReadAt(b, end)
		if err != nil && err != io.EOF {
			return 0, err
		}
		h, ok := parseHead(b[:n], end, l.salt)
		if !ok || end+h.size() > size {
			break
		}
		synced = max(synced, h.synced)
		end += h.size()
	}
	// A frame that was written after a broken one was synced proves that the broken one is no unfinished write.
	proof, err := l.findHead(end, size, func(h head) bool { return h.synced > end })
	if err != nil {
		return 0, err
	}
	if proof > 0 {
		return 0, fmt.Errorf("%w: %s is broken at byte %d, but goes on at byte %d",
			blobstore.ErrRefsDamaged, refsName, end, proof)
	}
	return l.checkTail(synced, end)
}

// lastSynced returns up to where the log was durable when its last frame of which the head can be read was written.
func (l *refLog) lastSynced(size int64) (int64, error) {
	b := make([]byte, durable.PieceSize)
	for to := size; to > logHeaderSize; {
		from := max(logHeaderSize, to-int64(len(b)))
		n, err := l.f.ReadAt(b[:to-from], from)
		if err != nil && err != io.EOF {
			return 0, err
		}
		for i := n; ; {
			i = bytes.LastIndex(b[:i], []byte(frameMagic))
			if i < 0 {
				break
			}
			if h, ok := parseHead(b[i:n], from+int64(i), l.salt); ok {
				return h.synced, nil
			}
		}
		if from == logHeaderSize {
			break
		}
		to = from + frameHead
	}
	return logHeaderSize, nil
}

// checkTail reads the frames from one offset to another and returns where the last whole one ends.
func (l *refLog) checkTail(from, to int64) (int64, error) {
	r := l.reader(from, to)
	for {
		payload, err := r.next()
		switch {
		case err == io.EOF, errors.Is(err, blobstore.ErrDamaged):
			return r.offset, nil
		case err != nil:
			return 0, err
		}
		l.open = !bytes.Equal(payload, emptyPayload)
	}
}

// findHead looks from an offset on for the head of a frame that will do, and returns where it is, or 0.
func (l *refLog) findHead(from, size int64, will func(h head) bool) (int64, error) {
	b := make([]byte, durable.PieceSize)
	for at := from; at < size; at += int64(len(b)) - frameHead {
		n, err := l.f.ReadAt(b, at)
		if err != nil && err != io.EOF {
			return 0, err
		}
		for i := 0; ; i++ {
			next := bytes.Index(b[i:n], []byte(frameMagic))
			if next < 0 {
				break
			}
			i += next
			if h, ok := parseHead(b[i:n], at+int64(i), l.salt); ok && will(h) {
				return at + int64(i), nil
			}
		}
	}
	return 0, nil
}

func (l *refLog) put(ctx context.Context, refs []blobstore.Ref) (blobstore.Position, error) {
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("put refs: %w", err)
	}
	payload, err := blobstore.EncodeRefs(refs)
	if err != nil {
		return 0, fmt.Errorf("put refs: %w", err)
	}
	f := &frame{payload: payload, refs: len(refs)}
	l.mu.Lock()
	l.queue = append(l.queue, f)
	l.mu.Unlock()
	l.group.Do(l.flush)
	if f.err != nil {
		return 0, fmt.Errorf("put refs: %w", full(f.err))
	}
	return f.after, nil
}

// flush writes and syncs what waits, in batches of bounded size. Each frame gets its own verdict.
func (l *refLog) flush() error {
	l.mu.Lock()
	queue := l.queue
	l.queue = nil
	l.mu.Unlock()
	for len(queue) > 0 {
		n, size := 0, 0
		for n < len(queue) && (n == 0 || size+len(queue[n].payload) <= blobstore.MaxRefsBytes) {
			size += frameHead + len(queue[n].payload)
			n++
		}
		err := l.write(queue[:n], size)
		for _, f := range queue[:n] {
			f.err = err
		}
		queue = queue[n:]
	}
	return nil
}

// write makes frames durable. If it fails, the log goes back to where it was; while that fails too, nothing is written.
func (l *refLog) write(frames []*frame, size int) error {
	if l.damaged != nil {
		if err := l.rewind(); err != nil {
			return fmt.Errorf("%s can't be written since an earlier failure: %w", refsName, err)
		}
	}
	b := make([]byte, 0, size)
	for _, f := range frames {
		h := head{length: uint32(len(f.payload)), synced: l.end, body: crc32.Checksum(f.payload, castagnoli)}
		b = append(h.append(b, l.end+int64(len(b)), l.salt), f.payload...)
		f.after = positionAt(l.end+int64(len(b)), 0)
	}
	_, err := l.f.WriteAt(b, l.end)
	if err == nil {
		err = l.f.Sync()
	}
	if err != nil {
		l.damaged = err
		return errors.Join(err, l.rewind())
	}
	l.mu.Lock()
	l.end += int64(len(b))
	l.mu.Unlock()
	l.open = frames[len(frames)-1].refs > 0
	return nil
}

// rewind drops what a failed write may have left. What is before end was synced earlier and is not touched.
func (l *refLog) rewind() error {
	if err := l.f.Truncate(l.end); err != nil {
		return err
	}
	if err := l.f.Sync(); err != nil {
		return err
	}
	l.damaged = nil
	return nil
}

// close ends the log with an empty frame, which proves that the frames before it were durable.
func (l *refLog) close() error {
	var err error
	if l.open && !l.reading {
		_, err = l.put(context.Background(), nil)
	}
	return errors.Join(err, l.f.Close())
}

// Since implements blobstore.Refs. It yields what was durable when the iteration began.
func (st *Store) Since(ctx context.Context, after blobstore.Position) iter.Seq2[blobstore.PlacedRef, error] {
	return func(yield func(blobstore.PlacedRef, error) bool) {
		err := st.refs.since(ctx, after, func(r blobstore.PlacedRef) bool { return yield(r, nil) })
		if err != nil {
			yield(blobstore.PlacedRef{}, fmt.Errorf("read refs: %w", err))
		}
	}
}

func (l *refLog) since(ctx context.Context, after blobstore.Position, yield func(blobstore.PlacedRef) bool) error {
	l.mu.Lock()
	end := l.end
	l.mu.Unlock()
	offset, skip := splitPosition(after)
	if after == 0 {
		offset = logHeaderSize
	}
	if offset < logHeaderSize || offset > end {
		return l.endsBefore(offset, end)
	}
	r := l.reader(offset, end)
	for ; ctx.Err() == nil; skip = 0 {
		start := r.offset
		payload, err := r.next()
		if err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		refs, err := blobstore.DecodeRefs(payload)
		if err != nil {
			return fmt.Errorf("%w: %s at byte %d: %w", blobstore.ErrRefsDamaged, refsName, start, err)
		}
		for i := skip; i < len(refs); i++ {
			p := positionAt(start, i+1)
			if i+1 == len(refs) {
				p = positionAt(r.offset, 0)
			}
			if !yield(blobstore.PlacedRef{Ref: refs[i], After: p}) {
				return nil
			}
		}
	}
	return ctx.Err()
}

// endsBefore is the error for a position that the log does not have.
func (l *refLog) endsBefore(offset, end int64) error {
	text := "it was cut, or the position is not of this store"
	if len(l.dropped) > 0 {
		text += "; " + l.dropped[len(l.dropped)-1].String()
	}
	return fmt.Errorf("%w: %s ends at byte %d, asked for was byte %d: %s", blobstore.ErrRefsDamaged, refsName, end, offset,
		text)
}

// logReader reads frame after frame.
type logReader struct {
	l      *refLog
	b      *bufio.Reader
	offset int64
	end    int64
}

func (l *refLog) reader(from, to int64) *logReader {
	return &logReader{l, bufio.NewReaderSize(io.NewSectionReader(l.f, from, to-from), durable.PieceSize), from, to}
}

// next returns the payload of the next frame, io.EOF at the end, and an error that is ErrDamaged for what is no frame.
// After an error offset is where that frame begins.
func (r *logReader) next() ([]byte, error) {
	if r.offset >= r.end {
		return nil, io.EOF
	}
	payload, err := r.frame()
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = fmt.Errorf("%w: it ends in the middle of a frame", blobstore.ErrRefsDamaged)
	}
	if err != nil {
		return nil, fmt.Errorf("%s at byte %d: %w", refsName, r.offset, err)
	}
	r.offset += frameHead + int64(len(payload))
	return payload, nil
}

func (r *logReader) frame() ([]byte, error) {
	var b [frameHead]byte
	if _, err := io.ReadFull(r.b, b[:]); err != nil {
		return nil, err
	}
	h, ok := parseHead(b[:], r.offset, r.l.salt)
	if !ok {
		return nil, fmt.Errorf("%w: no frame begins here", blobstore.ErrRefsDamaged)
	}
	payload := make([]byte, h.length)
	if _, err := io.ReadFull(r.b, payload); err != nil {
		return nil, err
	}
	if crc32.Checksum(payload, castagnoli) != h.body {
		return nil, fmt.Errorf("%w: checksum does not match", blobstore.ErrRefsDamaged)
	}
	return payload, nil
}
