package gpuload_test

import (
	"context"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
)

// pinning is a target that pins whatever it is given.
type pinning struct {
	hostmem.Target
	pinned int
}

func (p *pinning) Pin(buf []byte) (func() error, error) {
	p.pinned = len(buf)
	return func() error { return nil }, nil
}

// TestLockLimit loads with less memory that may be locked than the buffers take.
func TestLockLimit(t *testing.T) {
	dir := folder(t, 8<<20, 8<<20)
	src := open(t, dir, false, nil)
	p, err := gpuload.NewPlan(t.Context(), src, shardNames(t, dir), gpuload.Want{})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		limit  uint64
		pinned int
		said   string
	}{{6 << 20, 6 << 20, ""}, {5 << 20, 4 << 20, "4194304 bytes instead of 6291456"}, {65536, 0, "not pinned"}} {
		t.Run(tt.said, func(t *testing.T) {
			limited(t, tt.limit)
			var lines []string
			target := new(pinning)
			r, err := gpuload.Load(t.Context(), p, src, target, gpuload.Options{
				ChunkBytes: 1 << 20, Ring: 3, Lanes: 2, Reserve: -1, Notify: func(line string) { lines = append(lines, line) },
			})
			if err != nil {
				t.Fatal(err)
			}
			if err := r.Close(context.Background()); err != nil {
				t.Error(err)
			}
			said := strings.Join(lines, "; ")
			if target.pinned != tt.pinned || !strings.Contains(said, tt.said) || (said == "") != (tt.said == "") {
				t.Errorf("limit %d: pinned %d, said %q", tt.limit, target.pinned, said)
			}
			if tt.said != "" && !strings.Contains(said, "ulimit -l") {
				t.Errorf("%q does not say what the limit is", said)
			}
		})
	}
}

// limited lowers the limit, and takes the right to pass it from this thread, which ends with the test.
func limited(t *testing.T, bytes uint64) {
	t.Helper()
	runtime.LockOSThread()
	var old unix.Rlimit
	h, caps := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, [2]unix.CapUserData{}
	for _, err := range []error{
		unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old),
		unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: bytes, Max: old.Max}),
		unix.Capget(&h, &caps[0]),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	caps[0].Effective &^= 1 << unix.CAP_IPC_LOCK
	if err := unix.Capset(&h, &caps[0]); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old); err != nil {
			t.Error(err)
		}
	})
}
