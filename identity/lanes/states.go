package lanes

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kiln-registry/kiln-registry/identity"
)

const (
	formatName = "kiln.sha256-midstates.v1"
	headSize   = len(formatName) + 8 + 8 + len(identity.Digest{})
	sealSize   = len(identity.Digest{})
)

// MaxBytes is the size of the longest form that Parse takes.
const MaxBytes = headSize + MaxEdges*len(State{}) + sealSize

// FormSize returns how many bytes the form of a blob of size bytes has, if it is one that Parse takes.
func FormSize(size int64) int64 {
	return int64(headSize+sealSize) + min(Edges(size, SegmentSize), MaxEdges)*int64(len(State{}))
}

// States are the midstates of one blob. They are made by New and Parse, and not changed afterwards; then any number of
// goroutines may use them.
type States struct {
	Segment int64           // bytes of every segment but the last one, which has what is left
	Size    int64           // of the blob
	Digest  identity.Digest // of the blob
	Edge    []State         // Edge[k] is the state after k+1 segments
}

// New returns the midstates of a blob, after checking that there is one for each of its edges.
func New(segment, size int64, d identity.Digest, edge []State) (*States, error) {
	s := &States{Segment: segment, Size: size, Digest: d, Edge: edge}
	if err := s.check(); err != nil {
		return nil, fmt.Errorf("midstates of %s: %w", d, err)
	}
	return s, nil
}

func (s *States) check() error {
	if err := checkSegment(s.Segment); err != nil {
		return err
	}
	switch n := Edges(s.Size, s.Segment); {
	case s.Size < 0:
		return fmt.Errorf("the blob has %d bytes", s.Size)
	case n > MaxEdges:
		return fmt.Errorf("a blob of %d bytes has more than %d edges", s.Size, MaxEdges)
	case n != int64(len(s.Edge)):
		return fmt.Errorf("%d states for a blob of %d bytes, which has %d edges", len(s.Edge), s.Size, n)
	}
	return nil
}

// MarshalBinary returns the form kiln.sha256-midstates.v1, whatever Segment is: Parse takes only SegmentSize.
func (s *States) MarshalBinary() ([]byte, error) {
	if err := s.check(); err != nil {
		return nil, fmt.Errorf("write midstates of %s: %w", s.Digest, err)
	}
	b := make([]byte, 0, headSize+len(s.Edge)*len(State{})+sealSize)
	b = append(b, formatName...)
	b = binary.BigEndian.AppendUint64(b, uint64(s.Segment))
	b = binary.BigEndian.AppendUint64(b, uint64(s.Size))
	b = append(b, s.Digest[:]...)
	for i := range s.Edge {
		b = append(b, s.Edge[i][:]...)
	}
	seal := identity.Sum(b)
	return append(b, seal[:]...), nil
}

// Parse reads the form kiln.sha256-midstates.v1 and refuses everything else: what it returns marshals to the same
// bytes. It does not say that the states are those of the blob. It keeps nothing of data, and takes no more memory
// than that.
func Parse(data []byte) (*States, error) { return ParseSegments(data, SegmentSize) }

// ParseSegments is Parse for segments of another size, which only tests write.
func ParseSegments(data []byte, segment int64) (*States, error) {
	s, err := parse(data, segment)
	if err != nil {
		return nil, fmt.Errorf("read midstates: %w", err)
	}
	return s, nil
}

func parse(data []byte, segment int64) (*States, error) {
	if !bytes.HasPrefix(data, []byte(formatName)) {
		return nil, fmt.Errorf("they do not begin with %q", formatName)
	}
	if len(data) < headSize+sealSize {
		return nil, fmt.Errorf("%d bytes are too few", len(data))
	}
	body, seal := data[:len(data)-sealSize], data[len(data)-sealSize:]
	if identity.Sum(body) != identity.Digest(seal) {
		return nil, errors.New("they are damaged: their own hash is another one")
	}
	body = body[len(formatName):]
	s := &States{
		Segment: int64(binary.BigEndian.Uint64(body)),
		Size:    int64(binary.BigEndian.Uint64(body[8:])),
		Digest:  identity.Digest(body[16:48]),
	}
	if s.Segment != segment {
		return nil, fmt.Errorf("they have segments of %d bytes, want %d", uint64(s.Segment), segment)
	}
	body = body[48:]
	if len(body)%len(State{}) != 0 {
		return nil, fmt.Errorf("%d bytes of states are no whole number of them", len(body))
	}
	s.Edge = make([]State, len(body)/len(State{}))
	for i := range s.Edge {
		copy(s.Edge[i][:], body[i*len(State{}):])
	}
	return s, s.check()
}

// Len returns the number of segments: one more than there are edges, also in an empty blob, whose one segment is empty.
func (s *States) Len() int { return len(s.Edge) + 1 }

// Range returns where segment i, from 0, begins and how many bytes it has.
func (s *States) Range(i int) (off, n int64) {
	off = int64(i) * s.Segment
	return off, min(s.Segment, s.Size-off)
}
