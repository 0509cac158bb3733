package identity

import (
	"encoding/binary"
	"math/bits"
	"slices"
)

// Values of the fixed members of a base-weight shard manifest.
const (
	ManifestType       = "kiln.base-weight-shards.v1"
	AggregateAlgorithm = "kiln.base-model-content.v1"
	SchemaVersion      = 1
	MaxShards          = 4096 // Kiln's limit on the shards of one base
	MaxFilename        = 255  // bytes
	Extension          = ".safetensors"
)

// NotProven are the things about a model that a shard manifest does not prove. Nobody may change it.
var NotProven = []string{"model config", "tokenizer", "chat template", "precision", "kernels"}

// Shard is one safetensors file of a base model.
type Shard struct {
	Filename string // one portable path component, ends with .safetensors
	Size     uint64 // bytes, never 0
	Digest   Digest // SHA-256 of the whole file
}

// Manifest is a base-weight shard manifest (kiln.base-weight-shards.v1): the shards of one base model in ascending
// order of file name, their total size and their aggregate. The zero Manifest is not valid.
type Manifest struct {
	Aggregate Aggregate
	TotalSize uint64 // bytes
	Shards    []Shard
}

// Summary is the bounded form of a manifest which every routine view shows: it does not grow with the shard count.
type Summary struct {
	ManifestType       string    `json:"manifest_type"`
	AggregateAlgorithm string    `json:"aggregate_algorithm"`
	Aggregate          Aggregate `json:"aggregate_sha256"`
	ShardCount         int       `json:"shard_count"`
	TotalSize          uint64    `json:"total_size_bytes"`
}

// New sorts shards by file name, totals and sums them, and returns the manifest if it is valid. It does not keep
// or change the slice. The error is an *Error; its shard index counts in the order of file name.
func New(shards []Shard) (Manifest, error) {
	m := Manifest{Shards: slices.Clone(shards)}
	slices.SortFunc(m.Shards, compareName)
	for _, s := range m.Shards {
		m.TotalSize += s.Size
	}
	if err := m.validateShards(); err != nil {
		return Manifest{}, err
	}
	m.Aggregate = aggregate(m.Shards)
	return m, nil
}

// Summary returns the bounded form of m.
func (m Manifest) Summary() Summary {
	return Summary{ManifestType, AggregateAlgorithm, m.Aggregate, len(m.Shards), m.TotalSize}
}

// SameContent says whether m and o are the same multiset of shard bytes, whatever the files are called.
func (m Manifest) SameContent(o Manifest) bool { return m.Aggregate == o.Aggregate }

// aggregate hashes the domain and a NUL, the count, and for each record its size and digest, integers as 8
// little-endian bytes, records in the order of digest and then of numeric size.
func aggregate(shards []Shard) Aggregate {
	const record = 8 + len(Digest{})
	h := NewHash()
	buf := append(append(make([]byte, 0, 100*record), AggregateAlgorithm...), 0)
	buf = binary.LittleEndian.AppendUint64(buf, uint64(len(shards)))
	for _, at := range contentOrder(shards) {
		if len(buf)+record > cap(buf) {
			h.Write(buf)
			buf = buf[:0]
		}
		buf = binary.LittleEndian.AppendUint64(buf, shards[at].Size)
		buf = append(buf, shards[at].Digest[:]...)
	}
	h.Write(buf)
	return Aggregate(DigestOf(h))
}

// contentOrder returns the places of the shards in the order of digest and then of numeric size. It sorts numbers made of
// the start of a digest and the place, which all but settles it, and then the runs that start alike.
func contentOrder(shards []Shard) []uint64 {
	places := uint64(1)<<bits.Len(uint(len(shards))) - 1
	keys := make([]uint64, len(shards))
	for i := range shards {
		keys[i] = binary.BigEndian.Uint64(shards[i].Digest[:])&^places | uint64(i)
	}
	keys = sortSpread(keys)
	for i := 0; i < len(keys); {
		end := i + 1
		for end < len(keys) && keys[end]&^places == keys[i]&^places {
			end++
		}
		if end > i+1 {
			slices.SortFunc(keys[i:end], func(a, b uint64) int {
				return compareContent(&shards[a&places], &shards[b&places])
			})
		}
		i = end
	}
	for i := range keys {
		keys[i] &= places
	}
	return keys
}

// sortSpread sorts numbers, fastest those that are spread evenly, as the starts of digests are: it deals them out by
// their first byte, and sorts what each byte has.
func sortSpread(keys []uint64) []uint64 {
	const few = 256 // which are sorted faster as they are
	if len(keys) <= few {
		slices.Sort(keys)
		return keys
	}
	var ends [256]int
	for _, k := range keys {
		ends[k>>56]++
	}
	starts, sum := ends, 0
	for i, n := range ends {
		starts[i] = sum
		sum += n
		ends[i] = starts[i]
	}
	sorted := make([]uint64, len(keys))
	for _, k := range keys {
		sorted[ends[k>>56]] = k
		ends[k>>56]++
	}
	for i, from := range starts {
		slices.Sort(sorted[from:ends[i]])
	}
	return sorted
}
