//go:build chaos

package home

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// Built with the tag chaos this program breaks where its environment says, for internal/chaos. A durable change is one
// of the package durable, or a commit of the index, which is called "index commit".
//
//	CHAOS_KILL=before:N      kill -9 itself right before its nth durable change
//	CHAOS_KILL=after:N       the same, right after it
//	CHAOS_FAULTS=FILE        while FILE holds a line HOW|CHANGE|PART, every CHANGE, or any if that is empty, of a path
//	                         that contains PART goes wrong
//
// HOW is lost (an I/O error, and the change is not made), kept (an I/O error, though it is made), short (an I/O error
// after half of a write), full (no space after half of a write, and none for any other change) or lie (success, though
// the change is not made).
const opCommit durable.Op = "index commit"

func init() {
	f := fault{at: -1, rules: os.Getenv("CHAOS_FAULTS")}
	if when, n, ok := strings.Cut(os.Getenv("CHAOS_KILL"), ":"); ok {
		at, err := strconv.ParseInt(n, 10, 64)
		if err != nil || when != "before" && when != "after" {
			panic("CHAOS_KILL: want before:N or after:N")
		}
		f.at, f.after = at, when == "after"
	}
	durable.FaultAll = f.change
}

// breakable returns an engine whose commits are durable changes.
func breakable(kv index.KV) index.KV { return breakableKV{kv} }

type breakableKV struct{ index.KV }

func (b breakableKV) Update(ctx context.Context, fn func(index.Txn) error) error {
	return durable.FaultAll(opCommit, IndexFile, func() error { return b.KV.Update(ctx, fn) })
}

// fault says what becomes of a durable change.
type fault struct {
	done  atomic.Int64 // changes so far
	at    int64        // the one to die at; negative: none
	after bool
	rules string // file of what goes wrong; empty: nothing
}

func (f *fault) change(op durable.Op, path string, do func() error) error {
	n := f.done.Add(1)
	if f.at >= 0 && (n > f.at || n == f.at && !f.after) {
		die(n, f.at, op, path)
	}
	err := f.spoil(op, path, do)
	if n == f.at {
		die(n, f.at, op, path)
	}
	return err
}

// die ends the process at its nth change. Changes that others try meanwhile are not made.
func die(n, at int64, op durable.Op, path string) {
	if n == at {
		fmt.Fprintf(os.Stderr, "chaos: killed at change %d: %s %s\n", n, op, path)
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	select {}
}

func (f *fault) spoil(op durable.Op, path string, do func() error) error {
	how := f.how(op, path)
	broken := &os.PathError{Op: string(op), Path: path, Err: syscall.EIO}
	switch {
	case how == "lie":
		return nil
	case how == "kept":
		if err := do(); err != nil {
			return err
		}
		return broken
	case how == "full":
		broken.Err = syscall.ENOSPC
	case how == "lost", how == "short":
	default:
		return do()
	}
	if op == durable.OpWrite && how != "lost" {
		return durable.ShortWrite{Err: broken}
	}
	return broken
}

// how finds the rule for a change; empty: it is made as ever.
func (f *fault) how(op durable.Op, path string) string {
	if f.rules == "" {
		return ""
	}
	b, err := os.ReadFile(f.rules)
	if err != nil {
		return ""
	}
	for rule := range strings.Lines(string(b)) {
		part := strings.Split(strings.TrimSpace(rule), "|")
		if len(part) == 3 && (part[1] == "" || part[1] == string(op)) && strings.Contains(path, part[2]) {
			return part[0]
		}
	}
	return ""
}
