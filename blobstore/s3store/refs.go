package s3store

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"iter"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store/bucket"
)

// refs/NUMBER are objects numbered from 1 on without a gap, NUMBER in 16 hexadecimal digits. Each is put only where
// none is, so that of all processes one gets each number, and holds the refs of one Put or of several that waited
// together:
//
//	"KILNREF1" writer:26 crc:4 refs          refs in the form of blobstore.EncodeRefs
//
// writer names the try that put the object. crc is the CRC-32C, little-endian, of NUMBER's 8 bytes, the writer and the
// refs, so that an object can't pass for another one.
const (
	refsName  = "refs"
	lostName  = "lost"
	refsMagic = "KILNREF1"
	refsHead  = len(refsMagic) + writerLen + 4
	writerLen = 26 // of rand.Text
)

// A Position is the number of an object and, in its low bits, how many of the object's refs come before it.
const refBits = 12 // which blobstore.MaxRefs fits into

func positionAt(number uint64, refs int) blobstore.Position {
	return blobstore.Position(number<<refBits | uint64(refs))
}

func splitPosition(p blobstore.Position) (number uint64, refs int) {
	return max(1, uint64(p)>>refBits), int(p & blobstore.MaxRefs)
}

// refLog is where the refs end. Puts that wait at the same time go into one object.
type refLog struct {
	mu      sync.Mutex // guards waiting
	waiting []*batch

	writing sync.Mutex // held by the one who puts
	next    uint64     // the number of the next object as far as this process knows; 0: not known
}

// batch is a Put that waits.
type batch struct {
	refs  []blobstore.Ref
	size  int
	after blobstore.Position
	err   error
	done  bool // guarded by refLog.writing
}

func (st *Store) refsKey(number uint64) string {
	return st.b.Key(refsName, fmt.Sprintf("%016x", number))
}

// Put implements blobstore.Refs.
func (st *Store) Put(ctx context.Context, refs ...blobstore.Ref) (blobstore.Position, error) {
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("put refs: %w", err)
	}
	b, err := blobstore.EncodeRefs(refs)
	if err != nil {
		return 0, fmt.Errorf("put refs: %w", err)
	}
	w := &batch{refs: refs, size: len(b)}
	st.log.mu.Lock()
	st.log.waiting = append(st.log.waiting, w)
	st.log.mu.Unlock()

	st.log.writing.Lock()
	defer st.log.writing.Unlock()
	if !w.done {
		st.putWaiting(context.WithoutCancel(ctx))
	}
	if w.err != nil {
		return 0, fmt.Errorf("put refs: %w", w.err)
	}
	return w.after, nil
}

// putWaiting keeps everything that waits, in objects of bounded size. Each batch gets its own verdict.
func (st *Store) putWaiting(ctx context.Context) {
	st.log.mu.Lock()
	waiting := st.log.waiting
	st.log.waiting = nil
	st.log.mu.Unlock()
	for len(waiting) > 0 {
		n, count, size := 0, 0, 0
		for n < len(waiting) && (n == 0 || count+len(waiting[n].refs) <= blobstore.MaxRefs &&
			size+waiting[n].size <= blobstore.MaxRefsBytes) {
			count += len(waiting[n].refs)
			size += waiting[n].size
			n++
		}
		st.putTogether(ctx, waiting[:n])
		waiting = waiting[n:]
	}
}

func (st *Store) putTogether(ctx context.Context, together []*batch) {
	var refs []blobstore.Ref
	for _, b := range together {
		refs = append(refs, b.refs...)
	}
	number, err := st.putObject(ctx, refs)
	before := 0
	for _, b := range together {
		b.err, b.done = err, true
		before += len(b.refs)
		b.after = positionAt(number, before)
		if before == len(refs) {
			b.after = positionAt(number+1, 0)
		}
	}
}

// putObject puts refs at the first free number.
func (st *Store) putObject(ctx context.Context, refs []blobstore.Ref) (number uint64, err error) {
	payload, err := blobstore.EncodeRefs(refs)
	if err != nil {
		return 0, err
	}
	if err := st.change(ctx); err != nil {
		return 0, err
	}
	if err := st.findEnd(ctx); err != nil {
		return 0, err
	}
	writer := rand.Text()
	for {
		number = st.log.next
		err := st.putRefs(ctx, number, writer, payload)
		if errors.Is(err, bucket.ErrConflict) {
			// Taken: by this try, of which the answer was lost, or by another one.
			var found string
			if found, _, err = st.readRefs(ctx, number); err == nil && found != writer {
				st.log.next++
				err = st.stillOwner(ctx)
				if err == nil {
					continue
				}
			}
		}
		if err != nil {
			return 0, err
		}
		st.log.next++
		return number, nil
	}
}

// stillOwner is asked when something turns up that another try put: the owner of a store can only have put it itself.
func (st *Store) stillOwner(ctx context.Context) error {
	if st.owner == nil {
		return nil
	}
	_, err := st.owner.verify(ctx)
	return err
}

