package blobstore

import (
	"fmt"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
)

// ErrMidstatesDamaged: what is there as the midstates of a copy can't be those. It is an ErrNotFound and an ErrDamaged
// too: the copy has none that can be used, which says nothing about its bytes.
var ErrMidstatesDamaged error = midstatesDamaged{}

type midstatesDamaged struct{}

func (midstatesDamaged) Error() string { return "its midstates are damaged" }

func (midstatesDamaged) Unwrap() []error { return []error{ErrNotFound, ErrDamaged} }

// FitMidstates checks that form has the form of midstates, with segments of so many bytes, of a copy with the digest and
// the size of i, and that there is at least one. ErrMidstatesDamaged. Nothing says that they are the right ones. It is for
// engines.
func FitMidstates(form []byte, i Info, segment int64) error {
	s, err := lanes.ParseSegments(form, segment)
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w", ErrMidstatesDamaged, err)
	case s.Digest != i.Digest || s.Size != i.Size:
		return fmt.Errorf("%w: they are of %s, %d bytes", ErrMidstatesDamaged, s.Digest, s.Size)
	case len(s.Edge) == 0:
		return fmt.Errorf("%w: there are none in a blob of one segment", ErrMidstatesDamaged)
	}
	return nil
}

// FormMidstates returns the form of the midstates of the blob d, of which states are those at its edges, one after the
// other; what is behind them is left out. It returns nil if the blob has one segment, or more than have a form, or if
// there are too few states. It is for engines.
func FormMidstates(states []byte, d identity.Digest, size, segment int64) ([]byte, error) {
	n, one := lanes.Edges(size, segment), int64(len(lanes.State{}))
	if n == 0 || n > lanes.MaxEdges || int64(len(states)) < n*one {
		return nil, nil
	}
	edge := make([]lanes.State, n)
	for i := range edge {
		edge[i] = lanes.State(states[int64(i)*one:])
	}
	s, err := lanes.New(segment, size, d, edge)
	if err != nil {
		return nil, err
	}
	return s.MarshalBinary()
}
