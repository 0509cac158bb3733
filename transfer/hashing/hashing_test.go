package hashing_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
	"github.com/kiln-registry/kiln-registry/transfer/hashing"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(testlanes.Use(m)) }

// job is a part of a file that is hashed, and what is known of it.
type job struct {
	path     string
	off, end int64
	want     identity.Digest

	in     *os.File
	hash   identity.Hash
	moved  int64
	closed int
	got    identity.Digest
	opened *atomic.Int32 // streams that are open; nil: not counted
}

var errJob = errors.New("the job fails")

func (j *job) Open() (hashing.Part, error) {
	in, err := os.Open(j.path)
	if err != nil {
		return hashing.Part{}, err
	}
	j.in, j.hash = in, identity.NewHash()
	if j.opened != nil {
		j.opened.Add(1)
	}
	return hashing.Part{File: in, Off: j.off, End: j.end, To: j.hash}, nil
}

func (j *job) Moved(n int64) { j.moved = n }

func (j *job) Close(err error) error {
	if j.opened != nil {
		j.opened.Add(-1)
	}
	j.closed++
	j.got = identity.DigestOf(j.hash)
	return errors.Join(err, j.in.Close())
}

// fill makes a file that is on the disk, and returns its bytes.
func fill(t testing.TB, path string, size int) []byte {
	t.Helper()
	b := make([]byte, size)
	rand.NewChaCha8([32]byte{byte(size), byte(size >> 8), byte(len(path))}).Read(b)
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return b
}

// drop has the kernel forget what it keeps of a file in memory.
func drop(t testing.TB, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)); err != nil {
		t.Fatal(err)
	}
}

// parts are jobs of files and parts of them, some of which the page cache has.
func parts(t testing.TB) (jobs []*job) {
	dir := t.TempDir()
	for i, size := range []int{0, 1, 63, 4096, 128 << 10, 128<<10 + 1, 5 << 20, 9<<20 + 4097, 12 << 20, 6<<20 - 1} {
		path := filepath.Join(dir, fmt.Sprint(i))
		b := fill(t, path, size)
		if i%2 == 0 {
			drop(t, path)
		}
		jobs = append(jobs, &job{path: path, end: -1, want: identity.Sum(b)})
		for range 3 {
			off := rand.IntN(size + 1)
			end := off + rand.IntN(size-off+1)
			jobs = append(jobs, &job{path: path, off: int64(off), end: int64(end), want: identity.Sum(b[off:end])})
		}
		jobs = append(jobs, &job{path: path, off: 8, end: int64(size) + 8, want: identity.Sum(b[min(8, size):])})
	}
	return jobs
}

func few(n int) func() int { return func() int { return n } }

// fewer starts with many and ends with none, which counts as one.
func fewer() func() int {
	n := 9
	return func() int {
		n = max(0, n-1)
		return n
	}
}

// TestRun: whole files and parts of them, in the page cache and not, aligned and not, on any number of cores.
func TestRun(t *testing.T) {
	for i, o := range []hashing.Options{{}, {Cores: 1}, {Cores: 7}, {Streams: few(1)}, {Cores: 3, Streams: few(2)}, {Cores: 1, Streams: fewer()}} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			jobs := parts(t)
			if err := hashing.Run(t.Context(), jobs, o); err != nil {
				t.Fatal(err)
			}
			for _, j := range jobs {
				info, err := os.Stat(j.path)
				if err != nil {
					t.Fatal(err)
				}
				size := info.Size() - j.off
				if j.end >= 0 {
					size = min(size, j.end-j.off)
				}
				if j.got != j.want || j.closed != 1 || j.moved != max(0, size) {
					t.Errorf("%d to %d of %d bytes: %d bytes, closed %d times, %s, want %s", j.off, j.end, info.Size(), j.moved,
						j.closed, j.got, j.want)
				}
			}
		})
	}
}

func TestNothing(t *testing.T) {
	if err := hashing.Run(t.Context(), []*job(nil), hashing.Options{}); err != nil {
		t.Error(err)
	}
}

// failing is a job that fails in one of its steps.
type failing struct {
	job
	at string
}

