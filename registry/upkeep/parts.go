package upkeep

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
)

// reading is one reading of a blob from its start to its end. It hashes what it is given, and notes the midstates.
type reading struct {
	i    blobstore.Info
	n    int64 // bytes so far
	hash *lanes.Recorder
	form []byte // what midstates returned
	// Set where the parts that are damaged are to be named.
	states *lanes.States
	stream *lanes.Stream
}

func newReading(i blobstore.Info) *reading {
	return &reading{i: i, hash: lanes.NewRecorder(lanes.SegmentSize)}
}

// locate has the reading find out which parts are damaged, by midstates that were recorded before; nil: there are none.
func (r *reading) locate(states *lanes.States) {
	if states != nil {
		r.states, r.stream = states, states.Stream()
	}
}

func (r *reading) write(b []byte) {
	r.hash.Write(b)
	if r.stream != nil {
		r.stream.Write(b)
	}
	r.n += int64(len(b))
}

func (r *reading) sum() identity.Digest { return identity.DigestOf(r.hash) }

// damage says what is wrong with a blob that was read to its end and is not what its digest says.
func (r *reading) damage() string {
	switch {
	case r.stream != nil:
		return r.parts()
	case r.n != r.i.Size:
		return fmt.Sprintf("it has %d bytes where %d were stored", r.n, r.i.Size)
	}
	return fmt.Sprintf("its %d bytes hash to %s", r.n, r.sum())
}

// midstates returns the form of those that were noted of a blob that was right; nil if it has one segment.
func (r *reading) midstates() ([]byte, error) {
	n := lanes.Edges(r.n, lanes.SegmentSize)
	if n == 0 || n > lanes.MaxEdges || r.form != nil {
		return r.form, nil
	}
	_, noted := r.hash.Take()
	states, err := lanes.New(lanes.SegmentSize, r.n, r.i.Digest, noted[:n])
	if err == nil {
		r.form, err = states.MarshalBinary()
	}
	return r.form, err
}

// keepSegments keeps the midstates of a blob that was read and was right, unless the store has the same ones, and says
// whether it did. A failure is logged: the next pass tries again.
func (s *Scrubber) keepSegments(ctx context.Context, r *reading) bool {
	sg, ok := s.store.(blobstore.Segments)
	if !ok || s.ReadOnly {
		return false
	}
	form, err := r.midstates()
	if form == nil && err == nil {
		return false
	}
	var has []byte
	if err == nil {
		has, err = sg.Segments(ctx, r.i)
	}
	wrong := err == nil || errors.Is(err, blobstore.ErrDamaged)
	if err == nil && bytes.Equal(has, form) {
		return false
	}
	if err == nil || errors.Is(err, blobstore.ErrNotFound) {
		err = sg.KeepSegments(ctx, r.i, form)
	}
	log := s.log.With("digest", r.i.Digest.String())
	switch {
	case errors.Is(err, blobstore.ErrNotFound): // the blob was removed or replaced meanwhile
	case err != nil && ctx.Err() == nil:
		log.Error("midstates not kept", "error", err)
	case wrong:
		log.Warn("midstates of a blob were wrong, and are replaced")
	}
	return err == nil
}

// segments returns the midstates of a blob; nil if the store has none that can be used.
func (s *Scrubber) segments(ctx context.Context, i blobstore.Info) *lanes.States {
	sg, ok := s.store.(blobstore.Segments)
	if !ok {
		return nil
	}
	form, err := sg.Segments(ctx, i)
	if err != nil {
		return nil
	}
	states, err := lanes.Parse(form)
	if err != nil || states.Digest != i.Digest {
		return nil
	}
	return states
}

// scrubLanes is how many parts of a blob are read and hashed at once, which takes one core.
const scrubLanes = 4

