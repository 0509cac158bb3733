package identity

import (
	"cmp"
	"slices"
)

// Difference is the outcome of Compare. The lists are in ascending order of file name.
type Difference struct {
	Same         bool // the same multiset of shard bytes, whatever the files are called
	OnlyA, OnlyB []Shard
}

// Compare sets two manifests against each other as multisets of shard bytes. File names do not count. A shard that one
// side has more often than the other is listed as often as it is over.
func Compare(a, b Manifest) Difference {
	x, y := byContent(a.Shards), byContent(b.Shards)
	var d Difference
	for len(x) > 0 && len(y) > 0 {
		switch c := compareContent(&x[0], &y[0]); {
		case c < 0:
			d.OnlyA, x = append(d.OnlyA, x[0]), x[1:]
		case c > 0:
			d.OnlyB, y = append(d.OnlyB, y[0]), y[1:]
		default:
			x, y = x[1:], y[1:]
		}
	}
	d.OnlyA, d.OnlyB = append(d.OnlyA, x...), append(d.OnlyB, y...)
	slices.SortFunc(d.OnlyA, compareName)
	slices.SortFunc(d.OnlyB, compareName)
	d.Same = len(d.OnlyA)+len(d.OnlyB) == 0
	return d
}

// byContent returns the shards in the order of digest, then of numeric size; those with equal bytes by name.
func byContent(shards []Shard) []Shard {
	sorted := slices.Clone(shards)
	slices.SortFunc(sorted, func(a, b Shard) int { return cmp.Or(compareContent(&a, &b), compareName(a, b)) })
	return sorted
}

func compareContent(a, b *Shard) int {
	return cmp.Or(a.Digest.Compare(b.Digest), cmp.Compare(a.Size, b.Size))
}

func compareName(a, b Shard) int { return cmp.Compare(a.Filename, b.Filename) }
