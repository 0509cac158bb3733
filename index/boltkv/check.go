package boltkv

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"io"
	"os"

	"github.com/kiln-registry/kiln-registry/index"
)

// The form of a bbolt file (version 2), in the byte order of the machine. Source: bbolt's own declarations of its page,
// meta, branch and leaf elements.
const (
	pageHeader     = 16 // id, flags, count, overflow
	elementSize    = 16 // branch: pos, ksize, page; leaf: flags, pos, ksize, vsize
	bucketHeader   = 16 // root page, sequence
	metaSize       = 64 // magic, version, page size, flags, root, sequence, freelist, pages, transaction, checksum
	metaMagic      = 0xED0CDAED
	metaVersion    = 2
	pageBranch     = 0x01
	pageLeaf       = 0x02
	pageFreelist   = 0x10
	leafBucket     = 0x01
	noFreelist     = ^uint64(0)
	minPageSize    = 1 << 10
	maxPageSize    = 1 << 24
	countElsewhere = 0xffff // the count of a long freelist is its first element
	maxDepth       = 64     // no file that fits on a disk comes near it
)

var order = binary.NativeEndian

// snapshot is one state of a bbolt file. Its pages stay as they are while a transaction that began at it is open, and
// until the next one that writes begins.
type snapshot struct {
	meta
	size int64 // of the file
}

// takeSnapshot returns the newest state of a file.
func takeSnapshot(f *os.File) (snapshot, error) {
	info, err := f.Stat()
	if err != nil {
		return snapshot{}, err
	}
	m, err := readMeta(f, info.Size())
	return snapshot{m, info.Size()}, err
}

// check reads a bbolt file and says whether every page that is in use is sound: it is where it says it is, its
// elements lie within it, one behind another, and in order, no page is used twice or both used and free. bbolt itself
// checks while it goes, by panics and on mapped memory, or not at all: a page that is in use and on the freelist is
// overwritten later. It gives up when ctx ends.
func (s snapshot) check(ctx context.Context, f io.ReaderAt) error {
	c := &checker{ctx: ctx, file: f, pageSize: int64(s.pageSize), pages: s.pages, written: s.txn > 1}
	if s.pages > uint64(s.size/c.pageSize) {
		return broken("%d pages of %d bytes in a file of %d", s.pages, s.pageSize, s.size)
	}
	c.used = make([]bool, s.pages)
	if err := c.tree(s.root, 0, nil, nil); err != nil {
		return err
	}
	return c.freelist(s.freelist)
}

func broken(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{index.ErrDamaged}, args...)...)
}

type meta struct {
	pageSize                   uint32
	root, freelist, pages, txn uint64
}

// readMeta returns the newer one of the sound meta pages, as bbolt does.
func readMeta(f io.ReaderAt, size int64) (meta, error) {
	best, ok := metaAt(f, 0)
	for pos := int64(minPageSize); pos <= maxPageSize && pos < size; pos *= 2 {
		m, sound := metaAt(f, pos)
		if sound && int64(m.pageSize) == pos && (!ok || m.txn > best.txn && m.pageSize == best.pageSize) {
			best, ok = m, true
		}
	}
	if !ok {
		return best, broken("it has no sound meta page")
	}
	return best, nil
}

func metaAt(f io.ReaderAt, pos int64) (m meta, ok bool) {
	var b [metaSize]byte
	if _, err := f.ReadAt(b[:], pos+pageHeader); err != nil {
		return m, false
	}
	sum := fnv.New64a()
	sum.Write(b[:56])
	if order.Uint32(b[0:]) != metaMagic || order.Uint32(b[4:]) != metaVersion || order.Uint64(b[56:]) != sum.Sum64() {
		return m, false
	}
	m = meta{order.Uint32(b[8:]), order.Uint64(b[16:]), order.Uint64(b[32:]), order.Uint64(b[40:]), order.Uint64(b[48:])}
	return m, m.pageSize >= minPageSize && m.pageSize <= maxPageSize
}

type checker struct {
	ctx      context.Context
	file     io.ReaderAt
	pageSize int64
	pages    uint64
	used     []bool
	written  bool     // since the file was made, so that it has a bucket
	buffers  [][]byte // by depth: a page is needed until those below it are checked
}

// page is one page with its overflow.
type page struct {
	id    uint64
	flags uint16
	count int
	data  []byte // with the header
}

func (c *checker) claim(id, n uint64) error {
	if id < 2 || id >= c.pages || n > c.pages-id {
		return broken("page %d (of %d) is out of bounds", id, c.pages)
	}
	for i := id; i < id+n; i++ {
		if c.used[i] {
			return broken("page %d is used twice", i)
		}
		c.used[i] = true
	}
	return nil
}

// read reads a page that is so many pages below the root. It is valid until the next one of that depth is read.
func (c *checker) read(id uint64, depth int) (page, error) {
	if err := cmp.Or(c.ctx.Err(), c.claim(id, 1)); err != nil {
		return page{}, err
	}
	for len(c.buffers) <= depth {
		c.buffers = append(c.buffers, make([]byte, c.pageSize))
	}
	b := c.buffers[depth]
	if _, err := c.file.ReadAt(b, int64(id)*c.pageSize); err != nil {
		return page{}, fmt.Errorf("read page %d: %w", id, err)
	}
	p := page{order.Uint64(b), order.Uint16(b[8:]), int(order.Uint16(b[10:])), b}
	if p.id != id {
		return page{}, broken("page %d says that it is page %d", id, p.id)
	}
	if more := uint64(order.Uint32(b[12:])); more > 0 {
		if err := c.claim(id+1, more); err != nil {
			return page{}, err
		}
		p.data = append(b[:c.pageSize:c.pageSize], make([]byte, int64(more)*c.pageSize)...)
		if _, err := c.file.ReadAt(p.data[c.pageSize:], int64(id+1)*c.pageSize); err != nil {
			return page{}, fmt.Errorf("read page %d: %w", id, err)
		}
	}
	return p, nil
}

