package fsstore

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
)

// refs.log is a header and then frames, one for each Put. Integers are little-endian.
//
//	header  "KILNREFS" version:4 salt:16 crc:4            crc over what stands before it
//	frame   "KRF1" length:4 synced:8 body:4 head:4 payload of that length
//
// body is the CRC-32C of the payload. head is that of the fields before it, of the frame's offset and of the salt, so
// that bytes inside a manifest, which a client chooses, can't pass for a frame. synced is the size up to which the log
// was known to be durable when the frame was written: frames that were written together have the same one. A frame
// whose synced lies behind a broken frame proves that the broken one was durable once, so that it was damaged later and
// is not the end of an unfinished write.
//
// A payload is a count and so many refs; see appendRef. Its integers are varints and its strings have their length
// before them.
const (
	logMagic      = "KILNREFS"
	logVersion    = 1
	logHeaderSize = 8 + 4 + 16 + 4
	frameMagic    = "KRF1"
	frameHead     = 4 + 4 + 8 + 4 + 4
	maxPayload    = 16 << 20
	maxRefs       = 1<<refBits - 1 // in one Put
)

// A Position is the offset of a frame and, in its low bits, how many of the frame's refs come before it.
const refBits = 12

func positionAt(offset int64, refs int) blobstore.Position {
	return blobstore.Position(offset)<<refBits | blobstore.Position(refs)
}

func splitPosition(p blobstore.Position) (offset int64, refs int) {
	return int64(p >> refBits), int(p & maxRefs)
}

func newLogHeader() []byte {
	b := make([]byte, logHeaderSize)
	copy(b, logMagic)
	binary.LittleEndian.PutUint32(b[8:], logVersion)
	rand.Read(b[12:28])
	binary.LittleEndian.PutUint32(b[28:], crc32.Checksum(b[:28], castagnoli))
	return b
}

