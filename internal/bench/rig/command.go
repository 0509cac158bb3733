package rig

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Cost is what some work took. The cost of what follows it is added with Plus.
type Cost struct {
	CPU     float64 // processor seconds, user and system, of the process and of the children that it waited for
	Wall    float64 // seconds
	Written float64 // bytes that it made dirty in files
	Bytes   float64 // over a Meter, where one was between
	Synced  float64 // seconds until what it wrote lay on the disk, where that was measured
	Said    string  // on stdout
}

// Plus is the cost of both, one after the other.
func (c Cost) Plus(d Cost) Cost {
	return Cost{
		CPU: c.CPU + d.CPU, Wall: c.Wall + d.Wall, Written: c.Written + d.Written, Bytes: c.Bytes + d.Bytes,
		Synced: c.Synced + d.Synced, Said: c.Said + d.Said,
	}
}

// Run runs a command to its end and says what it took, from the usage that the kernel kept of it.
func Run(ctx context.Context, name string, args ...string) (Cost, error) {
	return RunWith(ctx, nil, name, args...)
}

// RunWith is Run with more environment variables.
func RunWith(ctx context.Context, env []string, name string, args ...string) (Cost, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), env...)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	began := time.Now()
	err := cmd.Run()
	wall := time.Since(began).Seconds()
	if err != nil {
		return Cost{}, fmt.Errorf("%s %s: %w: %s%s", name, strings.Join(args, " "), err, &out, &errs)
	}
	c := Cost{Wall: wall, Said: out.String()}
	c.CPU = (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()
	if u, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
		c.Written = 512 * float64(u.Oublock)
	}
	return c, nil
}

// Settle waits until what was written lies on the disk, so that no work pays for what came before it.
func Settle() { unix.Sync() }

// Synced is the cost of work, and how long it takes until all that lies below dir is on the disk too.
func Synced(dir string, work func(dir string) (Cost, error)) (Cost, error) {
	c, err := work(dir)
	if err != nil {
		return c, err
	}
	f, err := os.Open(dir)
	if err != nil {
		return c, err
	}
	defer f.Close()
	began := time.Now()
	err = unix.Syncfs(int(f.Fd()))
	c.Synced = c.Wall + time.Since(began).Seconds()
	return c, err
}
