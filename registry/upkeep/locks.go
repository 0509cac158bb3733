package upkeep

import (
	"encoding/binary"
	"slices"
	"sync"

	"github.com/kiln-registry/kiln-registry/identity"
)

// stripes is how many locks there are for all digests. A manifest of 4,096 blobs holds about two thirds of them while
// it is put: the collector leaves what it can't have and comes back later.
const stripes = 4096

// Locks keeps the making of references to blobs apart from their removal, digest by digest. The zero Locks is ready. It
// is safe for concurrent use, within one process.
//
// Whoever makes a blob referred to holds its digest from before it looks at the blob, or commits it, until the
// reference is in the index. The collector takes a digest for as long as it looks for references to the blob and, if it
// finds none, removes it. Holders don't keep each other out, and the collector never waits, so that nobody waits
// longer than it takes to remove one blob.
type Locks struct{ stripe [stripes]sync.RWMutex }

func stripeOf(d identity.Digest) uint16 { return binary.BigEndian.Uint16(d[:]) % stripes }

// Hold keeps the blobs of these digests from being removed until release, which must be called once. The caller must
// not hold any digest already.
func (l *Locks) Hold(ds ...identity.Digest) (release func()) {
	held := make([]uint16, len(ds))
	for i, d := range ds {
		held[i] = stripeOf(d)
	}
	slices.Sort(held)
	held = slices.Compact(held)
	for _, s := range held {
		l.stripe[s].RLock()
	}
	return func() {
		for _, s := range held {
			l.stripe[s].RUnlock()
		}
	}
}

// take keeps others from holding the digest until release. It is false if somebody holds it.
func (l *Locks) take(d identity.Digest) (release func(), ok bool) {
	s := &l.stripe[stripeOf(d)]
	return s.Unlock, s.TryLock()
}
