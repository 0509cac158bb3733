package staging

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// Suffixes of the files that hold the points of a partial.
const (
	stateSuffix  = ".state"  // not synced, nor is the data it covers: good under the same boot only
	syncedSuffix = ".synced" // synced, after the data it covers
)

// point is a place in a file up to which its bytes are on the disk, with the hash of them.
type point struct {
	Size   int64  `json:"size_bytes"` // of the whole file
	Offset int64  `json:"offset"`
	Boot   string `json:"boot"`
	Hash   []byte `json:"hash_state"` // nil: it is hashed by who continues it
}

// sole returns the size of a partial file whose points may be trusted: one that has a second name could have been
// written through it.
func sole(path string) (size int64, ok bool) {
	fi, err := os.Lstat(path)
	if err != nil || !fi.Mode().IsRegular() || fi.Sys().(*syscall.Stat_t).Nlink != 1 {
		return 0, false
	}
	return fi.Size(), true
}

// bestPoint returns the furthest point that can be trusted, or the zero point. A file that is shorter than its point
// lost data.
func bestPoint(path string, size int64, boot string) (best point) {
	have, ok := sole(path)
	if !ok {
		return point{}
	}
	for _, suffix := range []string{stateSuffix, syncedSuffix} {
		b, err := durable.ReadRegular(path + suffix)
		if err != nil {
			continue
		}
		pt, ok := decodePoint(b)
		if !ok || pt.Size != size || pt.Offset > min(size, have) {
			continue
		}
		if (suffix == syncedSuffix || pt.Boot == boot) && pt.Offset > best.Offset {
			best = pt
		}
	}
	return best
}

// pointSize is the length of every encoded point in bytes: it is written in place, within one block.
const pointSize = 512

func (pt point) encode() ([]byte, error) { return seal(pt, pointSize) }

// seal writes v as one line of JSON, padded to size, and the SHA-256 of all that, so that what was only half written is
// known.
func seal(v any, size int) ([]byte, error) {
	b, err := json.Marshal(v)
	pad := size - sha256Size - len(b)
	if err == nil && pad < 1 {
		err = fmt.Errorf("a record of %d bytes", len(b))
	}
	if err != nil {
		return nil, err
	}
	b = append(b, strings.Repeat(" ", pad-1)+"\n"...)
	sum := identity.Sum(b)
	return append(b, sum[:]...), nil
}

// unseal reads what seal wrote.
func unseal(b []byte, v any) bool {
	if len(b) < sha256Size {
		return false
	}
	text := b[:len(b)-sha256Size]
	return identity.Sum(text) == identity.Digest(b[len(text):]) && json.Unmarshal(text, v) == nil
}

const sha256Size = len(identity.Digest{})

func decodePoint(b []byte) (pt point, ok bool) {
	ok = len(b) == pointSize && unseal(b, &pt)
	return pt, ok
}

// segmentRecord says which segments of a file are there and passed.
type segmentRecord struct {
	Size      int64           `json:"size_bytes"` // of the whole file; zero: there is no record
	Boot      string          `json:"boot"`
	Midstates identity.Digest `json:"midstates_sha256"` // of those that they passed against
	Passed    bits            `json:"passed"`
	Open      []openSegment   `json:"open,omitempty"` // of which something is there; it is hashed again
}

type openSegment struct {
	Segment int   `json:"segment"`
	Bytes   int64 `json:"bytes"`
}

// maxOpen bounds the open segments of a record: those that are left out are fetched anew.
const maxOpen = 64

// record is the one to keep. One that is to outlive a boot names no open segments, of which nothing was synced.
func (s *Segments) record(open bool) segmentRecord {
	r := segmentRecord{Size: s.states.Size, Boot: s.area.boot, Midstates: s.form, Passed: s.passed}
	for i, n := range s.there {
		if open && len(r.Open) < maxOpen {
			r.Open = append(r.Open, openSegment{i, n})
		}
	}
	return r
}

// encode has one length for one file, so that a record can be written in place.
func (r segmentRecord) encode() ([]byte, error) {
	return seal(r, 2*pointSize+2*len(r.Passed)+48*maxOpen)
}

// span is a part of a file.
type span struct{ off, end int64 }

// spans returns what passed, from the start of the file to its end.
func (r segmentRecord) spans() (all []span) {
	for off := int64(0); off < r.Size; off += lanes.SegmentSize {
		if !r.Passed.has(int(off / lanes.SegmentSize)) {
			continue
		}
		s := span{off, min(r.Size, off+lanes.SegmentSize)}
		if n := len(all) - 1; n >= 0 && all[n].end == off {
			all[n].end = s.end
		} else {
			all = append(all, s)
		}
	}
	return all
}

// bestSegments returns the record with most segments that can be trusted, or the zero one.
func bestSegments(path string, size int64, boot string) segmentRecord {
	have, ok := sole(path)
	if !ok || have != size {
		return segmentRecord{}
	}
	n := int(lanes.Edges(size, lanes.SegmentSize)) + 1
	for _, suffix := range []string{stateSuffix, syncedSuffix} { // the first has all that the second has
		b, err := durable.ReadRegular(path + suffix)
		var r segmentRecord
		if err != nil || !unseal(b, &r) || r.Size != size || len(r.Passed) != (n+7)/8 {
			continue
		}
		r.Open = slices.DeleteFunc(r.Open, func(o openSegment) bool { return o.Segment < 0 || o.Segment >= n })
		if suffix == syncedSuffix || r.Boot == boot {
			return r
		}
	}
	return segmentRecord{}
}

// retire is called before the first byte of a partial file may change. It removes the synced record, unless keep says
// that all bytes it tells of stay: what is believed after a crash is never about other bytes than those that are there.
// The record is gone for good on return. The other one is good under this boot only, and fresh replaces it.
func (a *Area) retire(path string, keep func(record []byte) bool) error {
	b, err := durable.ReadRegular(path + syncedSuffix)
	switch {
	case errors.Is(err, fs.ErrNotExist), err == nil && keep(b):
		return nil
	case err != nil && !errors.Is(err, durable.ErrNotRegular):
		return err
	}
	return errors.Join(a.disk.Remove(path+syncedSuffix), a.disk.SyncDir(filepath.Dir(path)))
}

// fresh opens a new file for the record that is good under this boot.
func (a *Area) fresh(path string) (*durable.File, error) {
	if err := a.disk.Remove(path + stateSuffix); err != nil {
		return nil, err
	}
	return a.disk.OpenFile(path+stateSuffix, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
}

// drop removes a partial file and its records, the records first.
func (a *Area) drop(path string) error {
	err := a.retire(path, func([]byte) bool { return false })
	if err == nil {
		err = a.disk.Remove(path + stateSuffix)
	}
	if err == nil {
		err = a.disk.Remove(path)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.seen, path)
	return err
}

// have returns how many bytes the record says are there.
func (r segmentRecord) have() (n int64) {
	for i := range 8 * len(r.Passed) {
		if r.Passed.has(i) {
			n += min(lanes.SegmentSize, r.Size-int64(i)*lanes.SegmentSize)
		}
	}
	for _, o := range r.Open {
		n += o.Bytes
	}
	return n
}
