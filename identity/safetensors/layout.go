package safetensors

import (
	"cmp"
	"math/bits"
	"slices"
)

// checkSize checks that the shape of t needs exactly its range.
func checkSize(t Tensor) error {
	n, ok := t.bits()
	switch have := t.End - t.Begin; {
	case !ok:
		return refuse(CodeSizeMismatch, "tensor %+.80q: the shape %s of %s needs more than 2^64 bits, its range has %d bytes",
			t.Name, shapeText(t.Shape), t.DType, have)
	case n%8 != 0 || n/8 != have:
		return refuse(CodeSizeMismatch, "tensor %+.80q: the shape %s of %s needs %d bytes, its range %d-%d has %d",
			t.Name, shapeText(t.Shape), t.DType, n/8+min(n%8, 1), t.Begin, t.End, have)
	}
	return nil
}

// bits returns the size of t in bits, false when it overflows. As in the reference implementation the factors are
// multiplied from left to right, so a zero after an overflow does not help.
func (t Tensor) bits() (uint64, bool) {
	n := uint64(1)
	for _, d := range t.Shape {
		hi, lo := bits.Mul64(n, d)
		if hi != 0 {
			return 0, false
		}
		n = lo
	}
	hi, n := bits.Mul64(n, t.DType.Bits())
	return n, hi == 0
}

// checkLayout sorts tensors by their place and checks that they cover space bytes without gap or overlap.
func checkLayout(tensors []Tensor, space uint64) error {
	slices.SortStableFunc(tensors, func(a, b Tensor) int {
		return cmp.Or(cmp.Compare(a.Begin, b.Begin), cmp.Compare(a.End, b.End))
	})
	var at uint64
	before := "" // the last tensor that has bytes
	for _, t := range tensors {
		switch {
		case t.Begin > at:
			return refuse(CodeOffsetGap, "nothing lies at bytes %d-%d of the data, before tensor %+.80q", at, t.Begin, t.Name)
		case t.Begin < at && t.Begin == t.End:
			return refuse(CodeOffsetGap, "tensor %+.80q, of no bytes, begins at %d, inside tensor %+.80q, which ends at %d",
				t.Name, t.Begin, before, at)
		case t.Begin < at:
			return refuse(CodeOffsetOverlap, "tensor %+.80q begins at %d, inside tensor %+.80q, which ends at %d",
				t.Name, t.Begin, before, at)
		}
		if t.End > at {
			at, before = t.End, t.Name
		}
	}
	switch {
	case at > space:
		return refuse(CodeTruncated, "the header promises %d bytes of data, %d are there (%d short)", at, space, at-space)
	case at < space:
		return refuse(CodeTrailingBytes, "%d bytes follow the last tensor", space-at)
	}
	return nil
}
