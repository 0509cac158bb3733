package staging

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

const recordVersion = 1

// statesSlack is more than the bytes that midstates have beside the states.
const statesSlack = 1 << 10

// Record says what a folder was pulled from and what it holds. It lies beside the folder, never in it.
type Record struct {
	Version    int                `json:"version"`
	Registry   string             `json:"registry"`
	Repository string             `json:"repository"`
	Tag        string             `json:"tag,omitempty"`
	Manifest   identity.Digest    `json:"manifest_digest"`
	Aggregate  identity.Aggregate `json:"aggregate_sha256,omitzero"` // zero: the artifact has no base identity
	Verified   time.Time          `json:"verified_at,omitzero"`      // when every file was last known to match
	PartOf     int                `json:"part_of_files,omitzero"`    // files of the artifact, if not all are wanted; else zero
	Files      []File             `json:"files"`                     // in ascending order of name
}

// File is one file of a record.
type File struct {
	Name   string          `json:"name"` // relative, forward slashes
	Size   int64           `json:"size_bytes"`
	Digest identity.Digest `json:"sha256"`
	Stat   *Stat           `json:"stat,omitempty"` // the file as it was when Verified was set
}

// Stat tells whether a file was touched since: a write changes at least the change time. Of a file that nobody may write
// to and that has several names, as those in a cache have, the change time is zero and says nothing: each new name
// changes it. A write changes its time of modification, unless that is put back on purpose.
type Stat struct {
	Dev   uint64 `json:"dev"`
	Ino   uint64 `json:"ino"`
	Size  int64  `json:"size_bytes"`
	Mtime int64  `json:"mtime_ns"`
	Ctime int64  `json:"ctime_ns"`
}

// StatOf returns the Stat of an open or named file from what os.Stat or os.Lstat said of it.
func StatOf(fi fs.FileInfo) Stat {
	s := fi.Sys().(*syscall.Stat_t)
	return Stat{uint64(s.Dev), s.Ino, s.Size, s.Mtim.Nano(), s.Ctim.Nano()}
}

// lasting is the Stat to keep of a file.
func lasting(fi fs.FileInfo) *Stat {
	s := StatOf(fi)
	if fi.Mode().Perm()&0o222 == 0 && fi.Sys().(*syscall.Stat_t).Nlink > 1 {
		s.Ctime = 0
	}
	return &s
}

// Untouched says whether a file is the one of the record, as it was when it was verified.
func (f File) Untouched(fi fs.FileInfo) bool {
	if f.Stat == nil || fi == nil || !fi.Mode().IsRegular() {
		return false
	}
	now := StatOf(fi)
	if f.Stat.Ctime == 0 && fi.Mode().Perm()&0o222 == 0 {
		now.Ctime = 0
	}
	return now == *f.Stat
}

// Same says whether r and o describe the same files with the same bytes.
func (r Record) Same(o Record) bool {
	if len(r.Files) != len(o.Files) {
		return false
	}
	for i, f := range r.Files {
		if g := o.Files[i]; f.Name != g.Name || f.Size != g.Size || f.Digest != g.Digest {
			return false
		}
	}
	return true
}

// Records is what is known of a target without opening its area.
type Records struct {
	Complete *Record // the folder at the target was published whole
	Started  *Record // a pull began and did not end; its folder may or may not be at the target
	Received int64   // bytes of Started's files that are kept for the next try
}

// Known reads what lies beside a target. Nothing there is no error. A link there, or what is no regular file where a
// record should be, is ErrForeign. A pull may be at work at the same time. The records of another user are read; Trust
// says whether to believe them.
func Known(target string) (k Records, err error) {
	dir := dirOf(target)
	if fi, err := realDir(dir); err != nil || fi == nil {
		return k, err
	}
	if k.Complete, err = readRecord(filepath.Join(dir, completeName)); err != nil {
		return k, err
	}
	if k.Started, err = readRecord(filepath.Join(dir, startedName)); err != nil || k.Started == nil {
		return k, err
	}
	k.Received, err = received(dir, *k.Started)
	return k, err
}

// KeepMidstates keeps those of a file that shall be in the folder beside it, for Midstates to give. They are a help: it
// is no error if they can't be kept, and they are gone with the next folder that lacks the file.
func (a *Area) KeepMidstates(s *lanes.States) {
	b, err := s.MarshalBinary()
	if err != nil {
		return
	}
	dir, path := filepath.Join(a.dir, statesName), statesPath(a.dir, s.Digest)
	_ = os.Mkdir(dir, 0o777)
	if fi, err := realDir(dir); err != nil || fi == nil {
		return
	}
	_ = os.Remove(path) // what has that name is never written to
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return
	}
	if _, err = f.Write(b); errors.Join(err, f.Close()) != nil {
		_ = os.Remove(path)
	}
}

// pruneStates removes the midstates of what is not in r.
func (a *Area) pruneStates(r Record) error {
	dir := filepath.Join(a.dir, statesName)
	if fi, err := realDir(dir); err != nil || fi == nil {
		return err
	}
	return eachEntry(dir, func(name string) error {
		if slices.ContainsFunc(r.Files, func(f File) bool { return f.Digest.Hex() == name }) {
			return nil
		}
		return os.Remove(filepath.Join(dir, name))
	})
}

func statesPath(dir string, d identity.Digest) string { return filepath.Join(dir, statesName, d.Hex()) }

// Midstates returns those of a file of the folder at a target that a pull has left beside it. Nil: there are none, or none
// that fit. They say nothing but whether bytes lead from one of them to the next; all of them together lead to the
// digest of f.
func Midstates(target string, f File) *lanes.States {
	for _, dir := range []string{dirOf(target), filepath.Join(dirOf(target), statesName)} {
		if fi, err := realDir(dir); err != nil || fi == nil {
			return nil
		}
	}
	in, err := durable.OpenRegular(statesPath(dirOf(target), f.Digest), os.O_RDONLY, 0)
	if err != nil {
		return nil
	}
	defer in.Close()
	b, err := io.ReadAll(io.LimitReader(in, statesSlack+lanes.Edges(f.Size, lanes.SegmentSize)*int64(len(lanes.State{}))))
	if err != nil {
		return nil
	}
	s, err := lanes.Parse(b)
	if err != nil || s.Digest != f.Digest || s.Size != f.Size {
		return nil
	}
	return s
}

func received(dir string, r Record) (sum int64, err error) {
	boot, err := durable.Disk{}.BootID()
	if err != nil {
		return 0, err
	}
	parts, err := others(dir, partsPrefix, "")
	for _, p := range parts {
		for _, f := range r.Files {
			sum += partly(filepath.Join(p, f.Digest.Hex()), f.Size, boot)
		}
	}
	return sum, err
}

func readRecord(path string) (*Record, error) {
	b, err := readFile(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var r Record
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if r.Version != recordVersion {
		return nil, fmt.Errorf("read %s: version %d, want %d", path, r.Version, recordVersion)
	}
	return &r, nil
}

func writeRecord(d durable.Disk, path string, r Record) error {
	r.Version = recordVersion
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return d.WriteFile(path, append(b, '\n'), 0o644)
}
