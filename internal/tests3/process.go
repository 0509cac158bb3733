package tests3

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"
)

// process is a server in a process of its own, which does not outlive ours however ours ends.
type process struct {
	name string
	log  *os.File
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended, of itself or by stop
	err  error         // how it ended; read it after done
}

// startProcess starts path. What it says goes to the file log, and it sees only the given environment.
func startProcess(log string, env []string, path string, args ...string) (*process, error) {
	f, err := os.OpenFile(log, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	p := &process{name: filepath.Base(path), log: f, cmd: exec.Command(path, args...), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr, p.cmd.Env, p.cmd.Dir = f, f, env, filepath.Dir(log)
	// The signal comes when the thread that started the process ends, so that thread waits for it and does nothing else.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer close(p.done)
		err := p.cmd.Start()
		started <- err
		if err == nil {
			p.err = p.cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		<-p.done
		f.Close()
		return nil, err
	}
	return p, nil
}

// ended reports whether the process is gone.
func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// stop asks the process to end, kills it when it does not within five seconds, and returns when it is gone.
func (p *process) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	patience := time.NewTimer(5 * time.Second)
	defer patience.Stop()
	select {
	case <-p.done:
	case <-patience.C:
		_ = p.cmd.Process.Kill()
		<-p.done
	}
	p.log.Close()
}

func (p *process) logSize() int64 {
	info, err := p.log.Stat()
	if err != nil {
		return 0
	}
	return info.Size()
}

// logged returns the end of what the process has said since its log had the given size.
func (p *process) logged(since int64) string { return tail(p.log, since, p.logSize()) }

// freePorts returns n loopback ports on which nobody listens now.
func freePorts(n int) ([]string, error) {
	ports := make([]string, n)
	for i := range ports {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close() // after the last one is found, so that they differ
		if _, ports[i], err = net.SplitHostPort(l.Addr().String()); err != nil {
			return nil, err
		}
	}
	return ports, nil
}
