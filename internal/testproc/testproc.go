// Package testproc runs the servers that tests need, in processes that do not outlive the test's. Only packages for tests
// import it.
package testproc

import (
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// Process is a server in a process of its own.
type Process struct {
	Cmd  *exec.Cmd
	Done chan struct{} // closed when it has ended, of itself or by Stop
	Err  error         // how it ended; read it after Done
}

// Start starts a command. However this process ends, the kernel then sends it atEnd.
func Start(cmd *exec.Cmd, atEnd syscall.Signal) (*Process, error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = new(syscall.SysProcAttr)
	}
	cmd.SysProcAttr.Pdeathsig = atEnd
	p := &Process{Cmd: cmd, Done: make(chan struct{})}
	started := make(chan error)
	// The signal comes when the thread that started the process ends, so that thread waits for it and does nothing else.
	go func() {
		runtime.LockOSThread()
		defer close(p.Done)
		err := cmd.Start()
		started <- err
		if err == nil {
			p.Err = cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		<-p.Done
		return nil, err
	}
	return p, nil
}

// Ended reports whether the process is gone.
func (p *Process) Ended() bool {
	select {
	case <-p.Done:
		return true
	default:
		return false
	}
}

// Stop asks the process to end by a signal, kills it when it does not within patience, and returns when it is gone.
func (p *Process) Stop(by os.Signal, patience time.Duration) {
	_ = p.Cmd.Process.Signal(by) // it may be gone already
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-p.Done:
	case <-timer.C:
		_ = p.Cmd.Process.Kill()
		<-p.Done
	}
}

// FreePorts returns n loopback ports on which nobody listens now.
func FreePorts(n int) ([]string, error) {
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
