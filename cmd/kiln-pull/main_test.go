package main

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
	"github.com/kiln-registry/kiln-registry/internal/testregistry"
	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
	"github.com/kiln-registry/kiln-registry/transfer"
)

func TestMain(m *testing.M) {
	testscript.Main(apart{testlanes.Use(m)}, map[string]func(){"kiln-pull": main})
}

// apart keeps the sockets of these tests apart from those of other processes.
type apart struct{ testscript.TestingM }

func (m apart) Run() int {
	dir, err := os.MkdirTemp("/tmp", "kiln")
	if err == nil {
		err = os.Setenv("XDG_RUNTIME_DIR", dir)
	}
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	return m.TestingM.Run()
}

// TestScripts runs one script per promise. Each has a registry of its own at $REGISTRY, and servers that deny
// everything at $DENIED, answer with a page at $PAGE, say what would work a terminal at $LIAR, and serve a model at
// $RESIDENT.
func TestScripts(t *testing.T) {
	cmds := map[string]func(*testscript.TestScript, bool, []string){
		"exits": testregistry.Exits, "shard": makeShard, "push": push, "turn": turn, "sent": sent, "disk": disk, "damage": damage,
		"rot": rot,
	}
	maps.Copy(cmds, madeCommands)
	maps.Copy(cmds, cacheCommands)
	testscript.Run(t, testscript.Params{
		Dir:  "testdata",
		Cmds: cmds,
		Setup: func(e *testscript.Env) error {
			reg, err := testregistry.Open(filepath.Join(e.WorkDir, ".registry"), e.Defer)
			if err != nil {
				return err
			}
			v := &valve{next: reg}
			e.Values[valveKey{}] = v
			e.Setenv("HOME", filepath.Join(e.WorkDir, ".home"))
			e.Setenv("KILN_LANES", os.Getenv("KILN_LANES"))
			for name, h := range map[string]http.Handler{
				"REGISTRY": v,
				"DENIED":   http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) }),
				"PAGE": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					w.Header().Set("Content-Type", "text/html")
					fmt.Fprint(w, "<html>log in</html>")
				}),
				"LIAR":     http.HandlerFunc(lie),
				"RESIDENT": http.FileServer(http.Dir(filepath.Join(e.WorkDir, "resident"))),
			} {
				srv := httptest.NewServer(h)
				e.Defer(srv.Close)
				e.Setenv(name, strings.TrimPrefix(srv.URL, "http://"))
			}
			return nil
		},
	})
}

// lie answers about any base with names that would work a terminal, or look like another row.
func lie(w http.ResponseWriter, r *http.Request) {
	const held = `"repository":"r\u001b[31m\u202e","digest":"sha256:%064d","tags":["v1\u001b[2J\u009b2J","v2\nbase forged"]`
	const made = `{"kind":"eval","name":"n\u001b[1m\nforged",` + held + `,"binding":{"evidence":"\u001b[0m"},"facts":{"eval":{` +
		`"adapters":["\u202e"],"runs":[{"suite":"s\u009b2J","adapter":"\u001b[0m\nforged","seed":"\u001b","examples":1}]}}}`
	switch digest, isLineage := strings.CutSuffix(r.URL.Path, "/lineage"); {
	case isLineage:
		fmt.Fprintf(w, `{"artifact":{"kind":"eval","digest":%q},"parents":[{"relation":"\u001b[1m","name":"\u001b\nforged"},`+
			`{"relation":"adapter","how":"\u001b","artifact":`+made+`}]}`, digest[len("/v1/artifacts/"):], 3)
		return
	case r.URL.Path == "/v1/artifacts":
		fmt.Fprintf(w, `{"artifacts":[`+made+`]}`, 4)
		return
	}
	if !strings.HasPrefix(r.URL.Path, "/v1/bases/") {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusBadRequest)
		fmt.Fprint(w, `{"errors":[{"code":"NAME_INVALID","message":"\u001b]0;x\u0007\u202eno\u009b2J"}]}`)
		return
	}
	if strings.HasSuffix(r.URL.Path, "/artifacts") {
		if r.URL.Query().Get("kind") == "eval" {
			fmt.Fprint(w, `{"artifacts":[],"next":"more"}`)
			return
		}
		fmt.Fprintf(w, `{"artifacts":[{"kind":"\u001b[1m",`+held+`,"binding":{"evidence":"\u001b[0m"}},`+made+`]}`, 2, 5)
		return
	}
	fmt.Fprintf(w, `{"base_weight_identity":{"aggregate_sha256":%q},"packagings":[{"id":"sha256:%064d","manifests":[{`+held+`}]}]}`,
		strings.TrimPrefix(r.URL.Path, "/v1/bases/"), 1, 1)
}

