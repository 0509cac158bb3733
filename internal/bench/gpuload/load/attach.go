package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

// attached uses what another process holds. Wall is from the connection to the last mapping; after that every page is
// touched, and Anonymous is what the process then has more than before.
func attached(ctx context.Context, socket, aggregate string) (r Result, err error) {
	want, err := identity.ParseAggregate(aggregate)
	if err != nil {
		return r, err
	}
	had := rig.Anonymous(os.Getpid())
	before, err := seconds()
	if err != nil {
		return r, err
	}
	began := time.Now()
	a, err := attach.Client{Socket: socket}.Attach(ctx, want)
	if err != nil {
		return r, err
	}
	r.Wall = time.Since(began).Seconds()
	after, err := seconds()
	if err != nil {
		return r, errors.Join(err, a.Close())
	}
	r.CPU = after - before
	sum := byte(0)
	for _, block := range a.Blocks {
		for at := 0; at < len(block.Data); at += os.Getpagesize() {
			sum += block.Data[at]
		}
		r.Bytes += int64(len(block.Data))
	}
	r.Anonymous = rig.Anonymous(os.Getpid()) - had
	r.Line = fmt.Sprintf("%d blocks, check %d", len(a.Blocks), sum)
	r.Files, err = mappedFiles()
	return r, errors.Join(err, a.Close())
}

// mappedFiles are the inodes of the files in memory that this process has mapped. They are all of one file system.
func mappedFiles() (inodes []string, err error) {
	text, err := os.ReadFile("/proc/self/maps")
	for line := range strings.Lines(string(text)) {
		const inode, path = 4, 5
		if f := strings.Fields(line); len(f) > path && strings.HasPrefix(f[path], "/memfd:") {
			inodes = append(inodes, f[inode])
		}
	}
	return inodes, err
}
