package lanes

import (
	"errors"

	"github.com/kiln-registry/kiln-registry/identity"
)

// Recorder is an identity.Hash that notes its state at every edge of a segment. It saves and restores the bytes that a
// plain identity.Hash does, in which no midstates stand: whoever saves it keeps what Take gave before. After a restore,
// also of what a plain hash saved, it notes the edges that come after that point. It is not safe for concurrent use.
type Recorder struct {
	identity.Hash
	segment int64
	size    int64 // bytes written
	noted   []State
	first   int64 // which edge noted[0] is of
}

// NewRecorder returns a recorder at the start of a blob, with segments of so many bytes, which is SegmentSize but in
// tests. It panics if that is not a positive multiple of 64.
func NewRecorder(segment int64) *Recorder {
	if err := checkSegment(segment); err != nil {
		panic("lanes: " + err.Error())
	}
	return &Recorder{Hash: identity.NewHash(), segment: segment, first: 1}
}

// Write never returns an error.
func (r *Recorder) Write(b []byte) (int, error) {
	n := len(b)
	for len(b) > 0 {
		_, m := r.share(len(b))
		r.Hash.Write(b[:m])
		r.shared(m)
		b = b[m:]
	}
	return n, nil
}

func (r *Recorder) share(n int) (identity.Hash, int) {
	return r.Hash, int(min(int64(n), r.segment-r.size%r.segment))
}

func (r *Recorder) shared(n int) {
	r.size += int64(n)
	if r.size%r.segment == 0 {
		r.noted = append(r.noted, stateOf(r.Hash))
	}
}

// Take returns the states that were noted since the last Take, and the number of the edge that the first of them is of.
// Edge k lies k segments after the start, which has no edge. The last state is that of the end if that is an edge.
func (r *Recorder) Take() (first int64, noted []State) {
	first, noted = r.first, r.noted
	r.first, r.noted = first+int64(len(noted)), nil
	return first, noted
}

// Reset brings the recorder back to the start of a blob.
func (r *Recorder) Reset() {
	r.Hash.Reset()
	r.size, r.noted, r.first = 0, nil, 1
}

// UnmarshalBinary restores what MarshalBinary of a Recorder or of another identity.Hash saved. What was noted and not
// taken is dropped. After an error the recorder must not be used but to restore or reset it.
func (r *Recorder) UnmarshalBinary(state []byte) error {
	if err := r.Hash.UnmarshalBinary(state); err != nil {
		return err
	}
	r.size = int64(savedLength(state))
	if r.size < 0 {
		return errors.New("restore a hash: its length is out of range")
	}
	r.noted, r.first = nil, r.size/r.segment+1
	return nil
}
