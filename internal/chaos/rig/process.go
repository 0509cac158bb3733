// Package rig runs a real registry process, has clients use it that keep what was acknowledged, and compares what is
// there after it was killed or broken. Only internal/chaos imports it.
package rig

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
	"github.com/kiln-registry/kiln-registry/identity"
)

// Site is where a registry is run: again and again on the same store.
type Site struct {
	Dir    string // everything of this site
	Sub    string // in which folder of Dir/store the store is; empty: that itself
	Chores bool   // the server collects and scrubs by itself, and not only when it is told to

	bin   string // folder of the programs
	store string // a bucket; empty: a folder
}

// NewSite makes a folder for a site below dir. Its programs are in bin; its store is a bucket, or, if that is empty, a
// folder.
func NewSite(bin, dir, store string) (*Site, error) {
	at, err := os.MkdirTemp(dir, "kiln-chaos-")
	return &Site{bin: bin, Dir: at, store: store}, err
}

// Folder is where the store is on disk; empty if it is a bucket.
func (s *Site) Folder() string {
	if s.store != "" {
		return ""
	}
	return filepath.Join(s.Dir, "store", s.Sub)
}

// flags say which store a command is about.
func (s *Site) flags() []string {
	if s.store != "" {
		return []string{"--store", s.store, "--state-dir", s.State()}
	}
	return []string{"--store", s.Folder()}
}

// State is the folder of the index and the administration socket.
func (s *Site) State() string {
	if s.store != "" {
		return filepath.Join(s.Dir, "state")
	}
	return s.Folder()
}

// Command runs a program to its end. An exit code other than 0 is an error with what it said.
func (s *Site) Command(ctx context.Context, program string, args ...string) (stdout string, err error) {
	var out, said strings.Builder
	cmd := exec.CommandContext(ctx, filepath.Join(s.bin, program), args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = s.Dir, &out, &said
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w: %s", program, args[0], err, said.String())
	}
	return out.String(), nil
}

// Registry runs a command of kiln-registry on the store.
func (s *Site) Registry(ctx context.Context, name string, args ...string) (stdout string, err error) {
	return s.Command(ctx, "kiln-registry", append(append([]string{name}, args...), s.flags()...)...)
}

// Flip changes one bit of a stored blob.
func (s *Site) Flip(d identity.Digest, bit int64) error {
	path := filepath.Join(s.Folder(), "blobs/sha256", d.Hex()[:2], d.Hex())
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	data[bit/8] ^= 1 << (bit % 8)
	if err := os.Chmod(path, 0o600); err != nil {
		return err
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		return err
	}
	return os.Chmod(path, 0o444)
}

// Server is a process that serves the site. It does not outlive this one.
type Server struct {
	URL   string        // known once it is ready
	Ended chan struct{} // closed when the process is gone
	Log   *Journal

	cmd   *exec.Cmd
	at    chan string // gets the URL
	state string      // the folder of its administration socket
}

// Start runs a server, whose environment has env besides that of this process.
func (s *Site) Start(env ...string) (*Server, error) {
	args := append([]string{"serve", "--addr", "127.0.0.1:0", "--init", "--drain-timeout", "5s"}, s.flags()...)
	if !s.Chores {
		args = append(args, "--gc-interval", "0", "--scrub-interval", "0")
	}
	v := &Server{
		cmd: exec.Command(filepath.Join(s.bin, "kiln-registry"), args...),
		at:  make(chan string, 1), Ended: make(chan struct{}), Log: new(Journal), state: s.State(),
	}
	v.cmd.Env = append(os.Environ(), env...)
	v.cmd.Stderr = v.Log
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
func (v *Server) live(out io.Reader, started chan<- error) {
	runtime.LockOSThread()
	defer close(v.Ended)
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

var (
	// ErrEnded: the server ended before it was ready.
	ErrEnded = errors.New("the server ended before it was ready")
	// ErrStop: the server did not end well when it was told to stop.
	ErrStop = errors.New("stop the server")
)

// Ready returns when the server answers.
func (v *Server) Ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	select {
	case v.URL = <-v.at:
	case <-v.Ended:
		return fmt.Errorf("%w: %s", ErrEnded, v.Log)
	case <-ctx.Done():
		return fmt.Errorf("the server does not listen: %w: %s", ctx.Err(), v.Log)
	}
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		if res, err := http.Get(v.URL + api.PathReady); err == nil {
			res.Body.Close()
			if res.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-tick.C:
		case <-v.Ended:
			return fmt.Errorf("%w: %s", ErrEnded, v.Log)
		case <-ctx.Done():
			return fmt.Errorf("the server is never ready: %w: %s", ctx.Err(), v.Log)
		}
	}
}

// Kill ends the server with SIGKILL and returns when it is gone.
func (v *Server) Kill() {
	_ = v.cmd.Process.Kill() // it may be gone already
	<-v.Ended
}

// Stop ends the server with SIGTERM. ErrStop.
func (v *Server) Stop() error {
	_ = v.cmd.Process.Signal(syscall.SIGTERM)
	<-v.Ended
	if !v.cmd.ProcessState.Success() {
		return fmt.Errorf("%w: %s: %s", ErrStop, v.cmd.ProcessState, v.Log)
	}
	return nil
}

// Killed says whether the process, which has ended, was ended by SIGKILL.
func (v *Server) Killed() bool {
	status, ok := v.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}

// Journal is the end of what a server has said, and the complaints in it.
type Journal struct {
	mu         sync.Mutex
	text       []byte
	complaints []string
}

const journalSize = 8 << 10 // bytes

// Write implements io.Writer.
func (j *Journal) Write(b []byte) (int, error) {
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

// String is the end of what was said.
func (j *Journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return string(j.text)
}

// wrong returns the complaints so far.
func (j *Journal) wrong() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.complaints
}
