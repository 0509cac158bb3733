// Package sdnotify tells systemd how a service stands, by the protocol of sd_notify(3). It is one datagram: a library
// for it would be longer than this.
package sdnotify

import (
	"fmt"
	"math"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

// EnvSocket names the socket to which Send sends; one that begins with @ is abstract.
const EnvSocket = "NOTIFY_SOCKET"

// patience is how long a datagram may wait for room at who is told.
const patience = time.Second

// The environment in which systemd asks a service to say in time that it is alive, see sd_watchdog_enabled(3).
const (
	EnvWatchdog    = "WATCHDOG_USEC"
	EnvWatchdogPID = "WATCHDOG_PID"
)

// Watchdog is how long systemd waits for a WATCHDOG=1 before it ends this process; one is best sent twice as often. 0: it
// does not wait for any, or for those of another process.
func Watchdog() (time.Duration, error) {
	text := os.Getenv(EnvWatchdog)
	if pid := os.Getenv(EnvWatchdogPID); text == "" || pid != "" && pid != strconv.Itoa(os.Getpid()) {
		return 0, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n <= 0 || n > math.MaxInt64/int64(time.Microsecond) {
		return 0, fmt.Errorf("%s=%q: want a number of microseconds above 0", EnvWatchdog, text)
	}
	return time.Duration(n) * time.Microsecond, nil
}

// Send sends a state, such as "READY=1\nSTATUS=…". It takes a second at most. Without EnvSocket it does nothing: nobody
// asked.
func Send(state string) error {
	name := os.Getenv(EnvSocket)
	if name == "" {
		return nil
	}
	if !strings.HasPrefix(name, "/") && !strings.HasPrefix(name, "@") {
		return fmt.Errorf("%s=%q: want an absolute path, or @ and a name", EnvSocket, name)
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: name, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("tell systemd: %w", err)
	}
	defer c.Close()
	if err := c.SetWriteDeadline(time.Now().Add(patience)); err != nil {
		return fmt.Errorf("tell systemd: %w", err)
	}
	if _, err := c.Write([]byte(state)); err != nil {
		return fmt.Errorf("tell systemd: %w", err)
	}
	return nil
}