func (st *Store) putRefs(ctx context.Context, number uint64, writer string, payload []byte) error {
	if !st.conditional {
		switch _, err := st.b.Head(ctx, st.refsKey(number)); {
		case err == nil:
			return bucket.ErrConflict
		case !errors.Is(err, bucket.ErrAbsent):
			return err
		}
	}
	_, err := st.putIf(ctx, st.refsKey(number), refsObject(number, writer, payload), bucket.Condition{Absent: true})
	return err
}

func refsObject(number uint64, writer string, payload []byte) []byte {
	body := append(make([]byte, 0, refsHead+len(payload)), refsMagic...)
	body = append(body, writer...)
	body = binary.LittleEndian.AppendUint32(body, refsSum(number, writer, payload))
	return append(body, payload...)
}

func refsSum(number uint64, writer string, payload []byte) uint32 {
	crc := crc32.Checksum(binary.BigEndian.AppendUint64(nil, number), castagnoli)
	crc = crc32.Update(crc, castagnoli, []byte(writer))
	return crc32.Update(crc, castagnoli, payload)
}

// readRefs returns who put an object, and its refs. blobstore.ErrRefsDamaged if it does not read as it was put.
func (st *Store) readRefs(ctx context.Context, number uint64) (writer string, refs []blobstore.Ref, err error) {
	writer, refs, _, err = st.getRefs(ctx, number)
	return writer, refs, err
}

// getRefs is readRefs, and returns the object, also if it is damaged.
func (st *Store) getRefs(
	ctx context.Context, number uint64,
) (writer string, refs []blobstore.Ref, o bucket.Object, err error) {
	o, err = st.b.Get(ctx, st.refsKey(number), int64(refsHead+2*blobstore.MaxRefsBytes), func(body []byte) error {
		if writer, refs, err = decodeRefs(number, body); err != nil {
			return fmt.Errorf("%w: %s: %w", blobstore.ErrRefsDamaged, st.refsKey(number), err)
		}
		return nil
	})
	if errors.Is(err, bucket.ErrAbsent) {
		err = fmt.Errorf("%w: %s is not there", blobstore.ErrRefsDamaged, st.refsKey(number))
	}
	return writer, refs, o, err
}

// maxMissing is how many objects of the log may be missing one after another for mend to go on: a key that stands far
// behind the others is none of the log.
const maxMissing = 10_000

// mend makes the log one that reads to its end.
func (st *Store) mend(ctx context.Context) error {
	prefix, expect := st.b.Key(refsName)+"/", uint64(1)
	for o, err := range st.b.List(ctx, prefix, "", 0) {
		if err != nil {
			return err
		}
		number, err := strconv.ParseUint(strings.TrimPrefix(o.Key, prefix), 16, 64)
		if err != nil || st.refsKey(number) != o.Key {
			continue // not of the log
		}
		if number-expect > maxMissing {
			return fmt.Errorf("%w: %d objects before %s are not there: too many to go on without",
				blobstore.ErrRefsDamaged, number-expect, o.Key)
		}
		for ; expect <= number; expect++ {
			if err := st.mendObject(ctx, expect); err != nil {
				return err
			}
		}
	}
	return nil
}

// mendObject puts an object without refs in the place of one that is not there or does not read, whose bytes are kept.
func (st *Store) mendObject(ctx context.Context, number uint64) error {
	_, _, o, err := st.getRefs(ctx, number)
	if err == nil || !errors.Is(err, blobstore.ErrDamaged) {
		return err
	}
	writer := rand.Text()
	d := blobstore.Dropped{Where: st.refsKey(number), Bytes: int64(len(o.Body))}
	only := bucket.Condition{Absent: true}
	if o.ETag != "" {
		only = bucket.Condition{ETag: o.ETag}
		d.Kept = st.b.Key(lostName, fmt.Sprintf("%016x-%s", number, writer))
		if _, err := st.b.Put(ctx, d.Kept, o.Body, bucket.Condition{}); err != nil {
			return err
		}
	}
	payload, err := blobstore.EncodeRefs(nil)
	if err != nil {
		return err
	}
	if _, err = st.putIf(ctx, st.refsKey(number), refsObject(number, writer, payload), only); err != nil {
		return err
	}
	st.dropped = append(st.dropped, d)
	st.notify(d.String())
	return nil
}

// Dropped implements blobstore.Losses.
func (st *Store) Dropped() []blobstore.Dropped { return slices.Clone(st.dropped) }

func decodeRefs(number uint64, body []byte) (writer string, refs []blobstore.Ref, err error) {
	head, ok := bytes.CutPrefix(body, []byte(refsMagic))
	if !ok || len(body) < refsHead {
		return "", nil, errors.New("not what this program writes")
	}
	writer, payload := string(head[:writerLen]), head[writerLen+4:]
	if binary.LittleEndian.Uint32(head[writerLen:]) != refsSum(number, writer, payload) {
		return "", nil, errors.New("its checksum does not match")
	}
	refs, err = blobstore.DecodeRefs(payload)
	return writer, refs, err
}