// valve counts the bytes of blobs that are sent and, when it is set, lets only so many through and holds the rest.
type valve struct {
	next http.Handler
	sent atomic.Int64

	mu      sync.Mutex
	left    int64         // bytes that may still pass; used while it is set
	reached chan struct{} // closed when left is used up; nil: not set
	opened  chan struct{} // closed when it is opened again
}

type valveKey struct{}

func (v *valve) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/sha256:") {
		w = &through{w, v, r.Context()}
	}
	v.next.ServeHTTP(w, r)
}

func (v *valve) set(bytes int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.left, v.reached, v.opened = bytes, make(chan struct{}), make(chan struct{})
}

func (v *valve) open() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.reached = nil
	close(v.opened)
}

// pass says how many of n bytes may go through, and what the others wait for.
func (v *valve) pass(n int64) (int64, <-chan struct{}) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.reached == nil {
		return n, nil
	}
	may := min(n, v.left)
	if v.left > 0 && v.left == may {
		close(v.reached)
	}
	v.left -= may
	return may, v.opened
}

type through struct {
	http.ResponseWriter
	v   *valve
	ctx context.Context
}

func (t *through) Unwrap() http.ResponseWriter { return t.ResponseWriter }

func (t *through) Write(b []byte) (n int, err error) {
	for n < len(b) && err == nil {
		may, opened := t.v.pass(int64(len(b) - n))
		var m int
		m, err = t.ResponseWriter.Write(b[n : n+int(may)])
		n += m
		t.v.sent.Add(int64(m))
		if err != nil || n == len(b) {
			break
		}
		http.NewResponseController(t.ResponseWriter).Flush()
		select {
		case <-opened:
		case <-t.ctx.Done():
			err = t.ctx.Err()
		}
	}
	return n, err
}

func theValve(ts *testscript.TestScript) *valve { return ts.Value(valveKey{}).(*valve) }

