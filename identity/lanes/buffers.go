package lanes

import "sync/atomic"

// The addresses that the lanes of a kernel read at one time must not be equal modulo pageSize, as they compete for the
// same lines of the first cache. Buffers sets each buffer off by stagger more than the one before.
const (
	pageSize = 4 << 10
	stagger  = 5 * 64 // an odd multiple of a line
)

// Buffers returns n buffers of size bytes for pieces that are written together, in one piece of memory that is laid out
// as the kernels like it. Their capacity is size too.
func Buffers(n, size int) [][]byte {
	stride := (size+pageSize-1)/pageSize*pageSize + stagger
	all := make([]byte, n*stride)
	bufs := make([][]byte, n)
	for i := range bufs {
		bufs[i] = all[i*stride : i*stride+size : i*stride+size]
	}
	return bufs
}

// made counts the buffers that Buffer made.
var made atomic.Uint32

// Buffer returns one buffer of size bytes. Those of successive calls are set off from one another as those of Buffers
// are.
func Buffer(size int) []byte {
	off := offset()
	return make([]byte, off+size)[off:]
}

// Slack is how many bytes more than the buffer the memory has that Within takes.
const Slack = pageSize

// Within is Buffer in memory that the caller has, which begins at a page: a part of it, Slack bytes shorter.
func Within(mem []byte) []byte {
	off := offset()
	return mem[off : off+len(mem)-Slack]
}

func offset() int { return int(made.Add(1)) * stagger % pageSize }