// findEnd sets the number of the next object, unless this process knows it. There is no gap, so that it takes a request
// for each doubling of the number, twice.
func (st *Store) findEnd(ctx context.Context) error {
	if st.log.next > 0 {
		return nil
	}
	last, free := uint64(0), uint64(1) // last is there, or 0
	for {
		there, err := st.hasRefs(ctx, free)
		if err != nil {
			return err
		}
		if !there {
			break
		}
		last, free = free, 2*free
	}
	for free-last > 1 {
		middle := last + (free-last)/2
		there, err := st.hasRefs(ctx, middle)
		if err != nil {
			return err
		}
		if there {
			last = middle
		} else {
			free = middle
		}
	}
	st.log.next = free
	return nil
}

func (st *Store) hasRefs(ctx context.Context, number uint64) (bool, error) {
	_, err := st.b.Head(ctx, st.refsKey(number))
	if errors.Is(err, bucket.ErrAbsent) {
		return false, nil
	}
	return err == nil, err
}

// Since implements blobstore.Refs. It reads objects ahead, many at a time.
func (st *Store) Since(ctx context.Context, after blobstore.Position) iter.Seq2[blobstore.PlacedRef, error] {
	return func(yield func(blobstore.PlacedRef, error) bool) {
		if err := st.since(ctx, after, yield); err != nil {
			yield(blobstore.PlacedRef{}, fmt.Errorf("read refs: %w", err))
		}
	}
}

// Objects that are read at a time.
const (
	aheadObjects = 32
	aheadBytes   = 32 << 20 // unless one alone is larger
)

func (st *Store) since(
	ctx context.Context, after blobstore.Position, yield func(blobstore.PlacedRef, error) bool,
) error {
	first, skip := splitPosition(after)
	ahead := ahead{st: st, skip: skip, first: first, yield: yield}
	// The listing begins one object earlier, which must be there.
	prefix, start := st.b.Key(refsName)+"/", ""
	expect := uint64(1)
	if first > 2 {
		expect, start = first-1, st.refsKey(first-2)
	}
	for o, err := range st.b.List(ctx, prefix, start, 0) {
		if err != nil {
			return err
		}
		number, err := strconv.ParseUint(strings.TrimPrefix(o.Key, prefix), 16, 64)
		if err != nil || st.refsKey(number) != o.Key {
			continue // not of the log
		}
		if number != expect {
			return fmt.Errorf("%w: %s is not there, but %s is", blobstore.ErrRefsDamaged, st.refsKey(expect), o.Key)
		}
		expect++
		if number < first {
			continue
		}
		if more, err := ahead.add(ctx, number, o); err != nil || !more {
			return err
		}
	}
	if expect < first || skip > 0 && expect == first {
		return fmt.Errorf("%w: refs end before %s, asked for was what comes after: "+
			"some were deleted, or the position is not of this store", blobstore.ErrRefsDamaged, st.refsKey(first))
	}
	_, err := ahead.flush(ctx)
	return err
}

// ahead reads objects of the log together and yields their refs in order.
type ahead struct {
	st    *Store
	first uint64 // of its refs skip are not yielded
	skip  int
	yield func(blobstore.PlacedRef, error) bool

	numbers []uint64
	bytes   int64
}

func (a *ahead) add(ctx context.Context, number uint64, o bucket.Entry) (more bool, err error) {
	more = true
	if len(a.numbers) == aheadObjects || a.bytes+o.Size > aheadBytes {
		more, err = a.flush(ctx)
	}
	a.numbers, a.bytes = append(a.numbers, number), a.bytes+o.Size
	return more, err
}

func (a *ahead) flush(ctx context.Context) (more bool, err error) {
	refs, errs := make([][]blobstore.Ref, len(a.numbers)), make([]error, len(a.numbers))
	var wg sync.WaitGroup
	for i, number := range a.numbers {
		wg.Go(func() { _, refs[i], errs[i] = a.st.readRefs(ctx, number) })
	}
	wg.Wait()
	for i, number := range a.numbers {
		if errs[i] != nil {
			return false, errs[i]
		}
		if !a.yieldRefs(number, refs[i]) {
			return false, nil
		}
	}
	a.numbers, a.bytes = a.numbers[:0], 0
	return true, nil
}

func (a *ahead) yieldRefs(number uint64, refs []blobstore.Ref) (more bool) {
	skip := 0
	if number == a.first {
		skip = a.skip
	}
	for i := skip; i < len(refs); i++ {
		p := positionAt(number, i+1)
		if i+1 == len(refs) {
			p = positionAt(number+1, 0)
		}
		if !a.yield(blobstore.PlacedRef{Ref: refs[i], After: p}, nil) {
			return false
		}
	}
	return true
}
