// Package rig runs registries as child processes, sends them what the tables of bench measure, and reads what that cost
// them. It reads /proc and so runs on Linux only.
package rig

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Server is a child process that listens on URL.
type Server struct {
	URL string
	Dir string // removed by Stop; empty: none

	cmd *exec.Cmd
	log *output
}

// output is the end of what a server has said.
type output struct {
	mu   sync.Mutex
	text []byte
}

const kept = 4096 // bytes

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.text = append(o.text, p...)
	o.text = o.text[max(0, len(o.text)-kept):]
	return len(p), nil
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return string(o.text)
}

// startLimit is how long a server may take to answer.
const startLimit = 2 * time.Minute

// Start runs a server whose arguments are made from the loopback address that it is to listen on, and returns when it
// answers on path with 200.
func Start(ctx context.Context, path, name string, args func(addr string) []string) (*Server, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	addr := l.Addr().String()
	l.Close()
	s := &Server{URL: "http://" + addr, cmd: exec.CommandContext(ctx, name, args(addr)...), log: new(output)}
	s.cmd.Env = append(os.Environ(), "OTEL_TRACES_EXPORTER=none")
	s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
	s.cmd.Cancel = func() error { return s.cmd.Process.Signal(syscall.SIGTERM) }
	s.cmd.WaitDelay = 30 * time.Second
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	if err := s.await(ctx, path); err != nil {
		s.Stop()
		return nil, err
	}
	return s, nil
}

// await returns when the server answers on path with 200. It asks every millisecond, since the time is measured.
func (s *Server) await(ctx context.Context, path string) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(startLimit); ; {
		res, err := http.Get(s.URL + path)
		if err == nil {
			res.Body.Close()
			if res.StatusCode == http.StatusOK {
				return nil
			}
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s did not answer on %s: %v; it said: %s", s.cmd.Path, path, err, s.log)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Stop ends the server, waits for it and removes its folder.
func (s *Server) Stop() { s.end(syscall.SIGTERM) }

// Kill ends the server without a warning, waits for it and removes its folder.
func (s *Server) Kill() { s.end(syscall.SIGKILL) }

func (s *Server) end(signal syscall.Signal) {
	s.cmd.Process.Signal(signal)
	s.cmd.Wait()
	if s.Dir != "" {
		os.RemoveAll(s.Dir)
	}
}

// PID is the number of the process.
func (s *Server) PID() int { return s.cmd.Process.Pid }

// CPU returns the processor seconds that the server has used so far, in steps of 10 ms.
func (s *Server) CPU() (float64, error) {
	used, err := s.cpu()
	return used.Seconds(), err
}

// cpu returns the user and system time that the process has used so far, in steps of 10 ms.
func (s *Server) cpu() (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.PID()))
	if err != nil {
		return 0, err
	}
	_, rest, ok := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 13 {
		return 0, errors.New("stat: unknown form")
	}
	user, err1 := strconv.ParseInt(fields[11], 10, 64)
	system, err2 := strconv.ParseInt(fields[12], 10, 64)
	return time.Duration(user+system) * 10 * time.Millisecond, errors.Join(err1, err2) // USER_HZ is 100 on Linux
}

// During returns the processor seconds that the server used while work ran.
func (s *Server) During(work func() error) (float64, error) {
	before, err := s.cpu()
	if err != nil {
		return 0, err
	}
	if err := work(); err != nil {
		return 0, fmt.Errorf("%w; the server said: %s", err, s.log)
	}
	after, err := s.cpu()
	return (after - before).Seconds(), err
}

// PeakRSS is the largest memory that the process has had in RAM so far, files that it maps included, in MiB.
func (s *Server) PeakRSS() (float64, error) {
	n := status(s.PID(), "VmHWM")
	if n == 0 {
		return 0, errors.New("no VmHWM in the status of the process")
	}
	return n, nil
}

// Peak returns the largest anonymous memory of process pid, in MiB, that was seen while work ran.
func Peak(pid int, work func() error) (float64, error) {
	done := make(chan error, 1)
	go func() { done <- work() }()
	most := Anonymous(pid)
	for tick := time.NewTicker(10 * time.Millisecond); ; {
		select {
		case err := <-done:
			tick.Stop()
			return most, err
		case <-tick.C:
			most = max(most, Anonymous(pid))
		}
	}
}

// Anonymous returns the memory of process pid that is no file's, in MiB, or 0 when it has ended.
func Anonymous(pid int) float64 { return status(pid, "RssAnon") }

// status reads a size of /proc/PID/status, in MiB; 0 if there is none.
func status(pid int, name string) float64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(text), "\n"+name+":")
	kib, _, _ := strings.Cut(strings.TrimSpace(rest), " kB")
	n, err := strconv.ParseFloat(kib, 64)
	if err != nil {
		return 0
	}
	return n / 1024
}
