package hashing

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/identity/lanes"
)

const (
	arena     = 4 << 20   // bytes that the streams of a core share to read to
	cached    = 128 << 10 // bytes read at a time that are in the page cache: what stays in a core's own cache meanwhile
	direct    = 1 << 20   // bytes read at a time past the page cache, at most
	leastCold = 4 << 20   // bytes of a part below which it is not asked where they are
	alignment = 4 << 10   // of what is read past the page cache, in the file; a page
	stagger   = 512       // as in lanes.Buffers, and as disks want it of addresses in memory
)

// buffers are those of one core, one for each stream. Pages that are not used take no memory.
type buffers struct {
	all []byte
	of  [][]byte
}

// split makes n buffers.
func (b *buffers) split(n int) (err error) {
	if n == len(b.of) {
		return nil
	}
	if b.all == nil {
		size := arena + lanes.Width()*stagger
		b.all, err = unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
		if err != nil {
			return fmt.Errorf("take %d bytes of memory: %w", size, err)
		}
	}
	size := min(direct, arena/n/cached*cached)
	b.of = b.of[:0]
	for i := range n {
		b.of = append(b.of, b.all[i*(size+stagger):][:size])
	}
	return nil
}

func (b *buffers) free() {
	if b.all != nil {
		_ = unix.Munmap(b.all)
	}
}

// stream is a job that was begun.
type stream struct {
	job Job
	Part
	from  int64    // Off at first
	past  *os.File // reads past the page cache; nil: through it
	piece []byte   // that is to be hashed
	err   error    // why there is no more; io.EOF: it is the end. Of a stream that was ended: what ends the crew
}

// next reads the next piece to buf, which ends on a multiple of the size of one.
func (s *stream) next(buf []byte) {
	s.piece = nil
	if s.File == nil {
		if s.Part, s.err = s.job.Open(); s.err != nil {
			return
		}
		s.from = s.Off
		s.past = past(s.Part)
	}
	if s.past == nil || !s.direct(buf) {
		s.buffered(buf[:min(cached, len(buf))])
	}
	s.Off += int64(len(s.piece))
	if s.Off == s.End {
		s.err = io.EOF
	}
}

func (s *stream) buffered(buf []byte) {
	n := len(buf) - int(s.Off%int64(len(buf)))
	if s.End >= 0 {
		n = int(min(int64(n), s.End-s.Off))
	}
	at := 0
	for at < n && s.err == nil {
		var m int
		m, s.err = s.File.ReadAt(buf[at:n], s.Off+int64(at))
		at += m
	}
	s.piece = buf[:at]
}

// direct reads a piece past the page cache. It returns false if that can't be, or brings nothing more: near the end of
// a file, or of a part that ends between pages. Then what follows comes through the cache, also an error.
func (s *stream) direct(buf []byte) bool {
	from := s.Off &^ (alignment - 1)
	n := int64(len(buf)) - from%int64(len(buf))
	if s.End >= 0 {
		n = min(n, s.End&^(alignment-1)-from)
	}
	got := 0
	if n > 0 {
		got, _ = s.past.ReadAt(buf[:n], from)
		got &^= alignment - 1
	}
	skip := int(s.Off - from)
	if got <= skip || int64(got) < n {
		_ = s.past.Close()
		s.past = nil
	}
	if got <= skip {
		return false
	}
	s.piece = buf[skip:got]
	return true
}

// past opens the file of a part so that it is read past the page cache, if less than half of the part is there. Nil:
// more is, or the kernel does not say or can't.
func past(p Part) (f *os.File) {
	conn, err := p.File.SyscallConn()
	if err != nil {
		return nil
	}
	_ = conn.Control(func(fd uintptr) {
		if cold(p, fd) {
			f, _ = os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_RDONLY|unix.O_DIRECT, 0)
		}
	})
	return f
}

func cold(p Part, fd uintptr) bool {
	end := p.End
	if end < 0 {
		if fi, err := p.File.Stat(); err == nil {
			end = fi.Size()
		}
	}
	size := end - p.Off
	if size < leastCold {
		return false
	}
	var in unix.Cachestat_t
	err := unix.Cachestat(uint(fd), &unix.CachestatRange{Off: uint64(p.Off), Len: uint64(size)}, &in, 0)
	return err == nil && int64(in.Cache)*int64(os.Getpagesize()) < size/2
}

// end closes the job, for a reason. What it answers is then in err.
func (s *stream) end(why error) {
	if s.past != nil {
		_ = s.past.Close()
	}
	switch {
	case s.File == nil && errors.Is(why, ErrNothing):
		s.err = nil
	case s.File == nil: // it was never open
		s.err = why
	case why == io.EOF:
		s.err = s.job.Close(nil)
	default:
		s.err = s.job.Close(why)
	}
	s.job, s.Part = nil, Part{}
}
