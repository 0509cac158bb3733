package pgkv

import (
	"maps"
	"slices"
	"sort"

	"github.com/jackc/pgx/v5"
)

// writes are what a transaction has written so far. The zero value is none.
type writes struct {
	values map[string][]byte // nil: deleted
	sorted []string          // keys; never changed in place
	fresh  []string          // keys that are not yet in sorted
}

// put notes a value, which is kept; nil deletes.
func (w *writes) put(key string, value []byte) {
	if w.values == nil {
		w.values = map[string][]byte{}
	}
	if _, had := w.values[key]; !had {
		w.fresh = append(w.fresh, key)
	}
	w.values[key] = value
}

// between returns the keys from <= key < to in order; a nil to means to the end.
func (w *writes) between(from, to []byte) []string {
	if len(w.fresh) > 0 {
		slices.Sort(w.fresh)
		w.sorted = merged(w.sorted, w.fresh)
		w.fresh = nil
	}
	first := sort.SearchStrings(w.sorted, string(from))
	last := len(w.sorted)
	if to != nil {
		last = max(first, sort.SearchStrings(w.sorted, string(to)))
	}
	return w.sorted[first:last]
}

func merged(a, b []string) []string {
	all := make([]string, 0, len(a)+len(b))
	for len(a) > 0 && len(b) > 0 {
		if a[0] < b[0] {
			all, a = append(all, a[0]), a[1:]
		} else {
			all, b = append(all, b[0]), b[1:]
		}
	}
	return append(append(all, a...), b...)
}

// What one statement writes at most.
const (
	batchRows  = 8192
	batchBytes = 8 << 20
)

// queue adds the statements that write to a batch, in order of key: so updates seldom wait for each other in a ring.
func (w *writes) queue(b *pgx.Batch, sql statements) {
	var keys, values, gone [][]byte
	size := 0
	flush := func() {
		if len(keys) > 0 {
			b.Queue(sql.put, keys, values)
		}
		if len(gone) > 0 {
			b.Queue(sql.remove, gone)
		}
		keys, values, gone, size = nil, nil, nil, 0
	}
	for _, k := range slices.Sorted(maps.Keys(w.values)) {
		v := w.values[k]
		if v == nil {
			gone = append(gone, []byte(k))
		} else {
			keys, values = append(keys, []byte(k)), append(values, v)
		}
		size += len(k) + len(v)
		if size >= batchBytes || len(keys)+len(gone) >= batchRows {
			flush()
		}
	}
	flush()
}
