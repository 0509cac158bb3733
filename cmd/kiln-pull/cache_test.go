package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/identity"
)

// cacheCommands are those of scripts about a cache.
var cacheCommands = map[string]func(*testscript.TestScript, bool, []string){
	"names": names, "chmod-to": chmodTo, "age": age, "entry": entry,
}

// names checks how many names a file has, and its mode: names FILE NUMBER MODE
func names(ts *testscript.TestScript, _ bool, args []string) {
	fi, err := os.Lstat(ts.MkAbs(args[0]))
	ts.Check(err)
	got := fmt.Sprintf("%d %o", fi.Sys().(*syscall.Stat_t).Nlink, fi.Mode().Perm())
	if want := args[1] + " " + args[2]; got != want {
		ts.Fatalf("%s has %s, want %s", args[0], got, want)
	}
}

// chmodTo sets a mode: chmod-to FILE MODE
func chmodTo(ts *testscript.TestScript, _ bool, args []string) {
	mode, err := strconv.ParseUint(args[1], 8, 32)
	ts.Check(err)
	ts.Check(os.Chmod(ts.MkAbs(args[0]), os.FileMode(mode)))
}

// age makes everything below a folder look as if it had not been changed for a time: age FOLDER DURATION
func age(ts *testscript.TestScript, _ bool, args []string) {
	d, err := time.ParseDuration(args[1])
	ts.Check(err)
	then := time.Now().Add(-d)
	ts.Check(filepath.WalkDir(ts.MkAbs(args[0]), func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		at := unix.NsecToTimespec(then.UnixNano())
		return unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{at, at}, unix.AT_SYMLINK_NOFOLLOW)
	}))
}

// entry names the file of a cache that holds the bytes of another: entry CACHE FILE sets ENTRY
func entry(ts *testscript.TestScript, _ bool, args []string) {
	hex := identity.Sum([]byte(ts.ReadFile(args[1]))).Hex()
	ts.Setenv("ENTRY", filepath.Join(ts.MkAbs(args[0]), "sha256", hex[:2], hex))
}
