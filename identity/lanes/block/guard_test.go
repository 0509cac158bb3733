package block

import (
	"testing"

	"golang.org/x/sys/unix"
)

// guarded returns a copy of b that can only be read and whose last byte is the last one before memory that can't even be
// read.
func guarded(t testing.TB, b []byte) []byte {
	t.Helper()
	page := unix.Getpagesize()
	size := (len(b) + page - 1) / page * page
	m, err := unix.Mmap(-1, 0, size+page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(m) })
	at := m[size-len(b) : size : size]
	copy(at, b)
	if err := unix.Mprotect(m[size:], unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mprotect(m[:size], unix.PROT_READ); err != nil {
		t.Fatal(err)
	}
	return at
}
