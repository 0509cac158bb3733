// Package durable is the only place of this project that publishes files. What it says it did is on the disk: data is
// synced before a name points to it, and the folder that holds the name is synced before a call returns that promises
// durability. A reader sees the old content or the new one, whole, at any instant and after any crash.
//
// Linux only. All functions are safe for concurrent use on different paths.
package durable

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Op names a change of the disk for Disk.Fault.
type Op string

// The changes that a Disk makes.
const (
	OpCreate   Op = "create"
	OpWrite    Op = "write"
	OpTruncate Op = "truncate"
	OpSync     Op = "sync"
	OpRename   Op = "rename"
	OpLink     Op = "link"
	OpMkdir    Op = "mkdir"
	OpRemove   Op = "remove"
	OpSyncDir  Op = "sync folder"
)

// Disk changes files and folders. The zero Disk is the real one.
type Disk struct {
	// Fault, if set, stands in for every change: it may call do and return its error (no fault), return an error without
	// calling do (failed and lost), or call do and return an error all the same (failed but persisted). Of an OpWrite it
	// may return a ShortWrite without calling do. It must be safe for concurrent use. Only tests set it.
	Fault func(op Op, path string, do func() error) error
	// Boot, if set, is what BootID returns. Only tests set it.
	Boot string
}

// ShortWrite is what a Fault returns for an OpWrite of which only the first half of the bytes is to be written.
type ShortWrite struct{ Err error }

// Error returns that of Err.
func (s ShortWrite) Error() string { return s.Err.Error() }

// Unwrap returns Err.
func (s ShortWrite) Unwrap() error { return s.Err }

func (d Disk) do(op Op, path string, do func() error) error {
	fault := d.faults()
	if fault == nil {
		return do()
	}
	return fault(op, path, do)
}

// WriteFile makes data the whole content of the file at path, whether or not there is one. It is durable on return. On
// an error path holds the old content, or, if only the last sync failed, the new one.
func (d Disk) WriteFile(path string, data []byte, mode fs.FileMode) error {
	f, err := d.CreateTemp(path, mode)
	if err != nil {
		return err
	}
	if _, err := f.Write(data); err != nil {
		f.Discard()
		return err
	}
	return f.Publish(path)
}

// CreateTemp opens a new empty file for reading and writing in the folder of path, under a hidden name that begins with
// TempPrefix(path). Give it its name with File.Publish or PublishNew, or drop it with Discard.
func (d Disk) CreateTemp(path string, mode fs.FileMode) (*File, error) {
	name := TempPrefix(path) + rand.Text()
	f, err := d.OpenFile(filepath.Join(filepath.Dir(path), name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	if err := f.f.Chmod(mode); err != nil {
		f.Discard()
		return nil, err
	}
	return f, nil
}

// TempPrefix returns what the names of files begin with that CreateTemp makes for path. Such a file is a leftover when
// no process is writing path.
func TempPrefix(path string) string { return "." + filepath.Base(path) + ".tmp-" }

// Rename gives a file or folder a new name and replaces what has that name. It is atomic, but durable only after SyncDir
// of both folders.
func (d Disk) Rename(old, new string) error {
	return d.do(OpRename, new, func() error { return os.Rename(old, new) })
}

// RenameNew is Rename, but returns an error that is fs.ErrExist if something has the new name already.
func (d Disk) RenameNew(old, new string) error {
	return d.do(OpRename, new, func() error { return renameat2(old, new, unix.RENAME_NOREPLACE) })
}

// Move is Rename, durable on return.
func (d Disk) Move(old, new string) error {
	if err := d.Rename(old, new); err != nil {
		return err
	}
	return d.SyncDir(filepath.Dir(new), filepath.Dir(old))
}

// MoveNew is RenameNew, durable on return. It publishes a finished folder, or a file, under a name that must be free.
func (d Disk) MoveNew(old, new string) error {
	if err := d.RenameNew(old, new); err != nil {
		return err
	}
	return d.SyncDir(filepath.Dir(new), filepath.Dir(old))
}

// Exchange swaps two files or folders in one step, durable on return. Both must exist and be on one filesystem. It
// returns an error that is errors.ErrUnsupported where the filesystem can't.
func (d Disk) Exchange(a, b string) error {
	err := d.do(OpRename, b, func() error { return renameat2(a, b, unix.RENAME_EXCHANGE) })
	if err != nil {
		return err
	}
	return d.SyncDir(filepath.Dir(a), filepath.Dir(b))
}

// Link makes new a hard link to old, which may be the Path of an open file. Durable only after SyncDir of the folder of
// new. It returns an error that is fs.ErrExist if something has the new name already.
func (d Disk) Link(old, new string) error {
	return d.do(OpLink, new, func() error { return link(old, new) })
}

// Mkdir makes folders, durable on return. It is no error if one is there already.
func (d Disk) Mkdir(mode fs.FileMode, paths ...string) error {
	var parents []string
	for _, path := range paths {
		if err := d.do(OpMkdir, path, func() error { return mkdir(path, mode) }); err != nil {
			return err
		}
		if parent := filepath.Dir(path); !slices.Contains(parents, parent) {
			parents = append(parents, parent)
		}
	}
	return d.SyncDir(parents...)
}

func mkdir(path string, mode fs.FileMode) error {
	err := os.Mkdir(path, mode)
	if errors.Is(err, fs.ErrExist) {
		if st, serr := os.Stat(path); serr == nil && st.IsDir() {
			return nil
		}
	}
	return err
}

// MkdirAll makes a folder and the folders above it that are missing, durable on return.
func (d Disk) MkdirAll(path string, mode fs.FileMode) error {
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		return nil
	}
	if parent := filepath.Dir(path); parent != path {
		if err := d.MkdirAll(parent, mode); err != nil {
			return err
		}
	}
	return d.Mkdir(mode, path)
}

// Remove removes a file or an empty folder. It is no error if there is none. Durable only after SyncDir.
func (d Disk) Remove(path string) error {
	err := d.do(OpRemove, path, func() error { return os.Remove(path) })
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// RemoveTemps removes the leftovers of CreateTemp for path. No process may be writing path.
func (d Disk) RemoveTemps(path string) error {
	found, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		return err
	}
	for _, e := range found {
		if strings.HasPrefix(e.Name(), TempPrefix(path)) {
			err = errors.Join(err, d.Remove(filepath.Join(filepath.Dir(path), e.Name())))
		}
	}
	return err
}

// SyncDir makes the names in each of the folders durable. A folder that is named twice is synced once.
func (d Disk) SyncDir(dirs ...string) error {
	for i, dir := range dirs {
		if slices.Contains(dirs[:i], dir) {
			continue
		}
		if err := d.do(OpSyncDir, dir, func() error { return syncDir(dir) }); err != nil {
			return err
		}
	}
	return nil
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = f.Sync()
	return errors.Join(err, f.Close())
}

// BootID names the current run of the kernel: what was written but not synced may be trusted only under the same one.
func (d Disk) BootID() (string, error) {
	if d.Boot != "" {
		return d.Boot, nil
	}
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}