func (f *failing) Open() (hashing.Part, error) {
	if f.at == "open" {
		return hashing.Part{}, errJob
	}
	return f.job.Open()
}

func (f *failing) Close(err error) error {
	if f.at == "close" {
		err = errors.Join(err, errJob)
	}
	return f.job.Close(err)
}

// TestFailure: the first error ends the work, and everything that was open is closed once.
func TestFailure(t *testing.T) {
	dir := t.TempDir()
	for _, at := range []string{"open", "close"} {
		var open atomic.Int32
		var jobs []*failing
		for i := range 20 {
			path := filepath.Join(dir, fmt.Sprint(i))
			fill(t, path, 1<<20)
			j := &failing{job: job{path: path, end: -1, opened: &open}}
			if i == 5 {
				j.at = at
			}
			jobs = append(jobs, j)
		}
		if err := hashing.Run(t.Context(), jobs, hashing.Options{}); !errors.Is(err, errJob) {
			t.Errorf("%s: %v", at, err)
		}
		if n := open.Load(); n != 0 {
			t.Errorf("%s: %d are open", at, n)
		}
	}
}

// TestUnreadable: a file that can't be read is told to its job.
func TestUnreadable(t *testing.T) {
	j := &job{path: t.TempDir(), end: -1}
	if err := hashing.Run(t.Context(), []*job{j}, hashing.Options{}); !errors.Is(err, unix.EISDIR) || j.closed != 1 {
		t.Errorf("a folder: %v, closed %d times", err, j.closed)
	}
}

// cancelling ends its context when some bytes have come.
type cancelling struct {
	job
	cancel context.CancelCauseFunc
}

func (c *cancelling) Moved(int64) { c.cancel(errJob) }

func TestCancelled(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	var open atomic.Int32
	var jobs []*cancelling
	path := filepath.Join(t.TempDir(), "file")
	fill(t, path, 4<<20)
	for range 10 {
		jobs = append(jobs, &cancelling{job{path: path, end: -1, opened: &open}, cancel})
	}
	if err := hashing.Run(ctx, jobs, hashing.Options{}); !errors.Is(err, errJob) || open.Load() != 0 {
		t.Errorf("%v, %d are open", err, open.Load())
	}
}

// TestTogether: where streams can share a core, those of one core do, if there are enough.
func TestTogether(t *testing.T) {
	dir, shared := t.TempDir(), false
	var jobs []*watched
	for i := range 4 {
		path := filepath.Join(dir, fmt.Sprint(i))
		fill(t, path, 1<<20)
		jobs = append(jobs, &watched{job: job{path: path, end: -1}})
	}
	if err := hashing.Run(t.Context(), jobs, hashing.Options{Cores: 1}); err != nil {
		t.Fatal(err)
	}
	for _, j := range jobs {
		shared = shared || j.own.n < 1<<20
	}
	if can := lanes.Width() > 1; shared != can {
		t.Errorf("streams shared the core: %t, they can: %t", shared, can)
	}
}

// watched counts what goes through its hash's own Write.
type watched struct {
	job
	own *counted
}

type counted struct {
	identity.Hash
	n int
}

func (c *counted) Write(b []byte) (int, error) {
	c.n += len(b)
	return c.Hash.Write(b)
}

func (w *watched) Open() (hashing.Part, error) {
	p, err := w.job.Open()
	w.own = &counted{Hash: w.hash}
	p.To = w.own
	return p, err
}

func BenchmarkRun(b *testing.B) {
	dir := b.TempDir()
	for _, n := range []int{1, 4, 16} {
		b.Run(fmt.Sprintf("%d files", n), func(b *testing.B) {
			for i := range n {
				fill(b, filepath.Join(dir, fmt.Sprint(i)), 32<<20)
			}
			b.SetBytes(int64(n * 32 << 20))
			for b.Loop() {
				jobs := make([]*job, n)
				for i := range jobs {
					jobs[i] = &job{path: filepath.Join(dir, fmt.Sprint(i)), end: -1}
				}
				if err := hashing.Run(b.Context(), jobs, hashing.Options{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
