package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// server is a child process that listens on url.
type server struct {
	cmd *exec.Cmd
	url string
	log *bytes.Buffer
	dir string // removed when the server has stopped; empty: none
}

// start runs a server whose arguments are made from the loopback address that it is to listen on, and returns when it
// answers on path with 200.
func start(ctx context.Context, path, name string, args func(addr string) []string) (*server, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	addr := l.Addr().String()
	l.Close()
	s := &server{exec.CommandContext(ctx, name, args(addr)...), "http://" + addr, new(bytes.Buffer), ""}
	s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
	s.cmd.Cancel = func() error { return s.cmd.Process.Signal(syscall.SIGTERM) }
	s.cmd.WaitDelay = 30 * time.Second
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		res, err := http.Get(s.url + path)
		if err == nil {
			res.Body.Close()
			if res.StatusCode == http.StatusOK {
				return s, nil
			}
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			s.stop()
			return nil, fmt.Errorf("%s did not answer on %s: %v; it said: %s", name, path, err, s.log)
		}
	}
}

// stop ends the server, waits for it and removes its folder.
func (s *server) stop() {
	s.cmd.Process.Signal(syscall.SIGTERM)
	s.cmd.Wait()
	if s.dir != "" {
		os.RemoveAll(s.dir)
	}
}

// cpu returns the user and system time that the process has used so far, in steps of 10 ms.
func (s *server) cpu() (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.cmd.Process.Pid))
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

// during returns the processor seconds that the server used while work ran.
func (s *server) during(work func() error) (float64, error) {
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

// peak returns the largest anonymous memory of process pid, in MiB, that was seen while work ran.
func peak(pid int, work func() error) (float64, error) {
	done := make(chan error, 1)
	go func() { done <- work() }()
	most := anonymous(pid)
	for tick := time.NewTicker(10 * time.Millisecond); ; {
		select {
		case err := <-done:
			tick.Stop()
			return most, err
		case <-tick.C:
			most = max(most, anonymous(pid))
		}
	}
}

// anonymous returns RssAnon of process pid in MiB, or 0 when it has ended.
func anonymous(pid int) float64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(text), "\nRssAnon:")
	kib, _, _ := strings.Cut(strings.TrimSpace(rest), " kB")
	n, err := strconv.ParseFloat(kib, 64)
	if err != nil {
		return 0
	}
	return n / 1024
}

// startRegistry runs kiln-registry on a new store.
func (b *bench) startRegistry(ctx context.Context) (*server, error) {
	store, err := os.MkdirTemp(b.dir, "store-")
	if err != nil {
		return nil, err
	}
	s, err := start(ctx, "/readyz", filepath.Join(b.bin, "kiln-registry"), func(addr string) []string {
		return []string{"serve", "--addr", addr, "--store", filepath.Join(store, "data"), "--init"}
	})
	if err == nil {
		s.dir = store
	}
	return s, err
}

// model writes a model folder of the given shards and bytes a shard.
func (b *bench) model(ctx context.Context, shards int, size int64) (string, error) {
	dir := filepath.Join(b.dir, fmt.Sprintf("model-%d-%d", shards, size))
	cmd := exec.CommandContext(ctx, "go", "run", "./internal/testmodel", "-shards", strconv.Itoa(shards),
		"-size", strconv.FormatInt(int64(shards)*size, 10), dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("testmodel: %w: %s", err, out)
	}
	return dir, nil
}
