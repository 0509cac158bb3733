package resident_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/gpuload/resident"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/localsock"
)

// attached starts s with a socket in a folder of its own, and loads a model.
func attached(t *testing.T, s *resident.Server) (*running, attach.Client) {
	t.Helper()
	return attachedTo(t, s, loadModel(t))
}

func attachedTo(t *testing.T, s *resident.Server, load func(context.Context) (resident.Held, error),
) (*running, attach.Client) {
	t.Helper()
	s.Socket = filepath.Join(t.TempDir(), "s", "kiln.sock")
	r := start(t, s, load)
	r.hold(t)
	return r, attach.Client{Socket: s.Socket}
}

// hold loads and waits until that is published.
func (r *running) hold(t *testing.T) {
	t.Helper()
	close(r.load)
	failed := make(chan error, 1)
	go func() { failed <- r.wait() }()
	select {
	case r.weights = <-r.held:
	case err := <-failed:
		t.Fatal(err)
	}
}

// short is a temporary folder whose path leaves room for the name of a socket.
func short(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "kiln")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func (r *running) aggregate() identity.Aggregate { return r.weights.Manifest().Aggregate }

func refusedAs(code string) error { return attach.Refuse(code, "") }

// until waits for what another goroutine does.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for !is() {
		if t.Context().Err() != nil {
			t.Fatal("no end of waiting until " + what)
		}
		runtime.Gosched()
	}
}

func (r *running) leases(t *testing.T, c attach.Client) int {
	t.Helper()
	s, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s.Leases
}

func TestAttach(t *testing.T) {
	r, c := attached(t, &resident.Server{Backend: "host", Model: "demo", Debug: true})
	a, err := c.Attach(t.Context(), r.aggregate())
	if err != nil {
		t.Fatal(err)
	}
	if len(a.Blocks) != 2 || len(a.Document.Tensors) != 2 {
		t.Fatalf("%d blocks, %+v", len(a.Blocks), a.Document)
	}
	for i, tensor := range a.Document.Tensors {
		if got, want := string(a.Bytes(tensor)), string([]byte{1, 2, 3, byte(i)}); got != want {
			t.Errorf("tensor %d: %q, want %q", i, got, want)
		}
	}
	s, err := c.Status(t.Context())
	if err != nil || s.Leases != 1 || s.Aggregate != r.aggregate() || s.State != gpuload.Published || s.Shards != 2 ||
		s.Generation != 1 || s.Bytes != 130 || s.Process != os.Getpid() {
		t.Errorf("%+v, %v", s, err)
	}
	if d := r.ask(t, "GET", "/v1/debug/model-state", ""); !strings.Contains(d.body, `"leases":1,"generation":1`) {
		t.Errorf("the debug state: %s", d.body)
	}
	d, err := c.Document(t.Context(), r.aggregate())
	if err != nil || d.Lease != nil || d.Shards[0].IPC != nil || d.Shards[1].Digest != a.Document.Shards[1].Digest {
		t.Errorf("%+v, %v", d, err)
	}
	for i, shard := range a.Document.Shards {
		head, err := c.Header(t.Context(), r.aggregate(), shard.Digest)
		if err != nil || identity.Sum(append(head, 1, 2, 3, byte(i))) != shard.Digest {
			t.Errorf("header %q, %v: with the data it has not the digest of the shard", head, err)
		}
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	until(t, "the lease has ended", func() bool { return r.leases(t, c) == 0 })
	if err := r.stop(); err != nil {
		t.Error(err)
	}
	if names, err := os.ReadDir(filepath.Dir(c.Socket)); err != nil || len(names) > 0 {
		t.Errorf("left in the folder: %v, %v", names, err)
	}
}

// TestNamedByAggregate puts the socket into a folder under the name that a client looks for.
func TestNamedByAggregate(t *testing.T) {
	t.Setenv("RUNTIME_DIRECTORY", filepath.Join(short(t), "kiln"))
	s := &resident.Server{Socket: attach.Folder() + "/"}
	r := start(t, s, loadModel(t))
	r.ask(t, "GET", "/health", "")
	if _, err := os.Stat(attach.Folder()); err != nil {
		t.Errorf("the folder is not made early: %v", err)
	}
	r.hold(t)
	a, err := attach.Client{}.Attach(t.Context(), r.aggregate())
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
}

func TestAttachGates(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "s")
	c := attach.Client{Socket: filepath.Join(folder, "kiln.sock")}
	s := &resident.Server{Socket: c.Socket}
	r := start(t, s, loadModel(t))
	r.ask(t, "GET", "/health", "")
	if _, err := c.Attach(t.Context(), identity.Aggregate{1}); !errors.Is(err, attach.ErrNone) {
		t.Errorf("attach while loading: %v", err)
	}
	if names, err := os.ReadDir(folder); err != nil || len(names) != 1 || names[0].Name()[0] != '.' {
		t.Errorf("in the folder while loading: %v, %v", names, err)
	}
	r.hold(t)
	other := identity.Aggregate{1}
	_, attached := c.Attach(t.Context(), other)
	_, documented := c.Document(t.Context(), other)
	_, audited := c.Audit(t.Context(), other)
	_, waited := c.Generation(t.Context(), other, 0)
	for i, err := range []error{attached, documented, audited, waited, c.Release(t.Context(), other)} {
		if !errors.Is(err, refusedAs(attach.CodeOtherBase)) || !strings.Contains(err.Error(), r.aggregate().String()) {
			t.Errorf("request %d for another base: %v", i, err)
		}
	}
	for path, code := range map[string]string{
		"/v1/resident/sha256:00": attach.CodeBadRequest,
		"/v1/nothing":            attach.CodeUnknown,
		"/":                      attach.CodeUnknown,
		attach.Path(r.aggregate()) + "/generation":                attach.CodeBadRequest,
		attach.Path(r.aggregate()) + "/generation?after=-1":       attach.CodeBadRequest,
		attach.PathHeader(r.aggregate(), identity.Digest{}):       attach.CodeUnknown,
		attach.Path(r.aggregate()) + "/shards/sha256:zz/header":   attach.CodeBadRequest,
		attach.Path(r.aggregate()) + "/shards/" + "%2e%2e/header": attach.CodeBadRequest,
	} {
		if err := c.Do(t.Context(), "GET", path, nil, nil); !errors.Is(err, refusedAs(code)) {
			t.Errorf("%s: %v, want %s", path, err, code)
		}
	}
	err := c.Do(t.Context(), "PUT", attach.Path(r.aggregate()), nil, nil)
	if !errors.Is(err, refusedAs(attach.CodeUnknown)) {
		t.Errorf("PUT: %v", err)
	}
	if got := s.Snapshot(); got.Refused[attach.CodeOtherBase] != 5 || got.Attaches != 0 {
		t.Errorf("%+v", got)
	}
}