// makeShard writes a valid file with one tensor: shard FILE TENSOR BYTES
func makeShard(ts *testscript.TestScript, _ bool, args []string) {
	n, err := strconv.Atoi(args[2])
	ts.Check(err)
	header := fmt.Sprintf(`{%q:{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, args[1], n, n)
	b := append([]byte{byte(len(header)), 0, 0, 0, 0, 0, 0, 0}, header...)
	b = append(b, strings.Repeat(args[1], n/len(args[1])+1)[:n]...)
	path := ts.MkAbs(args[0])
	ts.Check(os.MkdirAll(filepath.Dir(path), 0o755))
	ts.Check(os.WriteFile(path, b, 0o644))
}

// push puts a folder into the registry and its identity into the environment: push DIR REF [NAME] sets AGGREGATE and
// DIGEST, with NAME_ in front if a name is given.
func push(ts *testscript.TestScript, _ bool, args []string) {
	ref, err := client.ParseReference(args[1])
	ts.Check(err)
	c, err := client.New(ref.Host, client.Options{})
	ts.Check(err)
	defer c.Close()
	pushed, err := transfer.Push(context.Background(), c, ts.MkAbs(args[0]), ref, transfer.PushOptions{})
	ts.Check(err)
	prefix := ""
	if len(args) > 2 {
		prefix = args[2] + "_"
	}
	ts.Setenv(prefix+"AGGREGATE", pushed.Identity.Aggregate.String())
	ts.Setenv(prefix+"DIGEST", pushed.Digest.String())
}

// turn works the valve: turn BYTES lets only so many bytes of blobs through; turn wait waits until they have gone, turn
// kept BYTES until a pull has that many of one file on the disk; turn open lets all through again.
func turn(ts *testscript.TestScript, _ bool, args []string) {
	v := theValve(ts)
	switch args[0] {
	case "wait":
		v.mu.Lock()
		reached := v.reached
		v.mu.Unlock()
		<-reached
	case "kept":
		n, err := strconv.ParseInt(args[1], 10, 64)
		ts.Check(err)
		for tick := time.NewTicker(5 * time.Millisecond); largestPart(ts) < n; {
			<-tick.C
		}
	case "open":
		v.open()
	default:
		n, err := strconv.ParseInt(args[0], 10, 64)
		ts.Check(err)
		v.set(n)
	}
}

func largestPart(ts *testscript.TestScript) (largest int64) {
	parts, err := filepath.Glob(ts.MkAbs(".*.kiln/parts-*/*"))
	ts.Check(err)
	cached, err := filepath.Glob(ts.MkAbs("cache/partial/.*.kiln/parts-*/*"))
	ts.Check(err)
	for _, path := range append(parts, cached...) {
		if fi, err := os.Stat(path); err == nil {
			largest = max(largest, fi.Size())
		}
	}
	return largest
}

// sent checks how many bytes of blobs the registry has sent since the last time, or the start: sent LEAST MOST
func sent(ts *testscript.TestScript, _ bool, args []string) {
	least, err := strconv.ParseInt(args[0], 10, 64)
	ts.Check(err)
	most, err := strconv.ParseInt(args[1], 10, 64)
	ts.Check(err)
	if n := theValve(ts).sent.Swap(0); n < least || n > most {
		ts.Fatalf("%d bytes of blobs were sent, want %d to %d", n, least, most)
	}
}

// disk mounts a small filesystem, which may be one that can't be written to: disk DIR MEBIBYTES [ro]
func disk(ts *testscript.TestScript, _ bool, args []string) {
	dir := ts.MkAbs(args[0])
	ts.Check(os.MkdirAll(dir, 0o755))
	var flags uintptr
	if len(args) > 2 {
		flags = unix.MS_RDONLY
	}
	if err := unix.Mount("none", dir, "tmpfs", flags, "size="+args[1]+"m"); err != nil {
		ts.Fatalf("mount a tmpfs: %v (this test needs the right to mount: run it as root)", err)
	}
	ts.Defer(func() { ts.Check(unix.Unmount(dir, 0)) })
}

// rot damages the blob of a file in the registry, whose scrub finds it: rot FILE
func rot(ts *testscript.TestScript, _ bool, args []string) {
	d := identity.Sum([]byte(ts.ReadFile(args[0])))
	path := ts.MkAbs(filepath.Join(".registry", "blobs", "sha256", d.Hex()[:2], d.Hex()))
	ts.Check(os.Truncate(path, 1))
	did, err := theValve(ts).next.(*registry.Registry).Scrubber().Scrub(context.Background(), upkeep.Order{})
	ts.Check(err)
	if did.Damaged != 1 {
		ts.Fatalf("the scrub found %+v", did)
	}
}

// damage changes a file: damage FILE flip|short|long
func damage(ts *testscript.TestScript, _ bool, args []string) {
	path := ts.MkAbs(args[0])
	b, err := os.ReadFile(path)
	ts.Check(err)
	switch args[1] {
	case "flip":
		b[len(b)-1] ^= 1
	case "short":
		b = b[:len(b)/2]
	case "long":
		b = append(b[:len(b)/2:len(b)/2], b...)
	}
	ts.Check(os.WriteFile(path, b, 0o644))
}
