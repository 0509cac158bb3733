package strictjson

import (
	"bytes"
	"hash/maphash"
)

// fewNames is how many names of one object are compared one by one.
const fewNames = 16

// nameSet tells whether a name of one object came before. It keeps where names stand, not the names: four bytes for one,
// and as many again that are free, so that an object of many short names takes little more than its text.
type nameSet struct {
	few  [fewNames]int32 // offsets of the first names
	n    int
	many []int32 // a hash table of all offsets, each plus one; 0: free. nil while there are few
}

// seed is of the hashes of names, which nobody outside can know.
var seed = maphash.MakeSeed()

// add reports whether a name is new, which stands at an offset of data.
func (s *nameSet) add(data []byte, at int, name []byte) bool {
	if s.many == nil {
		for _, have := range s.few[:s.n] {
			if isAt(data, have, name) {
				return false
			}
		}
		if s.n < fewNames {
			s.few[s.n] = int32(at)
			s.n++
			return true
		}
		s.grow(data, 4*fewNames, s.few[:])
	}
	free, has := s.find(data, name)
	if has {
		return false
	}
	s.many[free] = int32(at) + 1
	if s.n++; s.n > len(s.many)/4*3 {
		all := s.many
		for i := range all {
			all[i]--
		}
		s.grow(data, 2*len(all), all)
	}
	return true
}

// grow makes a table of size places, a power of two, with the names at offsets, of which those below 0 are none.
func (s *nameSet) grow(data []byte, size int, offsets []int32) {
	s.many = make([]int32, size)
	for _, at := range offsets {
		if at >= 0 {
			free, _ := s.find(data, nameAt(data, at))
			s.many[free] = at + 1
		}
	}
}

// find returns the place of a name, or the one where it belongs.
func (s *nameSet) find(data []byte, name []byte) (place int, has bool) {
	last := len(s.many) - 1
	for i := int(maphash.Bytes(seed, name)) & last; ; i = (i + 1) & last {
		switch at := s.many[i]; {
		case at == 0:
			return i, false
		case isAt(data, at-1, name):
			return i, true
		}
	}
}

// nameAt returns the name that stands at an offset, decoded. It was read there before.
func nameAt(data []byte, at int32) []byte {
	text := data[at+1:]
	if n := plain(text); text[n] == '"' {
		return text[:n]
	}
	r := Reader{data: data, pos: int(at)}
	name, _ := r.text()
	return name
}

// isAt says whether a name is the one that stands at an offset.
func isAt(data []byte, at int32, name []byte) bool {
	if len(name) > 0 && data[at+1] != name[0] && data[at+1] != '\\' {
		return false
	}
	return bytes.Equal(nameAt(data, at), name)
}
