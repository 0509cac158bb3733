// Package extsort sorts more pairs of key and value than memory should hold: it keeps sorted runs of them in temporary
// files and merges those.
package extsort

import (
	"bufio"
	"bytes"
	"container/heap"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
)

// runBytes is about how many bytes of pairs are sorted in memory at a time.
const runBytes = 64 << 20

// bufferBytes are those of one file that is read or written.
const bufferBytes = 256 << 10

// Sorter takes pairs in any order and gives them back in that of their keys as bytes. It is used by one goroutine. The
// zero Sorter is ready; it must be closed.
type Sorter struct {
	Dir string // folder of the temporary files, which have no name there; empty: the system's

	run   int // bytes of a run; 0: runBytes
	arena []byte
	pairs []pair
	runs  []*os.File
}

// pair is where a key and its value begin and end in an arena.
type pair struct{ key, value, end int }

// Add takes a pair, which it copies.
func (s *Sorter) Add(key, value []byte) error {
	if s.run == 0 {
		s.run = runBytes
	}
	if len(s.pairs) > 0 && len(s.arena)+len(key)+len(value) > s.run {
		if err := s.spill(); err != nil {
			return fmt.Errorf("sort: %w", err)
		}
	}
	p := pair{key: len(s.arena), value: len(s.arena) + len(key)}
	s.arena = append(append(s.arena, key...), value...)
	p.end = len(s.arena)
	s.pairs = append(s.pairs, p)
	return nil
}

func (s *Sorter) sort() {
	slices.SortFunc(s.pairs, func(a, b pair) int {
		return bytes.Compare(s.arena[a.key:a.value], s.arena[b.key:b.value])
	})
}

// spill writes what is in memory to a file.
func (s *Sorter) spill() error {
	f, err := os.CreateTemp(s.Dir, ".sort-")
	if err != nil {
		return err
	}
	s.runs = append(s.runs, f)
	if err := os.Remove(f.Name()); err != nil {
		return err
	}
	s.sort()
	w := bufio.NewWriterSize(f, bufferBytes)
	var head []byte
	for _, p := range s.pairs {
		head = binary.AppendUvarint(binary.AppendUvarint(head[:0], uint64(p.value-p.key)), uint64(p.end-p.value))
		w.Write(head) // the error is that of Flush
		w.Write(s.arena[p.key:p.end])
	}
	s.arena, s.pairs = s.arena[:0], s.pairs[:0]
	return w.Flush()
}

// Each calls visit with every pair in order of key, and ends with its first error. Pairs of equal keys come one after the
// other, in no fixed order. What visit is given is valid until it returns. Nothing may be added after it.
func (s *Sorter) Each(visit func(key, value []byte) error) error {
	if len(s.runs) == 0 {
		s.sort()
		for _, p := range s.pairs {
			if err := visit(s.arena[p.key:p.value], s.arena[p.value:p.end]); err != nil {
				return err
			}
		}
		return nil
	}
	if err := s.spill(); err != nil {
		return fmt.Errorf("sort: %w", err)
	}
	s.arena, s.pairs = nil, nil
	return s.merge(visit)
}

func (s *Sorter) merge(visit func(key, value []byte) error) error {
	var m merging
	for _, f := range s.runs {
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return fmt.Errorf("sort: %w", err)
		}
		r := &run{from: bufio.NewReaderSize(f, bufferBytes)}
		if more, err := r.next(); err != nil {
			return fmt.Errorf("sort: %w", err)
		} else if more {
			m = append(m, r)
		}
	}
	heap.Init(&m)
	for len(m) > 0 {
		r := m[0]
		if err := visit(r.data[:r.key], r.data[r.key:]); err != nil {
			return err
		}
		more, err := r.next()
		if err != nil {
			return fmt.Errorf("sort: %w", err)
		}
		if more {
			heap.Fix(&m, 0)
		} else {
			heap.Pop(&m)
		}
	}
	return nil
}

// Close gives back the files and the memory.
func (s *Sorter) Close() (err error) {
	for _, f := range s.runs {
		err = errors.Join(err, f.Close())
	}
	s.arena, s.pairs, s.runs = nil, nil, nil
	return err
}

// run is a sorted file at one of its pairs.
type run struct {
	from *bufio.Reader
	data []byte // key and value
	key  int    // bytes of the key
}

// next reads the next pair; more is false at the end.
func (r *run) next() (more bool, err error) {
	key, err := binary.ReadUvarint(r.from)
	if err == io.EOF {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	value, err := binary.ReadUvarint(r.from)
	if err != nil {
		return false, err
	}
	r.key, r.data = int(key), slices.Grow(r.data[:0], int(key+value))[:key+value]
	_, err = io.ReadFull(r.from, r.data)
	return true, err
}

// merging are runs, the one with the smallest key first.
type merging []*run

func (m merging) Len() int { return len(m) }
func (m merging) Less(i, j int) bool {
	return bytes.Compare(m[i].data[:m[i].key], m[j].data[:m[j].key]) < 0
}
func (m merging) Swap(i, j int) { m[i], m[j] = m[j], m[i] }
func (m *merging) Push(x any)   { *m = append(*m, x.(*run)) }

// Pop implements heap.Interface.
func (m *merging) Pop() any {
	last := len(*m) - 1
	r := (*m)[last]
	*m = (*m)[:last]
	return r
}
