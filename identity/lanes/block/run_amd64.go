//go:build !purego

package block

import (
	"fmt"

	"github.com/klauspost/cpuid/v2"
)

// cpuid names AVX and AVX-512 only where the operating system keeps their registers.
var (
	hasSHANI  = cpuid.CPU.Supports(cpuid.SHA, cpuid.SSSE3, cpuid.SSE4, cpuid.AVX)
	hasAVX512 = cpuid.CPU.Supports(cpuid.AVX512F, cpuid.AVX512BW, cpuid.AVX512VL)
)

// perCall is how many bytes go through in one call, in which a goroutine can't be preempted: some 60 µs.
const perCall = 256 << 10

func (k Kernel) run(state []State, p [][]byte) {
	n := len(p)
	for off, step := 0, perCall/Most; off < len(p[0]); off += step {
		if n <= 4 {
			step = perCall / 4
		}
		blocks := min(step, len(p[0])-off) / Size
		switch {
		case k.avx512 && n >= 2 && n <= Most && (n > 4 || !k.shani):
			runX16(state, p, off, blocks)
		case k.shani && n == 4:
			shaniX4((*[4]State)(state), &[4]*byte{&p[0][off], &p[1][off], &p[2][off], &p[3][off]}, blocks)
		case k.shani && n == 3:
			shaniX3((*[3]State)(state), &[3]*byte{&p[0][off], &p[1][off], &p[2][off]}, blocks)
		case k.shani && n == 2:
			shaniX2((*[2]State)(state), &[2]*byte{&p[0][off], &p[1][off]}, blocks)
		default:
			panic(fmt.Sprintf("block: %d streams for %+v", n, k))
		}
	}
}

// runX16 has the lanes without a stream of their own do the first one's work again.
func runX16(state []State, p [][]byte, off, blocks int) {
	var words [8][Most]uint32
	var at [Most]*byte
	for lane := range Most {
		stream := lane
		if lane >= len(p) {
			stream = 0
		}
		at[lane] = &p[stream][off]
		for i, word := range state[stream] {
			words[i][lane] = word
		}
	}
	avx512X16(&words, &at, blocks)
	for stream := range state {
		for i := range words {
			state[stream][i] = words[i][stream]
		}
	}
}
