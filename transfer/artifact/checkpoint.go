package artifact

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

// maxEntries bounds the listing of a checkpoint folder: 64 files, and the folders that they can lie in.
const maxEntries = 4096

// readCheckpoint reads a checkpoint folder by Kiln's rules and in its order. No link is followed, and the set of files
// is exactly the one that the manifest lists.
func readCheckpoint(dir string, _ Options) (*draft, error) {
	f, entries, byName, err := listCheckpoint(dir)
	if err != nil {
		return nil, err
	}
	text, err := document(f, byName[documents.CheckpointFile], documents.MaxDocument)
	if err != nil {
		return nil, err
	}
	c, err := documents.ParseCheckpoint(text)
	if err != nil {
		return nil, err
	}
	// What a listing can show is checked before any large file is read.
	promised := map[string]identity.Digest{}
	for name, file := range c.Files {
		promised[name] = file.Digest
	}
	if err := c.CheckFiles(withDigests(entries, promised)); err != nil {
		return nil, err
	}
	d := &draft{
		Artifact: Artifact{Name: c.Adapter, folder: f},
		claims:   []documents.Binding{c.Base()}, kiln: true,
		hint: "no run can resume from it exactly; --legacy pushes it as an archive",
		check: func(sums map[string]identity.Digest) error {
			return c.CheckFiles(withDigests(entries, sums))
		},
	}
	d.parts = append(d.parts, part{
		name: documents.CheckpointFile, kind: folder.Config, file: byName[documents.CheckpointFile], text: text,
	})
	for _, name := range sortedNames(c.Files) {
		d.parts = append(d.parts, part{name: name, kind: stateKind(name), file: byName[name]})
	}
	return d, nil
}

// listCheckpoint lists a checkpoint folder, and checks by the listing alone that it may be one.
func listCheckpoint(dir string) (
	f *folder.Folder, entries []documents.Entry, byName map[string]folder.File, err error,
) {
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, nil, nil, err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return nil, nil, nil, err
	}
	if info.Mode().IsRegular() && !strings.HasSuffix(dir, documents.CheckpointSuffix) {
		return nil, nil, nil, &fs.PathError{Op: "read folder", Path: dir, Err: syscall.ENOTDIR}
	}
	var found []folder.Member
	if info.IsDir() {
		f, found, err = folder.List(dir, true, maxEntries, folder.Options{})
	}
	if errors.Is(err, folder.ErrTooMany) {
		return nil, nil, nil, &Error{Code: CodeTooManyFiles, Msg: err.Error(), Hint: "a checkpoint holds at most 64 files"}
	}
	if err != nil {
		return nil, nil, nil, err
	}
	entries = make([]documents.Entry, len(found))
	byName = map[string]folder.File{}
	for i, m := range found {
		entries[i] = documents.Entry{Path: m.Name, Mode: modes[m.Mode], Links: m.Names, Size: uint64(m.Size)}
		byName[m.Name] = m.File
	}
	return f, entries, byName, documents.CheckCheckpointFolder(filepath.Base(dir), modeOf(info), entries)
}

// modes are the kinds of entries, as documents has them.
var modes = map[safetensors.Mode]documents.Mode{
	safetensors.Regular: documents.Regular, safetensors.Dir: documents.Directory,
	safetensors.Symlink: documents.Symlink, safetensors.Other: documents.Special,
}

func modeOf(info fs.FileInfo) documents.Mode {
	switch mode := info.Mode(); {
	case mode.IsDir():
		return documents.Directory
	case mode.IsRegular():
		return documents.Regular
	case mode&fs.ModeSymlink != 0:
		return documents.Symlink
	}
	return documents.Special
}

func withDigests(entries []documents.Entry, sums map[string]identity.Digest) []documents.Entry {
	out := make([]documents.Entry, len(entries))
	for i, e := range entries {
		e.Digest = sums[e.Path]
		out[i] = e
	}
	return out
}

// stateKind says how a manifest lists a file of training state.
func stateKind(name string) folder.Kind {
	if path.Ext(name) == ".json" {
		return folder.Config
	}
	return folder.Weight
}
