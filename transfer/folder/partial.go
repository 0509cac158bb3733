package folder

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// CodePartial is that of a PartialError.
const CodePartial = "partial_pull"

// PartialError: a folder was made by a pull of some files of a model, so it is not that model, nor any other. It is a
// *safetensors.Error too.
type PartialError struct {
	Path   string
	Record staging.Record // of that pull
}

// Error says how many files are there.
func (e *PartialError) Error() string { return e.Path + ": " + Part(e.Record) }

// Part says in words that a record is one of a partial pull.
func Part(r staging.Record) string {
	return fmt.Sprintf("partial pull: %d of %d files", len(r.Files), r.PartOf)
}

// Hint says how to complete it.
func (e *PartialError) Hint() string {
	r := e.Record
	return fmt.Sprintf("it is no base; kiln-pull pull %s/%s@%s DIR, without --only, completes it", r.Registry, r.Repository,
		r.Manifest)
}

// Unwrap returns the rule that is broken.
func (e *PartialError) Unwrap() error {
	return &safetensors.Error{Code: CodePartial, Msg: Part(e.Record)}
}

// CheckPartial is a *PartialError if the folder at a path is what a pull of some files left, whatever else was put there
// since. The record of another folder that was there before says nothing.
func CheckPartial(dir string) error {
	target, err := staging.Target(dir)
	if err != nil {
		return nil
	}
	known, err := staging.Known(target)
	if err != nil || known.Complete == nil || known.Complete.PartOf == 0 {
		return nil
	}
	for _, f := range known.Complete.Files {
		fi, err := os.Lstat(filepath.Join(target, filepath.FromSlash(f.Name)))
		if err != nil || f.Stat == nil {
			continue
		}
		if now := staging.StatOf(fi); now.Dev == f.Stat.Dev && now.Ino == f.Stat.Ino {
			return &PartialError{dir, *known.Complete}
		}
	}
	return nil
}
