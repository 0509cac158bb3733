package sdnotify_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/internal/sdnotify"
)

func TestSend(t *testing.T) {
	for _, name := range []string{filepath.Join(t.TempDir(), "notify"), fmt.Sprintf("@kiln-notify-%d", os.Getpid())} {
		l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
		if err != nil {
			t.Fatal(err)
		}
		t.Setenv(sdnotify.EnvSocket, name)
		if err := sdnotify.Send("READY=1\nSTATUS=holding"); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		b := make([]byte, 100)
		n, err := l.Read(b)
		if err != nil || string(b[:n]) != "READY=1\nSTATUS=holding" {
			t.Errorf("%s: %q, %v", name, b[:n], err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if err := sdnotify.Send("READY=1"); err == nil {
			t.Errorf("%s: sent to nobody", name)
		}
	}
	t.Setenv(sdnotify.EnvSocket, "relative")
	if err := sdnotify.Send("READY=1"); err == nil {
		t.Error("sent to a relative path")
	}
	t.Setenv(sdnotify.EnvSocket, "")
	if err := sdnotify.Send("READY=1"); err != nil {
		t.Errorf("without a socket: %v", err)
	}
}

// TestFullQueue tells somebody who takes nothing, until there is no room.
func TestFullQueue(t *testing.T) {
	name := filepath.Join(t.TempDir(), "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	t.Setenv(sdnotify.EnvSocket, name)
	for err == nil {
		err = sdnotify.Send("STATUS=" + strings.Repeat("x", 10_000))
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%v", err)
	}
}
