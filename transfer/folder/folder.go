// Package folder reads a model directory: which files are the shards of the base and which belong beside them, their
// digests, and a private copy where the directory may change. It writes nothing into the directory and follows no link
// unless asked to.
package folder

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
)

// Codes of warnings that only a directory has.
const (
	WarnLeftover = "unfinished_download"
	WarnLinked   = "linked_file_left_out"
	WarnApart    = "folder_left_out"
)

// Kind says what a file is to a model.
type Kind int

// The kinds, in the order in which a manifest lists them.
const (
	Config Kind = iota // configuration, tokenizer, chat template, shard index
	Weight             // a shard of the base
	Code
	Doc
)

// Options says how a directory is read. The zero value reads it as Kiln's loader does.
type Options struct {
	FollowLinks bool // read the regular files behind links, under the names of the links
	AnyDType    bool // take tensors of a dtype that is not known; for an identity only, never for a push
}

// File is one file of a model.
type File struct {
	Name string // in the directory, with slashes; of a shard one path component
	Kind Kind
	Size int64  // bytes, when the directory was listed
	path string // of the regular file that is read
	seen stamp  // what the file was like when it was listed, and must still be
}

// Folder is a model directory as it was when it was opened. It is safe for concurrent use.
type Folder struct {
	Dir      string // without links
	Shards   []File // sorted by name
	Others   []File // what goes along: sorted by kind and name
	Warnings []safetensors.Warning
	options  Options
}

// Open lists dir, follows links if o says so, and selects the shards and the files beside them. No shard is read yet. A
// rule that is broken gives a *safetensors.Error, which a *KindError is too: so is told what is an adapter, a checkpoint
// or an eval; and a *PartialError. A folder that can't be read gives a *fs.PathError.
func Open(dir string, o Options) (*Folder, error) {
	real, err := filepath.EvalSymlinks(dir)
	var found []fs.DirEntry
	if err == nil {
		found, err = os.ReadDir(real)
	}
	if wrong := CheckKind(dir, api.KindBase); wrong != nil {
		return nil, wrong
	}
	if part := CheckPartial(dir); part != nil {
		return nil, part
	}
	if path := (*fs.PathError)(nil); errors.As(err, &path) {
		return nil, &fs.PathError{Op: "read folder", Path: dir, Err: path.Err}
	}
	if err != nil {
		return nil, fmt.Errorf("read folder %s: %w", dir, err)
	}
	f := &Folder{Dir: real, options: o}
	listed, err := f.list("", found)
	if err != nil {
		return nil, err
	}
	selected, err := safetensors.Select(f.entries(listed), func() ([]byte, error) {
		return readIndex(listed[safetensors.IndexName].File)
	})
	if err != nil {
		return nil, err
	}
	f.Warnings = selected.Warnings
	if len(selected.Leftovers) > 0 {
		f.Warnings = append(f.Warnings, safetensors.Warning{Code: WarnLeftover, Names: selected.Leftovers,
			Message: "unfinished downloads lie beside the model: " + strings.Join(selected.Leftovers, ", ")})
	}
	for _, name := range selected.Shards {
		file := listed[name].File
		file.Kind = Weight
		f.Shards = append(f.Shards, file)
	}
	if err := f.others(listed); err != nil {
		return nil, err
	}
	return f, nil
}

// listed is one member of the directory.
type listed struct {
	File
	safetensors.Entry
}

// list returns the members of the folder at a path in the model's, by their names there.
func (f *Folder) list(at string, found []fs.DirEntry) (map[string]listed, error) {
	all := make(map[string]listed, len(found))
	for _, d := range found {
		l, err := f.look(at, d)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed since the directory was read
		}
		if err != nil {
			return nil, err
		}
		all[d.Name()] = l
	}
	return all, nil
}

// look finds out what a member is. With FollowLinks, a link that leads somewhere is what it leads to.
func (f *Folder) look(at string, d fs.DirEntry) (listed, error) {
	name := path.Join(at, d.Name())
	l := listed{File{Name: name, path: filepath.Join(f.Dir, filepath.FromSlash(name))}, safetensors.Entry{Name: name}}
	info, err := d.Info()
	if err != nil {
		return l, err
	}
	if info.Mode()&fs.ModeSymlink != 0 && wanted(d.Name()) {
		l.Target, _ = os.Readlink(l.path)
		end, err := filepath.EvalSymlinks(l.path)
		if l.Broken = err != nil; err == nil && f.options.FollowLinks {
			l.path = end
			if info, err = os.Lstat(end); err != nil {
				return l, err
			}
		}
	}
	switch mode := info.Mode(); {
	case mode.IsRegular():
		l.Mode = safetensors.Regular
	case mode&fs.ModeSymlink != 0:
		l.Mode = safetensors.Symlink
	case mode.IsDir():
		l.Mode = safetensors.Dir
	default:
		l.Mode = safetensors.Other
	}
	l.File.Size, l.Entry.Size, l.seen = info.Size(), info.Size(), stampOf(info)
	return l, nil
}

// entries gives the listing to Select. Where nothing in it is a shard, the folders just inside that hold some are listed
// too, for the explanation.
func (f *Folder) entries(all map[string]listed) []safetensors.Entry {
	entries, shards := make([]safetensors.Entry, 0, len(all)), false
	for name, l := range all {
		entries = append(entries, l.Entry)
		shards = shards || name == safetensors.IndexName || filepath.Ext(name) == identity.Extension
	}
	for name, l := range all {
		if shards || l.Mode != safetensors.Dir || strings.HasPrefix(name, ".") {
			continue
		}
		inside, err := os.ReadDir(filepath.Join(f.Dir, name))
		if err != nil {
			continue
		}
		for _, d := range inside {
			entries = append(entries, safetensors.Entry{Name: name + "/" + d.Name()})
		}
	}
	return entries
}

// readIndex reads the shard index, which is known to be a regular file.
func readIndex(f File) ([]byte, error) {
	in, err := open(f)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	b, err := io.ReadAll(io.LimitReader(in, safetensors.MaxIndex+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.Name, err)
	}
	return b, unchanged(in, f)
}

// open opens the regular file of f without following a link or waiting for a pipe, and makes sure that it is the one
// that was listed.
func open(f File) (*os.File, error) {
	fd, err := unix.Open(f.path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: f.path, Err: err}
	}
	file := os.NewFile(uintptr(fd), f.path)
	if err := unchanged(file, f); err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}