// tree checks the page id and what is below. Its keys are not below low and, unless high is nil, below high.
func (c *checker) tree(id uint64, depth int, low, high []byte) error {
	if depth > maxDepth {
		return broken("page %d is more than %d pages below the root", id, maxDepth)
	}
	p, err := c.read(id, depth)
	if err != nil {
		return err
	}
	switch p.flags {
	case pageLeaf:
		return c.leaf(p, depth, low, high)
	case pageBranch:
		return c.branch(p, depth, low, high)
	}
	return broken("page %d is of kind %#x", id, p.flags)
}

func (c *checker) branch(p page, depth int, low, high []byte) error {
	if p.count == 0 {
		return broken("page %d is an empty branch", p.id)
	}
	from := p.begin()
	key := func(i int) ([]byte, error) {
		at := pageHeader + i*elementSize
		if at+elementSize > len(p.data) {
			return nil, broken("page %d is too short for element %d", p.id, i)
		}
		e := p.data[at:]
		start, size := uint64(at)+uint64(order.Uint32(e)), uint64(order.Uint32(e[4:]))
		if start != from {
			return nil, p.apart(i)
		}
		from = start + size
		return p.part(start, size)
	}
	next, err := key(0)
	if err != nil {
		return err
	}
	for i := range p.count {
		this, end := next, high
		if i+1 < p.count {
			if next, err = key(i + 1); err != nil {
				return err
			}
			end = next
		}
		if err := p.within(i, this, low, end); err != nil {
			return err
		}
		child := order.Uint64(p.data[pageHeader+i*elementSize+8:])
		if err := c.tree(child, depth+1, this, end); err != nil {
			return err
		}
		low = this
	}
	return nil
}

func (c *checker) leaf(p page, depth int, low, high []byte) error {
	if p.count == 0 && (low != nil || depth == 0 && c.written) {
		return broken("page %d is an empty leaf", p.id)
	}
	from := p.begin()
	for i := range p.count {
		at := pageHeader + i*elementSize
		if at+elementSize > len(p.data) {
			return broken("page %d is too short for element %d", p.id, i)
		}
		e := p.data[at:]
		start, keySize := uint64(at)+uint64(order.Uint32(e[4:])), uint64(order.Uint32(e[8:]))
		valueSize := uint64(order.Uint32(e[12:]))
		if start != from {
			return p.apart(i)
		}
		from = start + keySize + valueSize
		key, err := p.part(start, keySize)
		if err != nil {
			return err
		}
		value, err := p.part(start+keySize, valueSize)
		if err != nil {
			return err
		}
		if err := p.within(i, key, low, high); err != nil {
			return err
		}
		if i > 0 && bytes.Equal(key, low) {
			return broken("page %d has a key twice", p.id)
		}
		low = key
		if order.Uint32(e)&leafBucket != 0 {
			if err := c.bucket(p.id, depth, value); err != nil {
				return err
			}
		}
	}
	return nil
}

// begin is where the data of the first element begins: bbolt writes it behind the list of elements, one after another
// and without a gap. So a wrong count shows, and wrong sizes do.
func (p page) begin() uint64 { return pageHeader + uint64(p.count)*elementSize }

func (p page) apart(i int) error {
	return broken("page %d has element %d not behind the one before it, or another number of elements", p.id, i)
}

func (p page) part(start, size uint64) ([]byte, error) {
	if start+size > uint64(len(p.data)) {
		return nil, broken("page %d has an element beyond its end", p.id)
	}
	return p.data[start : start+size], nil
}

func (p page) within(i int, key, low, high []byte) error {
	if bytes.Compare(key, low) < 0 || high != nil && bytes.Compare(key, high) >= 0 {
		return broken("page %d has key %d out of order", p.id, i)
	}
	return nil
}

// bucket checks a bucket from its value: a root page, or a small page in the value itself.
func (c *checker) bucket(id uint64, depth int, value []byte) error {
	if len(value) < bucketHeader {
		return broken("page %d has a bucket of %d bytes", id, len(value))
	}
	if root := order.Uint64(value); root != 0 {
		return c.tree(root, depth+1, nil, nil)
	}
	b := value[bucketHeader:]
	if len(b) < pageHeader || order.Uint16(b[8:]) != pageLeaf {
		return broken("page %d has a malformed bucket", id)
	}
	return c.leaf(page{id, pageLeaf, int(order.Uint16(b[10:])), b}, depth+1, nil, nil)
}

func (c *checker) freelist(id uint64) error {
	if id == noFreelist {
		return nil
	}
	p, err := c.read(id, 0)
	if err != nil {
		return err
	}
	ids := p.data[pageHeader:]
	count := uint64(p.count)
	if p.count == countElsewhere {
		count, ids = order.Uint64(ids), ids[8:]
	}
	if p.flags != pageFreelist || count > uint64(len(ids)/8) {
		return broken("page %d is a malformed freelist", id)
	}
	for i := range count {
		if err := c.claim(order.Uint64(ids[8*i:]), 1); err != nil {
			return err
		}
	}
	return nil
}
