package lanes

import (
	"errors"
	"fmt"

	"github.com/kiln-registry/kiln-registry/identity"
)

// ErrMismatch: bytes do not lead from one midstate to the next. Either they are damaged, or the midstates are not those
// of the blob; hashing all of it from the start tells which.
var ErrMismatch = errors.New("bytes and midstates do not match")

// Verify checks that b is segment i. ErrMismatch. If it returned nil for every segment, their bytes together are the
// blob. Goroutines may check different segments at once.
func (s *States) Verify(i int, b []byte) error {
	c := s.Check(i)
	c.Write(b)
	return c.Err()
}

// Check is the check of one segment, to which the segment's bytes are written in order. It is not safe for concurrent
// use.
type Check struct {
	s    *States
	i    int
	hash identity.Hash
	left int64 // bytes to come; negative after too many
}

// Check begins the check of segment i.
func (s *States) Check(i int) *Check {
	off, n := s.Range(i)
	c := &Check{s: s, i: i, hash: identity.NewHash(), left: n}
	if i > 0 {
		if err := setState(c.hash, s.Edge[i-1], off); err != nil {
			panic(fmt.Sprintf("lanes: SHA-256 refuses a state of the known layout: %v", err))
		}
	}
	return c
}

// Write takes the next bytes of the segment. It never returns an error: Err does.
func (c *Check) Write(b []byte) (int, error) {
	c.left -= int64(len(b))
	if c.left >= 0 {
		c.hash.Write(b)
	}
	return len(b), nil
}

// Clone returns a check of the same segment that the same bytes were written to.
func (c *Check) Clone() *Check {
	twin := *c
	twin.hash = identity.NewHash()
	if err := twin.hash.UnmarshalBinary(save(c.hash)); err != nil {
		panic(fmt.Sprintf("lanes: SHA-256 refuses what it saved: %v", err))
	}
	return &twin
}

func (c *Check) share(n int) (identity.Hash, int) {
	if int64(n) > c.left {
		return nil, 0
	}
	return c.hash, n
}

func (c *Check) shared(n int) { c.left -= int64(n) }

// Err says whether exactly the bytes of the segment were written. ErrMismatch.
func (c *Check) Err() error {
	off, n := c.s.Range(c.i)
	switch {
	case c.left != 0:
		return fmt.Errorf("segment %d at %d: %w: %d bytes, want %d", c.i, off, ErrMismatch, n-c.left, n)
	case !c.arrived():
		return fmt.Errorf("segment %d, %d bytes at %d: %w", c.i, n, off, ErrMismatch)
	}
	return nil
}

func (c *Check) arrived() bool {
	if c.i < len(c.s.Edge) {
		return stateOf(c.hash) == c.s.Edge[c.i]
	}
	return identity.DigestOf(c.hash) == c.s.Digest
}

// Stream checks a whole blob that is written to it from its start, in pieces of any size, and names the segments that
// are damaged. It is not safe for concurrent use.
type Stream struct {
	s       *States
	check   *Check
	damaged []int
}

// Stream begins the check of a whole blob.
func (s *States) Stream() *Stream { return &Stream{s: s, check: s.Check(0)} }

// Write takes the next bytes of the blob. It never returns an error. What goes past the end damages the last segment.
func (t *Stream) Write(b []byte) (int, error) {
	n := len(b)
	for t.check.i < len(t.s.Edge) && int64(len(b)) >= t.check.left {
		whole := t.check.left
		t.check.Write(b[:whole])
		b = b[whole:]
		t.edge()
	}
	t.check.Write(b)
	return n, nil
}

// edge goes on to the next segment if all bytes of this one came and it is not the last one.
func (t *Stream) edge() {
	if t.check.left > 0 || t.check.i == len(t.s.Edge) {
		return
	}
	if t.check.Err() != nil {
		t.damaged = append(t.damaged, t.check.i)
	}
	t.check = t.s.Check(t.check.i + 1)
}

func (t *Stream) share(n int) (identity.Hash, int) {
	if t.check.i < len(t.s.Edge) {
		n = int(min(int64(n), t.check.left))
	}
	return t.check.share(n)
}

func (t *Stream) shared(n int) {
	t.check.shared(n)
	t.edge()
}

// Damaged returns the segments so far of which all bytes came, except the last one of the blob, and did not match.
func (t *Stream) Damaged() []int { return t.damaged }

// End ends the blob: it returns every segment that did not match or did not come, and nil if the bytes are the blob.
// Nothing may be written afterwards.
func (t *Stream) End() []int {
	damaged := t.damaged
	if t.check.Err() != nil {
		damaged = append(damaged, t.check.i)
	}
	for i := t.check.i + 1; i < t.s.Len(); i++ {
		damaged = append(damaged, i)
	}
	return damaged
}