// inParts reads a blob by its midstates, several parts at once, and returns nil if it is what its digest says: the
// midstates need no trust for that. lanes.ErrMismatch: the bytes and the midstates don't fit, and reading it in order
// tells which of them are wrong. errors.ErrUnsupported: that would save nothing.
func (s *Scrubber) inParts(ctx context.Context, states *lanes.States, i blobstore.Info, p *pace) error {
	if states == nil || states.Size != i.Size || min(lanes.Width(), states.Len()) == 1 {
		return errors.ErrUnsupported
	}
	n := min(scrubLanes, states.Len())
	parts := make([]*part, n)
	defer func() {
		for _, t := range parts {
			if t != nil {
				t.body.Close()
			}
		}
	}()
	for k, buf := range lanes.Buffers(n, scrubPiece) {
		t, err := s.part(ctx, states, i, k*states.Len()/n, (k+1)*states.Len()/n, buf)
		if err != nil {
			return err
		}
		parts[k] = t
	}
	for {
		pieces, err := nextPieces(parts)
		if err != nil || len(pieces) == 0 {
			return err
		}
		lanes.Write(pieces...)
		read := 0
		for _, piece := range pieces {
			read += len(piece.Data)
		}
		if err := p.read(ctx, read); err != nil {
			return err
		}
	}
}

// part is a run of segments of a blob that are checked one after the other.
type part struct {
	states *lanes.States
	at     int // the segment that is being checked
	end    int // the one after the last
	check  *lanes.Check
	left   int64 // bytes of the segment that are not read yet
	body   io.ReadCloser
	buf    []byte
}

func (s *Scrubber) part(
	ctx context.Context, states *lanes.States, i blobstore.Info, at, end int, buf []byte,
) (*part, error) {
	off, left := states.Range(at)
	last, size := states.Range(end - 1)
	body, err := s.store.Open(ctx, i, off, last+size-off)
	if err != nil {
		return nil, err
	}
	return &part{states, at, end, states.Check(at), left, body, buf}, nil
}

// nextPieces reads the next piece of each part that has not ended.
func nextPieces(parts []*part) (pieces []lanes.Piece, err error) {
	for _, t := range parts {
		if err := t.edge(); err != nil {
			return nil, err
		}
		if t.left == 0 {
			continue
		}
		n, err := blobstore.Fill(t.body, t.buf[:min(int64(len(t.buf)), t.left)])
		if err != nil && err != io.EOF {
			return nil, err
		}
		if n == 0 {
			return nil, fmt.Errorf("segment %d: %w: it ends %d bytes too early", t.at, lanes.ErrMismatch, t.left)
		}
		t.left -= int64(n)
		pieces = append(pieces, lanes.Piece{To: t.check, Data: t.buf[:n]})
	}
	return pieces, nil
}

// edge goes on to the next segment if all of this one was read. lanes.ErrMismatch if it does not match.
func (t *part) edge() error {
	if t.left > 0 || t.at == t.end {
		return nil
	}
	if err := t.check.Err(); err != nil {
		return err
	}
	if t.at++; t.at < t.end {
		_, t.left = t.states.Range(t.at)
		t.check = t.states.Check(t.at)
	}
	return nil
}

// same says whether a blob that was read in order has these midstates.
func (r *reading) same(states *lanes.States) bool {
	form, err := r.midstates()
	if err != nil || form == nil {
		return false
	}
	had, err := states.MarshalBinary()
	return err == nil && bytes.Equal(form, had)
}

// maxNamed is how many damaged ranges are named.
const maxNamed = 8

// parts names the damaged parts of a blob that was read to its end. That is worth as much as the midstates are.
func (r *reading) parts() string {
	var ranges []string
	bad := r.stream.End()
	for first := 0; first < len(bad); {
		last := first
		for last+1 < len(bad) && bad[last+1] == bad[last]+1 {
			last++
		}
		from, _ := r.states.Range(bad[first])
		end, size := r.states.Range(bad[last])
		ranges = append(ranges, fmt.Sprintf("%d-%d", from, end+size-1))
		first = last + 1
	}
	more := ""
	if len(ranges) > maxNamed {
		more = fmt.Sprintf(" and %d more", len(ranges)-maxNamed)
		ranges = ranges[:maxNamed]
	}
	text := fmt.Sprintf("damaged in bytes %s%s of %d", strings.Join(ranges, ", "), more, r.states.Size)
	switch {
	case len(bad) == 0:
		return "its bytes do not hash to its digest, although each part matches"
	case r.n < r.states.Size:
		text += fmt.Sprintf("; it ends after %d", r.n)
	case r.n > r.states.Size:
		text += fmt.Sprintf("; it goes on to %d", r.n)
	}
	return text
}
