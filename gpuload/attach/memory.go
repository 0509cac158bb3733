package attach

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// ErrSeal: host memory that its holder could still change or take away.
var ErrSeal = errors.New("the memory is not sealed")

// seals are those without which memory can change or vanish under its reader.
const seals = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK

// mapSealed maps n bytes from offset, a multiple of the page size, of a file in memory for reading. It does not keep f.
func mapSealed(f *os.File, offset, n int64) ([]byte, error) {
	fd := int(f.Fd())
	has, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: it is no file in memory: %w", ErrSeal, err)
	}
	if has&seals != seals {
		return nil, fmt.Errorf("%w: seals %#x, want %#x", ErrSeal, has, seals)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, os.NewSyscallError("fstat", err)
	}
	if st.Size < offset+n {
		return nil, fmt.Errorf("the file in memory has %d bytes, not %d", st.Size, offset+n)
	}
	// Private, as Linux before 6.7 refuses a shared mapping of what is sealed; the pages are the same ones.
	b, err := unix.Mmap(fd, offset, int(n), unix.PROT_READ, unix.MAP_PRIVATE)
	return b, os.NewSyscallError("mmap", err)
}

// unmap gives back what mapSealed mapped; nil is nothing.
func unmap(b []byte) error {
	if b == nil {
		return nil
	}
	return os.NewSyscallError("munmap", unix.Munmap(b))
}

// descriptors reads a connection and keeps the descriptors that come with its bytes, in order.
type descriptors struct {
	conn  *net.UnixConn
	files []*os.File
	room  []byte
}

func newStream(conn *net.UnixConn) *stream {
	d := &descriptors{conn: conn, room: make([]byte, unix.CmsgSpace(4*MaxDescriptors))}
	return &stream{descriptors: d, r: bufio.NewReaderSize(d, 64<<10)}
}

// Read implements io.Reader.
func (d *descriptors) Read(b []byte) (int, error) {
	n, m, flags, _, err := d.conn.ReadMsgUnix(b, d.room)
	if errors.Is(err, io.EOF) {
		return 0, io.EOF
	}
	if err == nil {
		err = d.keep(d.room[:m])
	}
	if err == nil && flags&unix.MSG_CTRUNC != 0 {
		err = errors.New("descriptors that were sent did not arrive: this process may have no more (ulimit -n)")
	}
	if err != nil {
		return 0, err
	}
	return n, nil
}

func (d *descriptors) keep(control []byte) error {
	if len(control) == 0 {
		return nil
	}
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return fmt.Errorf("read descriptors: %w", err)
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return fmt.Errorf("read descriptors: %w", err)
		}
		for _, fd := range fds {
			d.files = append(d.files, os.NewFile(uintptr(fd), "resident"))
		}
	}
	if n := len(d.files); n > MaxDescriptors {
		return fmt.Errorf("the holder sent %d descriptors, and at most %d are asked for at a time", n, MaxDescriptors)
	}
	return nil
}
