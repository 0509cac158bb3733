package folder

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/kiln-registry/kiln-registry/identity/safetensors"
)

// ErrTooMany: a folder holds more than what is wanted can have.
var ErrTooMany = errors.New("too many files and folders")

// ErrTooLarge: a document is larger than any of its kind.
var ErrTooLarge = errors.New("file is too large")

// Member is one file, folder or link in a folder.
type Member struct {
	File
	Mode   safetensors.Mode
	Names  uint64 // hard links: names that the file has, here or elsewhere
	Target string // of a link
}

// List returns what is in dir, and with deep also in the folders in it, in ascending order of path. No link is followed
// but, with FollowLinks, those to regular files. More than most members, if that is not zero, are ErrTooMany. A folder
// that can't be read is a *fs.PathError. The Folder reads the files; it has no shards and no others.
func List(dir string, deep bool, most int, o Options) (*Folder, []Member, error) {
	real, err := filepath.EvalSymlinks(dir)
	if path := (*fs.PathError)(nil); errors.As(err, &path) {
		err = &fs.PathError{Op: "read folder", Path: dir, Err: path.Err}
	}
	if err != nil {
		return nil, nil, err
	}
	f := &Folder{Dir: real, options: o}
	var all []Member
	for todo := []string{""}; len(todo) > 0; todo = todo[1:] {
		found, err := members(filepath.Join(real, filepath.FromSlash(todo[0])), most-len(all))
		if err != nil {
			return nil, nil, err
		}
		for _, d := range found {
			m, err := f.member(todo[0], d)
			if err != nil {
				return nil, nil, err
			}
			if all = append(all, m); deep && m.Mode == safetensors.Dir {
				todo = append(todo, m.Name)
			}
		}
		if most > 0 && len(all) > most {
			return nil, nil, fmt.Errorf("%s: %w: more than %d", dir, ErrTooMany, most)
		}
	}
	slices.SortFunc(all, func(a, b Member) int { return cmp.Compare(a.Name, b.Name) })
	return f, all, nil
}

// members returns the members of one folder, of more than most not all.
func members(dir string, most int) ([]fs.DirEntry, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	found, err := d.ReadDir(max(most+1, 0))
	if err == io.EOF {
		err = nil
	}
	if path := (*fs.PathError)(nil); errors.As(err, &path) {
		err = &fs.PathError{Op: "read folder", Path: dir, Err: path.Err}
	}
	return found, err
}

func (f *Folder) member(at string, d fs.DirEntry) (Member, error) {
	l, err := f.look(at, d)
	m := Member{File: l.File, Mode: l.Mode, Target: l.Target}
	if err != nil {
		return m, err
	}
	if info, err := os.Lstat(l.path); err == nil {
		if sys, ok := info.Sys().(*syscall.Stat_t); ok {
			m.Names = uint64(sys.Nlink)
		}
	}
	return m, nil
}

// One returns the folder of a file that is an artifact by itself, and the file. A link is followed only with
// FollowLinks; what is no regular file is a *fs.PathError.
func One(file string, o Options) (*Folder, File, error) {
	bad := func(err error) (*Folder, File, error) {
		return nil, File{}, &fs.PathError{Op: "read", Path: file, Err: err}
	}
	info, err := os.Lstat(file)
	if err == nil && info.Mode()&fs.ModeSymlink != 0 {
		if !o.FollowLinks {
			return bad(syscall.ELOOP)
		}
		info, err = os.Stat(file)
	}
	if path := (*fs.PathError)(nil); errors.As(err, &path) {
		return bad(path.Err)
	}
	switch {
	case err != nil:
		return nil, File{}, err
	case info.IsDir():
		return bad(syscall.EISDIR)
	case !info.Mode().IsRegular():
		return bad(errors.New("not a regular file"))
	}
	real, err := filepath.EvalSymlinks(file)
	if err != nil {
		return nil, File{}, err
	}
	f := &Folder{Dir: filepath.Dir(real), options: o}
	name := path.Base(filepath.ToSlash(filepath.Clean(file)))
	return f, File{Name: name, Size: info.Size(), path: real, seen: stampOf(info)}, nil
}

// Document reads a whole file of at most limit bytes. ErrTooLarge, ErrChanged.
func (f *Folder) Document(file File, limit int64) ([]byte, error) {
	if file.Size > limit {
		return nil, fmt.Errorf("%s: %w: %d bytes, at most %d are read", file.Name, ErrTooLarge, file.Size, limit)
	}
	in, err := open(file)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	b := make([]byte, file.Size)
	if _, err := io.ReadFull(in, b); err != nil {
		return nil, fmt.Errorf("%s: %w", file.Name, cmp.Or(unchanged(in, file), err))
	}
	return b, unchanged(in, file)
}

// Along says whether a file of this name goes along with a model or an adapter, and as what.
func Along(name string) (Kind, bool) { return kindOf(name) }

// HeaderOf reads and checks the header of a safetensors file, and no more of it. *safetensors.Error, ErrChanged.
func (f *Folder) HeaderOf(file File) (safetensors.Header, error) {
	in, err := open(file)
	if err != nil {
		return safetensors.Header{}, err
	}
	defer in.Close()
	h, err := safetensors.Read(in, file.Size)
	if changed := unchanged(in, file); changed != nil {
		return h, changed
	}
	return h, safetensors.InFile(file.Name, err)
}
