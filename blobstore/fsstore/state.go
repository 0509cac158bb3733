package fsstore

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// An upload's state file has two slots, a page apart. A save goes into the slot that does not hold the current state,
// in place, so that it needs no space and a torn write leaves the current state as it was. The bytes that a slot covers
// were synced before it was written. The slot with the higher Count is the current one, except that a save that failed
// may have reached the disk all the same: see session.load.
//
// When the upload has become a blob the state file stays, without a data file, and is its receipt. In place of the slot
// that was not the current one it says then of what digest, in Hint, and size, in Covered. That was synced before the
// data file got its new name only if something of the upload had been acknowledged that the current slot does not
// cover: where that slot covers everything, its hash says the same.
//
// After the slots stand the midstates of what was received, one for each edge of a segment, in order. They are written
// before the slot that covers them and synced with it, and nothing depends on them: where a power failure, a full disk
// or a program that knew nothing of them left a gap, the slot's Sum tells, and the blob has no midstates.
const (
	slotSpacing = 4096
	statesAt    = 2 * slotSpacing
	stateSize   = int64(len(lanes.State{}))
	slotMagic   = "KUP1"
	noteMagic   = "KUR1" // of the slot that a receipt has
	slotPrefix  = 8      // magic and CRC-32C of the rest
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// slot is one saved state of an upload. Integers are little-endian on disk.
type slot struct {
	Count     uint64          // of saves of this upload; 0 is the one that Create made
	Covered   int64           // bytes of the data file that are synced and that Hash covers
	Announced int64           // bytes to come in all; negative when not known
	Hint      identity.Digest // the digest to come; zero when not known
	Boot      [36]byte        // the run of the kernel that the slot was written under
	HashLen   uint16
	Hash      [124]byte // saved state of identity.NewHash
	Sum       uint32    // CRC-32C of the midstates of the edges up to Covered
}

// save is what one save of an upload writes.
type save struct {
	slot
	noted []byte // midstates since the save before
	at    int64  // where in the state file they belong
}

func (sl *slot) encode(magic string) ([]byte, error) {
	b, err := binary.Append(make([]byte, slotPrefix), binary.LittleEndian, sl)
	if err != nil {
		return nil, err
	}
	copy(b, magic)
	binary.LittleEndian.PutUint32(b[4:], crc32.Checksum(b[slotPrefix:], castagnoli))
	return b, nil
}

// decodeSlot returns nil for bytes that are no whole slot, or one of another kind.
func decodeSlot(b []byte, magic string) *slot {
	var sl slot
	n := slotPrefix + binary.Size(sl)
	if len(b) < n || string(b[:4]) != magic {
		return nil
	}
	if binary.LittleEndian.Uint32(b[4:]) != crc32.Checksum(b[slotPrefix:n], castagnoli) {
		return nil
	}
	if _, err := binary.Decode(b[slotPrefix:n], binary.LittleEndian, &sl); err != nil || int(sl.HashLen) > len(sl.Hash) {
		return nil
	}
	return &sl
}

// createState makes the state file of a new upload with its first slot. It is not synced: the first save does that.
func createState(disk durable.Disk, path string, sl *slot) error {
	b, err := sl.encode(slotMagic)
	if err != nil {
		return err
	}
	f, err := disk.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	both := make([]byte, statesAt)
	copy(both, b)
	_, err = f.Write(both)
	return errors.Join(err, f.Close())
}

// readSlots returns the slots of a state file; one that is torn or never written is nil.
func readSlots(f *durable.File) (slots [2]*slot, err error) {
	b := make([]byte, statesAt)
	if _, err := f.ReadAt(b, 0); err != nil {
		return slots, fmt.Errorf("%w: read %s: %w", blobstore.ErrDamaged, f.Name(), err)
	}
	return [2]*slot{decodeSlot(b[:slotSpacing], slotMagic), decodeSlot(b[slotSpacing:statesAt], slotMagic)}, nil
}

// receipt is what an upload became.
type receipt struct {
	digest identity.Digest
	size   int64
}

// readReceipt returns what the upload became whose state file this is and that has no data file, if it became anything.
func readReceipt(b []byte) (r receipt, ok bool) {
	if len(b) < statesAt {
		return r, false
	}
	var last *slot
	for _, half := range [][]byte{b[:slotSpacing], b[slotSpacing:statesAt]} {
		if sl := decodeSlot(half, noteMagic); sl != nil {
			return receipt{sl.Hint, sl.Covered}, true
		}
		if sl := decodeSlot(half, slotMagic); sl != nil && sl.Count > 0 && (last == nil || sl.Count > last.Count) {
			last = sl
		}
	}
	h := lanes.NewRecorder(lanes.SegmentSize)
	if last == nil || h.UnmarshalBinary(last.Hash[:last.HashLen]) != nil {
		return r, false
	}
	return receipt{identity.DigestOf(h), last.Covered}, true
}

// writeReceipt writes down, in the slot at, what an upload is about to become. It is not synced.
func writeReceipt(f *durable.File, at int, r receipt) error {
	b, err := (&slot{Hint: r.digest, Covered: r.size}).encode(noteMagic)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(b, int64(at)*slotSpacing)
	return err
}

// writeSave saves a state durably, in the slot at.
func writeSave(f *durable.File, at int, sv *save) error {
	b, err := sv.encode(slotMagic)
	if err != nil {
		return err
	}
	if len(sv.noted) > 0 {
		// Without space for them the save must succeed all the same: Sum tells that they are missing.
		_, _ = f.WriteAt(sv.noted, sv.at)
	}
	if _, err := f.WriteAt(b, int64(at)*slotSpacing); err != nil {
		return err
	}
	return f.Sync()
}

// choose returns the current slot for a data file of the given size: the last one whose bytes are all there. stale says
// that a later one is in the file, left by a save that was reported as failed and whose bytes were dropped.
func choose(slots [2]*slot, size int64) (at int, stale bool, err error) {
	at = -1
	for i, sl := range slots {
		if sl != nil && sl.Covered <= size && (at < 0 || sl.Count > slots[at].Count) {
			at = i
		}
	}
	if at < 0 {
		return 0, false, fmt.Errorf("%w: no saved state covers the %d bytes that are there", blobstore.ErrDamaged, size)
	}
	other := slots[1-at]
	return at, other != nil && other.Count > slots[at].Count, nil
}
