package blobstore

import "io"

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
