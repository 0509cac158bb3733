// Package sdnotify tells systemd how a service stands, by the protocol of sd_notify(3). It is one datagram: a library
// for it would be longer than this.
package sdnotify

import (
	"fmt"
	"net"
	"os"
	"strings"
	"time"
)

// EnvSocket names the socket to which Send sends; one that begins with @ is abstract.
const EnvSocket = "NOTIFY_SOCKET"

// patience is how long a datagram may wait for room at who is told.
const patience = time.Second

// Send sends a state, such as "READY=1\nSTATUS=…". It takes a second at most. Without EnvSocket it does nothing: nobody asked.
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