func TestSocketRefused(t *testing.T) {
	dir := short(t)
	open, file, link := filepath.Join(dir, "open"), filepath.Join(dir, "file"), filepath.Join(dir, "link")
	private := filepath.Join(dir, "private")
	for path, mode := range map[string]os.FileMode{open: 0o755, private: 0o700} {
		if err := errors.Join(os.Mkdir(path, 0o700), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
	}
	err := errors.Join(os.WriteFile(file, nil, 0o600), os.Symlink(private, link), os.WriteFile(private+"/f", nil, 0o600))
	if err != nil {
		t.Fatal(err)
	}
	_, c := attached(t, &resident.Server{})
	for socket, want := range map[string]error{
		open + "/s": localsock.ErrFolder, open + "/": localsock.ErrFolder, file + "/s": localsock.ErrFolder,
		link + "/s": localsock.ErrFolder, link + "/": localsock.ErrFolder, "/s": localsock.ErrFolder,
		dir + "/no/such/s": os.ErrNotExist, private + "/f": localsock.ErrPath, c.Socket: localsock.ErrTaken,
		private + "/" + strings.Repeat("x", 100): localsock.ErrPath,
		private + strings.Repeat("/x", 40) + "/": localsock.ErrPath,
	} {
		l, err := resident.Listen(t.Context(), "127.0.0.1:0", false)
		if err != nil {
			t.Fatal(err)
		}
		s := &resident.Server{Socket: socket}
		err = s.Run(t.Context(), l, func(context.Context) (h resident.Held, err error) {
			t.Errorf("%s: the load has begun", socket)
			return h, errors.New("no")
		}, func(resident.Held) error { return nil })
		if !errors.Is(err, want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want %v", socket, err, want)
		}
	}
	if names, err := os.ReadDir(private); err != nil || len(names) != 1 {
		t.Errorf("left behind: %v, %v", names, err)
	}
}

// TestNameTakenMeanwhile has two servers load the same base at once: the second to publish is refused.
func TestNameTakenMeanwhile(t *testing.T) {
	folder := filepath.Join(short(t), "s") + "/"
	first := start(t, &resident.Server{Socket: folder}, loadModel(t))
	second := start(t, &resident.Server{Socket: folder}, loadModel(t))
	first.hold(t)
	close(second.load)
	if err := second.wait(); !errors.Is(err, localsock.ErrTaken) {
		t.Errorf("%v", err)
	}
	if names, err := os.ReadDir(folder); err != nil || len(names) != 1 {
		t.Errorf("in the folder: %v, %v", names, err)
	}
}

// TestFailedLoadLeavesNoSocket fails to load, and is stopped while it loads.
func TestFailedLoadLeavesNoSocket(t *testing.T) {
	folder := filepath.Join(short(t), "s") + "/"
	failing := start(t, &resident.Server{Socket: folder}, func(context.Context) (h resident.Held, err error) {
		return h, errors.New("bad bytes")
	})
	stopped := start(t, &resident.Server{Socket: folder}, loadModel(t))
	failing.ask(t, "GET", "/health", "")
	stopped.ask(t, "GET", "/health", "")
	if names, err := os.ReadDir(folder); err != nil || len(names) != 2 {
		t.Errorf("while loading: %v, %v", names, err)
	}
	close(failing.load)
	if err := failing.wait(); err == nil {
		t.Error("a load that failed is no error")
	}
	if err := stopped.stop(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if names, err := os.ReadDir(folder); err != nil || len(names) != 0 {
		t.Errorf("left: %v, %v", names, err)
	}
}

func TestDrainTellsLeases(t *testing.T) {
	r, c := attached(t, &resident.Server{})
	a, err := c.Attach(t.Context(), r.aggregate())
	if err != nil {
		t.Fatal(err)
	}
	waited := make(chan error)
	go func() {
		_, err := c.Generation(context.WithoutCancel(t.Context()), r.aggregate(), 1)
		waited <- err
	}()
	if err := c.Release(t.Context(), r.aggregate()); err != nil {
		t.Fatal(err)
	}
	if e := <-a.Events(); e != (attach.Event{Kind: attach.EventDraining, Grace: 10}) {
		t.Errorf("event %+v", e)
	}
	if err := <-waited; !errors.Is(err, refusedAs(attach.CodeDraining)) {
		t.Errorf("waiting for a generation: %v", err)
	}
	if ready := r.ask(t, "GET", "/readyz", ""); ready.status != http.StatusServiceUnavailable {
		t.Errorf("ready while draining: %d", ready.status)
	}
	if _, err := c.Attach(t.Context(), r.aggregate()); !errors.Is(err, refusedAs(attach.CodeDraining)) {
		t.Errorf("attach while draining: %v", err)
	}
	if s, err := c.Status(t.Context()); err != nil || s.State != gpuload.Draining || s.Leases != 1 {
		t.Errorf("%+v, %v", s, err)
	}
	if got := string(a.Bytes(a.Document.Tensors[1])); got != "\x01\x02\x03\x01" {
		t.Errorf("leased weights hold %q", got)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if err := r.wait(); err != nil { // it ends by itself
		t.Error(err)
	}
}

// TestGraceExceeded keeps a lease for longer than the server waits. The client's mapping stays what it is.
func TestGraceExceeded(t *testing.T) {
	s := &resident.Server{}
	r, c := attached(t, s)
	s.Drain = time.Millisecond
	a, err := c.Attach(t.Context(), r.aggregate())
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if err := r.stop(); !errors.Is(err, resident.ErrLeased) || err.Error() != "drain: 1 lease was cut off after 1ms" {
		t.Errorf("%v", err)
	}
	if r.weights.State() != gpuload.Freed {
		t.Errorf("state %s", r.weights.State())
	}
	last := attach.Event{}
	for e := range a.Events() { // until the connection has ended
		last = e
	}
	if last.Kind != attach.EventDraining {
		t.Errorf("last event %+v", last)
	}
	if got := string(a.Bytes(a.Document.Tensors[1])); got != "\x01\x02\x03\x01" {
		t.Errorf("the mapping holds %q", got)
	}
}

// loadMany loads a model of n shards into host memory, each with one tensor of a name that is as long as names.
func loadMany(t *testing.T, n, tensors int) func(context.Context) (resident.Held, error) {
	t.Helper()
	dir := t.TempDir()
	var names []string
	for i := range n {
		var head strings.Builder
		for j := range tensors {
			fmt.Fprintf(&head, `,"%d.%04d.%s":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}`, i, j,
				strings.Repeat("n", 40), j, j+1)
		}
		text := "{" + head.String()[1:] + "}"
		b := append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)
		b = append(b, make([]byte, tensors-1)...)
		names = append(names, fmt.Sprintf("%03d.safetensors", i))
		if err := os.WriteFile(filepath.Join(dir, names[i]), append(b, byte(i)), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return loadFolder(dir, names)
}

// TestManyShards attaches to more shards than go in three messages.
func TestManyShards(t *testing.T) {
	r, c := attachedTo(t, &resident.Server{}, loadMany(t, 200, 1))
	a, err := c.Attach(t.Context(), r.aggregate())
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	for i, tensor := range a.Document.Tensors {
		if got := a.Bytes(tensor); tensor.Shard != i || len(got) != 1 || got[0] != byte(i) {
			t.Errorf("tensor %d of shard %d holds %v", i, tensor.Shard, got)
		}
	}
}

// TestManyClients attaches 500 times at once.
func TestManyClients(t *testing.T) {
	r, c := attachedTo(t, &resident.Server{}, loadMany(t, 20, 1))
	all := make([]*attach.Attachment, 500)
	var work sync.WaitGroup
	for i := range all {
		work.Go(func() {
			a, err := c.Attach(t.Context(), r.aggregate())
			if err != nil {
				t.Error(err)
				return
			}
			if got := a.Bytes(a.Document.Tensors[19]); got[0] != 19 {
				t.Errorf("%v", got)
			}
			all[i] = a
		})
	}
	work.Wait()
	ids := map[string]bool{}
	for _, a := range all {
		if a != nil {
			ids[a.Document.Lease.ID] = true
		}
	}
	if n := r.leases(t, c); n != len(all) || len(ids) != len(all) {
		t.Errorf("%d leases of %d names, want %d", n, len(ids), len(all))
	}
	for _, a := range all {
		if a != nil {
			work.Go(func() {
				if err := a.Close(); err != nil {
					t.Error(err)
				}
			})
		}
	}
	work.Wait()
	until(t, "all leases have ended", func() bool { return r.leases(t, c) == 0 })
}

// raw asks for an attach by hand and returns the connection before anything is read.
func raw(t *testing.T, c attach.Client, a identity.Aggregate) *net.UnixConn {
	t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: c.Socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	_, err = fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, upgrade\r\nUpgrade: KILN-attach\r\n\r\n",
		attach.Path(a))
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

// TestSlowReader has clients that read nothing: of the document, and of the events that follow. Others are not held up.
func TestSlowReader(t *testing.T) {
	r, c := attachedTo(t, &resident.Server{}, loadMany(t, 2, 9000)) // more than the kernel keeps for a reader
	slow := raw(t, c, r.aggregate())
	until(t, "the lease has begun", func() bool { return r.leases(t, c) == 1 })
	a, err := c.Attach(t.Context(), r.aggregate())
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if err := slow.Close(); err != nil {
		t.Fatal(err)
	}
	until(t, "the leases have ended", func() bool { return r.leases(t, c) == 0 })
	raw(t, c, r.aggregate()) // is there when the server stops
	until(t, "the lease has begun", func() bool { return r.leases(t, c) == 1 })
}

// TestGarbage sends lines that are none.
func TestGarbage(t *testing.T) {
	r, c := attached(t, &resident.Server{})
	for _, line := range []string{
		"nonsense\n", "\n", "{}\n", "[]\n", `{"descriptors":{"first":0}}` + "\n", `{"descriptors":{"first":0,"count":0}}` + "\n",
		`{"descriptors":{"first":0,"count":3}}` + "\n", `{"descriptors":{"first":-1,"count":1}}` + "\n",
		`{"descriptors":{"first":2,"count":1}}` + "\n", `{"descriptors":{"first":0,"count":1},"x":1}` + "\n",
		`{"descriptors":{"first":4294967295,"count":4294967295}}` + "\n", "\x00\xff\n", strings.Repeat("x", 100<<10) + "\n",
	} {
		conn := raw(t, c, r.aggregate())
		go io.WriteString(conn, line) // the holder does not take all of a line that is too long
		lines := bufio.NewScanner(conn)
		last := ""
		for lines.Scan() {
			last = lines.Text()
		}
		if !strings.Contains(last, attach.CodeBadRequest) {
			t.Errorf("%.60q: the last line is %.200q, %v", line, last, lines.Err())
		}
		conn.Close()
	}
	until(t, "the leases have ended", func() bool { return r.leases(t, c) == 0 })
	half := raw(t, c, r.aggregate())
	until(t, "the lease has begun", func() bool { return r.leases(t, c) == 1 })
	if err := half.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	until(t, "the lease has ended with half of the connection", func() bool { return r.leases(t, c) == 0 })
}
