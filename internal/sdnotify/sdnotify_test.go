package sdnotify_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

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

func TestWatchdog(t *testing.T) {
	me := strconv.Itoa(os.Getpid())
	for _, tt := range []struct {
		usec, pid string
		want      time.Duration
		fails     bool
	}{
		{"", "", 0, false}, {"", me, 0, false}, {"30000000", "", 30 * time.Second, false},
		{"1500", me, 1500 * time.Microsecond, false}, {"1500", "1", 0, false}, {"x", "1", 0, false}, {"x", me, 0, true},
		{"0", "", 0, true}, {"-1", "", 0, true}, {"9223372036854775807", "", 0, true},
	} {
		t.Setenv(sdnotify.EnvWatchdog, tt.usec)
		t.Setenv(sdnotify.EnvWatchdogPID, tt.pid)
		if got, err := sdnotify.Watchdog(); got != tt.want || (err != nil) != tt.fails {
			t.Errorf("%q, %q: %s, %v", tt.usec, tt.pid, got, err)
		}
	}
}
