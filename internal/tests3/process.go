package tests3

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/internal/testproc"
)

// process is a server and the file to which it logs.
type process struct {
	*testproc.Process
	name string
	log  *os.File
}

// startProcess starts path. What it says goes to the file log, and it sees only the given environment.
func startProcess(log string, env []string, path string, args ...string) (*process, error) {
	f, err := os.OpenFile(log, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(path, args...)
	cmd.Stdout, cmd.Stderr, cmd.Env, cmd.Dir = f, f, env, filepath.Dir(log)
	p, err := testproc.Start(cmd, syscall.SIGKILL)
	if err != nil {
		f.Close()
		return nil, err
	}
	return &process{p, filepath.Base(path), f}, nil
}

// stop asks the process to end, and returns when it is gone.
func (p *process) stop() {
	p.Stop(syscall.SIGTERM, 5*time.Second)
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