// parseLogHeader returns the salt.
func parseLogHeader(b []byte) (salt []byte, err error) {
	if len(b) < logHeaderSize || string(b[:8]) != logMagic ||
		binary.LittleEndian.Uint32(b[28:]) != crc32.Checksum(b[:28], castagnoli) {
		return nil, fmt.Errorf("%w: %s does not begin with the header of a log of refs", blobstore.ErrDamaged, refsName)
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != logVersion {
		return nil, fmt.Errorf("%s has format %d: this program knows format %d", refsName, v, logVersion)
	}
	return b[12:28], nil
}

// head is the head of a frame.
type head struct {
	length uint32
	synced int64
	body   uint32
}

func (h head) size() int64 { return frameHead + int64(h.length) }

func headCRC(b []byte, offset int64, salt []byte) uint32 {
	crc := crc32.Update(0, castagnoli, b[:20])
	crc = crc32.Update(crc, castagnoli, binary.LittleEndian.AppendUint64(nil, uint64(offset)))
	return crc32.Update(crc, castagnoli, salt)
}

func (h head) append(b []byte, offset int64, salt []byte) []byte {
	at := len(b)
	b = append(b, frameMagic...)
	b = binary.LittleEndian.AppendUint32(b, h.length)
	b = binary.LittleEndian.AppendUint64(b, uint64(h.synced))
	b = binary.LittleEndian.AppendUint32(b, h.body)
	return binary.LittleEndian.AppendUint32(b, headCRC(b[at:], offset, salt))
}

// parseHead reads the head of the frame at offset; false means that these bytes are none.
func parseHead(b []byte, offset int64, salt []byte) (head, bool) {
	if len(b) < frameHead || string(b[:4]) != frameMagic ||
		binary.LittleEndian.Uint32(b[20:]) != headCRC(b, offset, salt) {
		return head{}, false
	}
	h := head{
		length: binary.LittleEndian.Uint32(b[4:]),
		synced: int64(binary.LittleEndian.Uint64(b[8:])),
		body:   binary.LittleEndian.Uint32(b[16:]),
	}
	return h, h.length <= maxPayload && h.synced >= logHeaderSize && h.synced <= offset
}

// encodeRefs makes the payload of one Put.
func encodeRefs(refs []blobstore.Ref) ([]byte, error) {
	if len(refs) > maxRefs {
		return nil, fmt.Errorf("%d refs at once: the limit is %d", len(refs), maxRefs)
	}
	b := binary.AppendUvarint(nil, uint64(len(refs)))
	for i := range refs {
		b = appendRef(b, &refs[i])
	}
	if len(b) > maxPayload {
		return nil, fmt.Errorf("refs of %d bytes at once: the limit is %d", len(b), maxPayload)
	}
	return b, nil
}

// The flags of a ref.
const (
	flagDeleted = 1 << iota
	flagTime
	flagsKnown = flagDeleted | flagTime
)

func appendRef(b []byte, r *blobstore.Ref) []byte {
	var flags byte
	if r.Deleted {
		flags |= flagDeleted
	}
	if !r.Time.IsZero() {
		flags |= flagTime
	}
	b = append(b, flags)
	b = appendBytes(b, r.Repo)
	b = appendBytes(b, r.Name)
	b = binary.AppendUvarint(b, r.Seq)
	b = append(b, r.Digest[:]...)
	b = appendBytes(b, r.MediaType)
	b = appendBytes(b, r.Manifest)
	if flags&flagTime != 0 {
		b = binary.AppendVarint(b, r.Time.Unix())
		b = binary.AppendUvarint(b, uint64(r.Time.Nanosecond()))
	}
	return b
}

func appendBytes[T string | []byte](b []byte, s T) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

var errShort = errors.New("payload ends too early")

// payload reads what encodeRefs wrote. After an error its reads return zeros.
type payload struct {
	b   []byte
	err error
}

func (p *payload) take(n uint64) []byte {
	if uint64(len(p.b)) < n {
		p.b, p.err = nil, errShort
		return nil
	}
	b := p.b[:n]
	p.b = p.b[n:]
	return b
}

func (p *payload) bytes() []byte { return p.take(p.uvarint()) }

func (p *payload) byte() (c byte) {
	if b := p.take(1); b != nil {
		c = b[0]
	}
	return c
}

func (p *payload) uvarint() uint64 {
	v, n := binary.Uvarint(p.b)
	p.take(uint64(max(n, 0)))
	if n <= 0 {
		p.b, p.err = nil, errShort
	}
	return v
}

func (p *payload) varint() int64 {
	v, n := binary.Varint(p.b)
	p.take(uint64(max(n, 0)))
	if n <= 0 {
		p.b, p.err = nil, errShort
	}
	return v
}

// decodeRefs reads a payload. The manifests are part of b.
func decodeRefs(b []byte) ([]blobstore.Ref, error) {
	p := payload{b: b}
	n := p.uvarint()
	if n > maxRefs {
		return nil, fmt.Errorf("payload of %d refs: the limit is %d", n, maxRefs)
	}
	refs := make([]blobstore.Ref, n)
	for i := range refs {
		if err := p.ref(&refs[i]); err != nil {
			return nil, err
		}
	}
	if len(p.b) > 0 {
		return nil, fmt.Errorf("payload has %d bytes too many", len(p.b))
	}
	return refs, p.err
}

func (p *payload) ref(r *blobstore.Ref) error {
	flags := p.byte()
	if flags&^flagsKnown != 0 {
		return fmt.Errorf("ref with unknown flags %#x", flags)
	}
	r.Deleted = flags&flagDeleted != 0
	r.Repo = string(p.bytes())
	r.Name = string(p.bytes())
	r.Seq = p.uvarint()
	copy(r.Digest[:], p.take(uint64(len(r.Digest))))
	r.MediaType = string(p.bytes())
	if m := p.bytes(); len(m) > 0 {
		r.Manifest = m
	}
	if flags&flagTime != 0 {
		r.Time = time.Unix(p.varint(), int64(p.uvarint())).UTC()
	}
	return p.err
}
