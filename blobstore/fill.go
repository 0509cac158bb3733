package blobstore

import (
	"fmt"
	"io"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
)

// Fill reads until b is full or r has no more, and returns how much it read. Unlike io.ReadFull it returns r's own
// error, io.EOF at its end: a request body that ends too early says so with io.ErrUnexpectedEOF. It is for engines.
func Fill(r io.Reader, b []byte) (n int, err error) {
	for idle := 0; n < len(b) && err == nil; {
		var m int
		m, err = r.Read(b[n:])
		if n += m; m > 0 {
			idle = 0
		} else if idle++; idle >= 100 && err == nil {
			err = io.ErrNoProgress
		}
	}
	return n, err
}

// AtEnd reads what comes for an upload that has become the blob d: nothing may. ErrUploadUnknown. It is for engines.
func AtEnd(r io.Reader, d identity.Digest) error {
	var more [1]byte
	switch n, err := Fill(r, more[:]); {
	case n > 0:
		return fmt.Errorf("%w: it has ended, as %s", ErrUploadUnknown, d)
	case err != io.EOF:
		return err
	}
	return nil
}

// patience is how long a piece of an upload waits for those of others, that they may be hashed together: about as long
// as four of them take alone.
const patience = 2 * time.Millisecond

// Soon calls late after that, unless stop is called before. It is for the lanes.Pool of an engine.
func Soon(late func()) (stop func() bool) { return time.AfterFunc(patience, late).Stop }
