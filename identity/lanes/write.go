package lanes

import (
	"encoding/binary"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes/block"
)

// Piece is the next bytes of a stream. To takes them in order: an identity.Hash, a Recorder, a Check or a Stream. To
// another Writer they are only written, and its error is lost.
type Piece struct {
	To   io.Writer
	Data []byte
}

// chosen is the kernel that every Write of this process uses, if it is not the best one.
var chosen atomic.Pointer[block.Kernel]

func kernel() block.Kernel {
	if k := chosen.Load(); k != nil {
		return *k
	}
	return block.Best()
}

// Use makes every later Write use the kernel of a name: x1 hashes one stream after the other, x4 up to four at once and
// x16 up to sixteen. No name is the best of this processor, as is without a call. An error is one line that says which
// names there are, or what the processor lacks; then nothing changes. Whatever is used, the hashes are the same.
func Use(name string) error {
	k, err := block.Named(name)
	if err != nil {
		return err
	}
	chosen.Store(&k)
	return nil
}

// Kernels returns the names that Use takes on this processor, slowest first.
func Kernels() []string { return block.Names() }

// Width returns how many streams at a time Write makes use of on one core; 1: it takes one after the other.
func Width() int { return kernel().Take(block.Most) }

// worthwhile is the length below which a piece is hashed alone, as sharing a core costs about as much as it saves.
const worthwhile = 2 << 10

// Write writes every piece to its stream, several at once where this processor can, and otherwise by the Write of each.
// A single stream is always hashed by its own Write. The pieces may have any lengths, but the best are of one length,
// and in memory of Buffers. It panics if two pieces are for one stream.
func Write(pieces ...Piece) {
	k := kernel()
	if k.Take(len(pieces)) <= 1 {
		for _, p := range pieces {
			p.To.Write(p.Data)
		}
		return
	}
	distinct(pieces)
	live := make([]*lane, 0, len(pieces))
	for _, p := range pieces {
		if l := (&lane{to: sharerOf(p.To), rest: p.Data}); l.next() {
			live = append(live, l)
		}
	}
	for len(live) > 0 {
		live = together(k, live)
	}
}

func distinct(pieces []Piece) {
	for i := range pieces {
		for j := range i {
			if pieces[i].To == pieces[j].To {
				panic(fmt.Sprintf("lanes: pieces %d and %d are for one stream", j, i))
			}
		}
	}
}

// together takes the first lanes as far as all of them go, and returns those that are not at their end.
func together(k block.Kernel, live []*lane) []*lane {
	n := k.Take(len(live))
	if n == 1 {
		live[0].alone()
		return live[1:]
	}
	group := live[:n]
	size := group[0].whole
	for _, l := range group {
		size = min(size, l.whole)
	}
	var states [block.Most]block.State
	var at [block.Most][]byte
	for i, l := range group {
		states[i], at[i] = l.state, l.rest[:size]
	}
	k.Run(states[:n], at[:n])
	left := live[:0]
	for i, l := range group {
		l.state = states[i]
		if l.advance(size); l.whole > 0 || l.next() {
			left = append(left, l)
		}
	}
	return append(left, live[n:]...)
}

// lane is a piece on its way into its stream. Between load and store its hash stands still, and state goes on.
type lane struct {
	to    sharer
	rest  []byte // of the piece
	whole int    // bytes of rest, all blocks, that state may go through before it is stored
	hash  identity.Hash
	state block.State
	size  uint64 // bytes that state is of
	done  int    // of them, those since load
}

// next goes on with the piece until there is something to share. It returns false if all of the piece is written.
func (l *lane) next() bool {
	l.store()
	for len(l.rest) >= worthwhile {
		h, n := l.to.share(len(l.rest))
		if n == 0 {
			break
		}
		if n >= worthwhile {
			if l.load(h, n); l.whole > 0 {
				return true
			}
			n = block.Size - int(l.size%block.Size)
		}
		l.write(n)
	}
	l.write(len(l.rest))
	return false
}

// load takes the state of h for the next n bytes, less what is no whole block, if h is at the edge of a block.
func (l *lane) load(h identity.Hash, n int) {
	saved := save(h)
	l.size, l.done = savedLength(saved), 0
	if l.size%block.Size != 0 {
		return
	}
	l.hash, l.whole = h, n-n%block.Size
	for i := range l.state {
		l.state[i] = binary.BigEndian.Uint32(saved[len(savedMagic)+4*i:])
	}
}

func (l *lane) advance(n int) {
	l.rest, l.whole = l.rest[n:], l.whole-n
	l.size, l.done = l.size+uint64(n), l.done+n
}

// store gives the state back to the hash.
func (l *lane) store() {
	if l.done == 0 {
		return
	}
	var s State
	for i, word := range l.state {
		binary.BigEndian.PutUint32(s[4*i:], word)
	}
	if err := setState(l.hash, s, int64(l.size)); err != nil {
		panic(fmt.Sprintf("lanes: SHA-256 refuses a state of the known layout: %v", err))
	}
	l.to.shared(l.done)
	l.done = 0
}

// alone ends the piece by the stream's own Write.
func (l *lane) alone() {
	l.store()
	l.write(len(l.rest))
}

// write gives the stream the next n bytes by its own Write.
func (l *lane) write(n int) {
	l.to.Write(l.rest[:n])
	l.rest = l.rest[n:]
}

// sharer is a stream that another hasher can take a part of the way.
type sharer interface {
	io.Writer

	// share returns the hash of the stream, and how many of the next n bytes may go into it before shared is called:
	// none if they must be written.
	share(n int) (identity.Hash, int)

	// shared says that so many bytes went into the hash that share returned.
	shared(n int)
}

func sharerOf(w io.Writer) sharer {
	switch w := w.(type) {
	case sharer:
		return w
	case identity.Hash:
		return unbounded{w}
	}
	return opaque{w}
}

type unbounded struct{ identity.Hash }

func (u unbounded) share(n int) (identity.Hash, int) { return u.Hash, n }
func (unbounded) shared(int)                         {}

type opaque struct{ io.Writer }

func (opaque) share(int) (identity.Hash, int) { return nil, 0 }
func (opaque) shared(int)                     {}
