package bounds

import (
	"syscall"

	"golang.org/x/sys/unix"
)

func acked(c syscall.RawConn) (n uint64, known bool) {
	err := c.Control(func(fd uintptr) {
		if i, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			n, known = i.Bytes_acked, true
		}
	})
	return n, known && err == nil
}
