package blobstore

import (
	"fmt"

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
