package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
)

// site is where a registry is run: again and again on the same store.
type site struct {
	bin   string // folder of the programs
	dir   string // everything of this site
	store string // a bucket; empty: a folder
	sub   string // in which folder of dir/store the store is; empty: that itself
}

// newSite makes a folder for a site below dir.
func newSite(bin, dir, store string) (*site, error) {
	at, err := os.MkdirTemp(dir, "kiln-chaos-")
	return &site{bin: bin, dir: at, store: store}, err
}

// folder is where the store is on disk; empty if it is a bucket.
func (s *site) folder() string {
	if s.store != "" {
		return ""
	}
	return filepath.Join(s.dir, "store", s.sub)
}

// flags say which store a command is about.
func (s *site) flags() []string {
	if s.store != "" {
		return []string{"--store", s.store, "--state-dir", s.state()}
	}
	return []string{"--store", s.folder()}
}

// state is the folder of the index and the administration socket.
func (s *site) state() string {
	if s.store != "" {
		return filepath.Join(s.dir, "state")
	}
	return s.folder()
}

// command runs a program to its end. An exit code other than 0 is an error with what it said.
func (s *site) command(ctx context.Context, program string, args ...string) (stdout string, err error) {
	var out, said strings.Builder
	cmd := exec.CommandContext(ctx, filepath.Join(s.bin, program), args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = s.dir, &out, &said
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w: %s", program, args[0], err, said.String())
	}
	return out.String(), nil
}

// registry runs a command of kiln-registry on the store.
func (s *site) registry(ctx context.Context, name string, args ...string) (stdout string, err error) {
	return s.command(ctx, "kiln-registry", append(append([]string{name}, args...), s.flags()...)...)
}

// server is a process that serves the site. It does not outlive this one.
type server struct {
	cmd   *exec.Cmd
	url   string        // known once it is ready
	at    chan string   // gets the URL
	ended chan struct{} // closed when the process is gone
	log   *journal
	state string // the folder of its administration socket
}

// start runs a server, whose environment has env besides that of this process.
func (s *site) start(env ...string) (*server, error) {
	args := append([]string{"serve", "--addr", "127.0.0.1:0", "--init", "--drain-timeout", "5s"}, s.flags()...)
	v := &server{
		cmd: exec.Command(filepath.Join(s.bin, "kiln-registry"), args...),
		at:  make(chan string, 1), ended: make(chan struct{}), log: new(journal), state: s.state(),
	}
	v.cmd.Env = append(os.Environ(), env...)
	v.cmd.Stderr = v.log
	v.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := v.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	started := make(chan error)
	go v.live(out, started)
	return v, <-started
}

// live starts the process and waits for its end on one thread: the signal that ends it with us is bound to that one.
func (v *server) live(out io.Reader, started chan<- error) {
	runtime.LockOSThread()
	defer close(v.ended)
	err := v.cmd.Start()
	started <- err
	if err != nil {
		return
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if url, ok := strings.CutPrefix(strings.TrimSpace(line), "listening on "); ok && err == nil {
		v.at <- url
	}
	v.cmd.Wait()
}

// errEnded: the server ended before it was ready.
var errEnded = errors.New("the server ended before it was ready")

// ready returns when the server answers.
func (v *server) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	select {
	case v.url = <-v.at:
	case <-v.ended:
		return fmt.Errorf("%w: %s", errEnded, v.log)
	case <-ctx.Done():
		return fmt.Errorf("the server does not listen: %w: %s", ctx.Err(), v.log)
	}
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		if res, err := http.Get(v.url + api.PathReady); err == nil {
			res.Body.Close()
			if res.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-tick.C:
		case <-v.ended:
			return fmt.Errorf("%w: %s", errEnded, v.log)
		case <-ctx.Done():
			return fmt.Errorf("the server is never ready: %w: %s", ctx.Err(), v.log)
		}
	}
}

// kill ends the server with SIGKILL and returns when it is gone.
func (v *server) kill() {
	_ = v.cmd.Process.Kill() // it may be gone already
	<-v.ended
}

// stop ends the server with SIGTERM. It is an error if it does not end well.
func (v *server) stop() error {
	_ = v.cmd.Process.Signal(syscall.SIGTERM)
	<-v.ended
	if !v.cmd.ProcessState.Success() {
		return fmt.Errorf("stop the server: %s: %s", v.cmd.ProcessState, v.log)
	}
	return nil
}

// killed says whether the process, which has ended, was ended by SIGKILL.
func (v *server) killed() bool {
	status, ok := v.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}

// journal is the end of what a server has said, and the complaints in it.
type journal struct {
	mu         sync.Mutex
	text       []byte
	complaints []string
}

const journalSize = 8 << 10 // bytes

// Write implements io.Writer.
func (j *journal) Write(b []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for line := range strings.Lines(string(b)) {
		bad := strings.Contains(line, "level=ERROR") && !strings.Contains(line, "path="+api.PathReady)
		if bad || strings.Contains(line, "panic") {
			j.complaints = append(j.complaints, strings.TrimSpace(line))
		}
	}
	j.text = append(j.text, b...)
	j.text = j.text[max(0, len(j.text)-journalSize):]
	return len(b), nil
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return string(j.text)
}

// wrong returns the complaints so far.
func (j *journal) wrong() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.complaints
}
