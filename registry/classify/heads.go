package classify

import (
	"encoding/binary"
	"io"
	"sync"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
)

// headLen is how much of a blob tells a safetensors file from others, in bytes: the length of the header, and its brace.
const headLen = 9

// Head is the beginning of a blob: of one that is on its way, what was read of it so far. The zero Head has seen nothing.
// It is not safe for concurrent use.
type Head struct {
	b [headLen]byte
	n int
}

// Watch returns a reader of what r has, from the start of the blob on, that notes how it begins.
func (h *Head) Watch(r io.Reader) io.Reader { return &watching{r, h} }

type watching struct {
	io.Reader
	h *Head
}

func (w *watching) Read(b []byte) (int, error) {
	n, err := w.Reader.Read(b)
	w.h.n += copy(w.h.b[w.h.n:], b[:n])
	return n, err
}

// isSafetensors says whether a blob of so many bytes may be a safetensors file: its header fits, and opens with a brace.
func (h *Head) isSafetensors(size int64) bool {
	length := binary.LittleEndian.Uint64(h.b[:8])
	return h.n == headLen && size > headLen && length >= 2 && length <= uint64(size-8) &&
		length <= safetensors.MaxHeader && h.b[8] == '{'
}

// mostHeads is how many blobs Heads remembers at least, once there were as many. They take 4 MiB.
const mostHeads = 1 << 15

// Heads are blobs of which was seen, as they came, that they begin as a safetensors file does. It knows the latest ones,
// and forgets all with the process: it saves the reading of what was just written. The zero Heads knows none. It is safe
// for concurrent use.
type Heads struct {
	mu         sync.Mutex
	young, old map[identity.Digest]struct{}
}

// Note remembers a blob of so many bytes, if it begins as a safetensors file. A nil head says nothing.
func (s *Heads) Note(d identity.Digest, size int64, h *Head) {
	if h == nil || !h.isSafetensors(size) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.young == nil || len(s.young) == mostHeads {
		s.young, s.old = map[identity.Digest]struct{}{}, s.young
	}
	s.young[d] = struct{}{}
}

// Safetensors says whether it is known that a blob begins as a safetensors file.
func (s *Heads) Safetensors(d identity.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, young := s.young[d]; young {
		return true
	}
	_, old := s.old[d]
	return old
}

// Over returns the blobs of which some are known in this way.
func (s *Heads) Over(blobs Blobs) Blobs { return seen{blobs, s} }

type seen struct {
	Blobs
	*Heads
}
