// Package block is the block function of SHA-256 over several streams at once on one core.
//
// One stream leaves most of a core idle, as each round waits for the one before. A Kernel takes several through their
// blocks together. It is pure: it starts no goroutine and keeps nothing.
package block

import (
	"errors"
	"fmt"
)

//go:generate go -C ../../../internal/tools run ./lanesgen ../../identity/lanes/block

// Size is the number of bytes of a block.
const Size = 64

// Most is how many streams a Kernel takes at once at most.
const Most = 16

// State is the chaining state of a stream: SHA-256's eight words.
type State = [8]uint32

// Kernel is a choice of code for this processor. The zero Kernel has none: one stream at a time, by the library.
type Kernel struct {
	shani  bool // two to four streams, by the SHA instructions
	avx512 bool // up to sixteen, by AVX-512, in the same time for any number
}

// The smallest numbers of streams for which AVX-512 is the faster code. Beside the SHA instructions eight take 0.91 of
// the speed and nine 1.08; beside the library without them two take 1.37 and three 2.05 on the same processor, but
// others are slower with AVX-512.
const (
	fromSHANI   = 9
	fromLibrary = 3
)

// Best returns the fastest kernel for this processor.
func Best() Kernel { return Kernel{shani: hasSHANI, avx512: hasAVX512} }

// Named returns the kernel of a name: x1 is the library, x4 takes up to four streams and x16 up to sixteen, and no name
// is Best. It says in one line why there is none.
func Named(name string) (Kernel, error) {
	switch name {
	case "":
		return Best(), nil
	case "x1":
		return Kernel{}, nil
	case "x4":
		if !hasSHANI {
			return Kernel{}, errors.New("x4 needs the SHA instructions of an amd64 processor, which this one lacks")
		}
		return Kernel{shani: true}, nil
	case "x16":
		if !hasAVX512 {
			return Kernel{}, errors.New("x16 needs AVX-512, which this processor lacks")
		}
		return Kernel{avx512: true}, nil
	}
	return Kernel{}, fmt.Errorf("no kernel is named %q: want x1, x4 or x16", name)
}

// Names returns the names of the kernels of this processor, which Named takes.
func Names() []string {
	names := []string{"x1"}
	if hasSHANI {
		names = append(names, "x4")
	}
	if hasAVX512 {
		names = append(names, "x16")
	}
	return names
}

// Take returns how many of n streams are best taken next, at most Most. One is left to the library; with three streams
// or more that happens only where nothing can be shared.
func (k Kernel) Take(n int) int {
	from := fromLibrary
	if k.shani {
		from = fromSHANI
	}
	switch {
	case k.avx512 && (n == Most+1 || n == Most+2 && !k.shani):
		return Most - 2 // so that the others are enough to be shared too
	case k.avx512 && n >= from:
		return min(n, Most)
	case k.shani && n > 4 && n%4 == 1:
		return 3
	case k.shani:
		return min(n, 4)
	}
	return min(n, 1)
}

// Run takes the streams through the bytes at p, whose lengths are equal and whole blocks: state[i] through p[i]. It
// panics if they are not, and if Take would never return so many streams. It neither keeps p nor writes to it.
func (k Kernel) Run(state []State, p [][]byte) {
	n := len(p[0])
	for i := range p {
		if len(p[i]) != n {
			panic(fmt.Sprintf("block: %d bytes for stream %d, %d for the first", len(p[i]), i, n))
		}
	}
	if n%Size != 0 || len(state) != len(p) {
		panic(fmt.Sprintf("block: %d bytes, %d states for %d streams", n, len(state), len(p)))
	}
	if n > 0 {
		k.run(state, p)
	}
}
