// Command gpucheck runs what gpuload does on a real device and prints a table: name, figure, ok or failed or left out.
// scripts/gpu-check.sh starts it. Each part runs in a process of its own, for a bounded time, so that a part that hangs
// or breaks the device's context costs its own rows and no others. It provokes no error that outlives the call.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// config is what the parts are told.
type config struct {
	Device      int    // index
	Dir         string // where the model lies whose pages the cache holds
	Shm         string // where the small one lies, a file system in memory
	Model       int64  // bytes
	Small       int64
	Shards      int // of each model
	Copy        int64
	Chunks      []int64 // sizes of single copies, of which Copy bytes are made
	Allocs      []int64
	Buffer      int64         // bytes that are pinned for the copies; no chunk is larger
	Python      string        // empty: none
	Sockets     string        // a folder for them
	Client      string        // path of kiln_attach.py
	Bound       time.Duration // of all parts together
	ModelShards []shard       // what Dir holds
	SmallShards []shard       // what Shm holds
}

// part is one process: it reports rows until it ends.
type part struct {
	name  string
	bound time.Duration
	run   func(context.Context, *report) error
}

var parts = []part{
	{"bind", 30 * time.Second, bind},
	{"allocation", 30 * time.Second, allocation},
	{"copies", 60 * time.Second, copies},
	{"overlap", 60 * time.Second, overlap},
	{"load", 90 * time.Second, loadLarge},
	{"attach", 45 * time.Second, attach},
	{"descriptors", 45 * time.Second, descriptors},
	{"memory", 30 * time.Second, outOfMemory},
	{"errors", 20 * time.Second, wrongCalls},
	{"locking", 20 * time.Second, locking},
}

// roles are what else a process of this program can be: the other side of a part.
var roles = map[string]func(context.Context, config, io.Writer) error{"client": attachBlocks, "export": exportBlocks}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run returns the exit status: 1 if a row that must hold does not, 2 for bad flags.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	c := defaults()
	fs := flag.NewFlagSet("gpucheck", flag.ContinueOnError)
	fs.SetOutput(stderr)
	given := fs.String("config", "", "JSON of all settings")
	role := fs.String("role", "", "the part that this process is; empty: all, each in a process of its own")
	fs.IntVar(&c.Device, "device", 0, "index of the device")
	fs.StringVar(&c.Dir, "dir", c.Dir, "folder for the large model, on a disk")
	fs.StringVar(&c.Client, "client", c.Client, "path of the Python client")
	fs.Int64Var(&c.Model, "bytes", c.Model, "bytes of the large model, made smaller where disk or memory is small")
	if err := fs.Parse(args); err != nil {
		return 2
	}
	if fs.NArg() > 0 {
		fmt.Fprintln(stderr, "error: want flags alone, not", fs.Args())
		return 2
	}
	if *given != "" {
		if err := json.Unmarshal([]byte(*given), &c); err != nil {
			fmt.Fprintln(stderr, "error: -config:", err)
			return 2
		}
	}
	err := error(nil)
	switch {
	case *role == "":
		var held bool
		if held, err = all(ctx, c, stdout, stderr); err == nil && !held {
			return 1
		}
	case roles[*role] != nil:
		runtime.LockOSThread()
		err = roles[*role](ctx, c, stdout)
	default:
		err = one(ctx, *role, c, stdout)
	}
	if err != nil {
		fmt.Fprintln(stderr, "error:", err)
		return 1
	}
	return 0
}

func defaults() config {
	const mib = 1 << 20
	c := config{
		Dir: os.TempDir(), Shm: "/dev/shm", Model: 8e9, Small: 2e9, Shards: 16, Copy: 4096 * mib, Buffer: 64 * mib,
		Chunks: []int64{1 * mib, 2 * mib, 4 * mib, 8 * mib, 16 * mib, 32 * mib, 64 * mib},
		Allocs: []int64{2 * mib, 64 * mib, 1024 * mib, 4096 * mib}, Bound: 280 * time.Second,
		Client: "gpuload/attach/kiln_attach.py",
	}
	c.Python, _ = exec.LookPath("python3")
	return c
}

// one runs a part in this process, on one thread, as a role is run.
func one(ctx context.Context, name string, c config, stdout io.Writer) error {
	for _, p := range parts {
		if p.name == name {
			runtime.LockOSThread()
			return p.run(ctx, &report{config: c, out: json.NewEncoder(stdout)})
		}
	}
	return fmt.Errorf("no part %q", name)
}

// all makes the models, runs every part and prints the table last. held says whether every row holds that must.
func all(ctx context.Context, c config, stdout, stderr io.Writer) (held bool, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.Bound, errors.New("no time was left"))
	defer cancel()
	start := time.Now()
	var t table
	remove := func() error { return nil }
	defer func() { err = errors.Join(err, remove()) }()
	for i, p := range parts {
		if i == 1 && !t.broken {
			if remove, err = makeModels(ctx, &c); err != nil {
				return false, err
			}
			fmt.Fprintf(stderr, "models: %.1f and %.1f GB\n", float64(c.Model)/1e9, float64(c.Small)/1e9)
		}
		switch {
		case ctx.Err() != nil:
			t.add(row{Name: p.name, Status: leftOut, Why: context.Cause(ctx).Error()})
		case t.broken:
			t.add(row{Name: p.name, Status: leftOut, Why: "there is no device"})
		default:
			p.inProcess(ctx, c, &t)
			fmt.Fprintf(stderr, "%s: done after %.1f s\n", p.name, time.Since(start).Seconds())
		}
	}
	held, whole := t.held(), row{Name: "all of it", Figure: fmt.Sprintf("%.0f s", time.Since(start).Seconds()), Status: ok}
	if !held {
		whole.Status = failed
	}
	t.add(whole)
	return held, t.print(stdout)
}

// inProcess runs a part and takes its rows over. What goes wrong is a row.
func (p part) inProcess(ctx context.Context, c config, t *table) {
	ctx, cancel := context.WithTimeoutCause(ctx, p.bound, fmt.Errorf("no end after %s", p.bound))
	defer cancel()
	var stderr bytes.Buffer
	cmd, err := again(ctx, p.name, c)
	var out io.ReadCloser
	if err == nil {
		cmd.Stderr = &stderr
		out, err = cmd.StdoutPipe()
	}
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.add(row{Name: p.name, Status: failed, Must: true, Why: err.Error()})
		return
	}
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r row
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			r = row{Name: p.name, Status: failed, Must: true, Why: "said: " + lines.Text()}
		}
		t.add(r)
	}
	if err := cmd.Wait(); err != nil {
		why := lastLine(stderr.String())
		if ctx.Err() != nil {
			why = context.Cause(ctx).Error()
		}
		t.add(row{Name: p.name, Status: failed, Must: true, Why: oneLine(strings.TrimPrefix(why, "error: "))})
		t.broken = t.broken || p.name == "bind"
	}
}

// again is a command of this program in another role. It is killed when ctx ends.
func again(ctx context.Context, role string, c config) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	settings, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	return bound(ctx, self, "-role", role, "-config", string(settings)), nil
}

// bound is a command that is killed when ctx ends, or this process.
func bound(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.WaitDelay = 5 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}
