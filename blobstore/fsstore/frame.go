package fsstore

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math/bits"

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
// A payload is what blobstore.EncodeRefs makes.
const (
	logMagic      = "KILNREFS"
	logVersion    = 1
	saltSize      = 16
	logHeaderSize = 8 + 4 + saltSize + 4
	frameMagic    = "KRF1"
	frameHead     = 4 + 4 + 8 + 4 + 4
)

// A Position is the offset of a frame and, in its low bits, how many of the frame's refs come before it.
const refBits = 12 // which MaxRefs fits into

func positionAt(offset int64, refs int) blobstore.Position {
	return blobstore.Position(offset)<<refBits | blobstore.Position(refs)
}

func splitPosition(p blobstore.Position) (offset int64, refs int) {
	return int64(p >> refBits), int(p & blobstore.MaxRefs)
}

func newLogHeader() []byte {
	salt := make([]byte, saltSize)
	rand.Read(salt)
	return logHeader(salt)
}

func logHeader(salt []byte) []byte {
	b := binary.LittleEndian.AppendUint32([]byte(logMagic), logVersion)
	b = append(b, salt...)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
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

func decodeHead(b []byte) head {
	return head{
		length: binary.LittleEndian.Uint32(b[4:]),
		synced: int64(binary.LittleEndian.Uint64(b[8:])),
		body:   binary.LittleEndian.Uint32(b[16:]),
	}
}

// parseHead reads the head of the frame at offset; false means that these bytes are none.
func parseHead(b []byte, offset int64, salt []byte) (head, bool) {
	if len(b) < frameHead || string(b[:4]) != frameMagic ||
		binary.LittleEndian.Uint32(b[20:]) != headCRC(b, offset, salt) {
		return head{}, false
	}
	h := decodeHead(b)
	return h, h.length <= blobstore.MaxRefsBytes && h.synced >= logHeaderSize && h.synced <= offset
}

// findSalt returns a salt for a log whose header is damaged, by the head of its first frame, which must be whole. It is
// the one that stands in the header if that is not where the damage is, and else one that no frame tells from it, whose
// last four bytes are other ones: then the log counts as that of another store. A CRC is linear, so that all that any
// checksum tells of the salt is the same 32 bits, and any 32 bits of it can be chosen to fit.
func findSalt(header, first []byte) []byte {
	const at = saltSize - 4
	salt := bytes.Clone(header[12 : 12+saltSize])
	clear(salt[at:])
	zero := headCRC(first, logHeaderSize, salt)
	type change struct{ bits, crc uint32 }
	var by [32]change // by the highest bit of crc that it changes
	for i := range 32 {
		flipped := bytes.Clone(salt)
		flipped[at+i/8] = 1 << (i % 8)
		c := change{1 << i, headCRC(first, logHeaderSize, flipped) ^ zero}
		for top := bits.Len32(c.crc) - 1; by[top].crc != 0; top = bits.Len32(c.crc) - 1 {
			c = change{c.bits ^ by[top].bits, c.crc ^ by[top].crc}
		}
		by[bits.Len32(c.crc)-1] = c
	}
	var fit uint32
	for need := binary.LittleEndian.Uint32(first[20:]) ^ zero; need != 0; {
		c := by[bits.Len32(need)-1]
		fit, need = fit^c.bits, need^c.crc
	}
	binary.LittleEndian.PutUint32(salt[at:], fit)
	return salt
}
