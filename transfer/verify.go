package transfer

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/transfer/hashing"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// FindingCode says in what a file differs from what it should be.
type FindingCode string

// The codes.
const (
	FileMissing  FindingCode = "missing"
	FileShort    FindingCode = "short_file"
	FileLong     FindingCode = "long_file"
	FileMismatch FindingCode = "digest_mismatch"
	FileKind     FindingCode = "not_a_regular_file"
	FileExtra    FindingCode = "extra"
)

// Finding is one file that is not what it should be.
type Finding struct {
	Name     string          `json:"name"`
	Code     FindingCode     `json:"code"`
	WantSize int64           `json:"want_size_bytes"`
	GotSize  int64           `json:"got_size_bytes"`
	Want     identity.Digest `json:"want_sha256,omitzero"`
	Got      identity.Digest `json:"got_sha256,omitzero"` // zero: not hashed
	Damaged  []Range         `json:"damaged,omitempty"`   // where it differs, by its midstates; empty: not known
}

// Range is a part of a file, in bytes.
type Range struct {
	Offset int64 `json:"offset"`
	Size   int64 `json:"size_bytes"`
}

// String says it in one line.
func (f Finding) String() string {
	if q := strconv.Quote(f.Name); q != `"`+f.Name+`"` {
		f.Name = q
	}
	switch f.Code {
	case FileShort, FileLong:
		return fmt.Sprintf("%s: %s: want %d bytes, got %d", f.Name, f.Code, f.WantSize, f.GotSize)
	case FileMismatch:
		return fmt.Sprintf("%s: %s: want %s, got %s", f.Name, f.Code, f.Want, f.Got) + f.where()
	}
	return f.Name + ": " + string(f.Code)
}

func (f Finding) where() string {
	if len(f.Damaged) == 0 {
		return ""
	}
	var parts []string
	for _, r := range f.Damaged {
		parts = append(parts, fmt.Sprintf("%d bytes at %d", r.Size, r.Offset))
	}
	return "; damaged: " + some(parts)
}

// Verified is what a check of a folder found.
type Verified struct {
	Files    int       `json:"files"`      // that match
	Bytes    int64     `json:"size_bytes"` // of those
	Findings []Finding `json:"findings"`   // in ascending order of name; empty: all is well
}

// VerifyOptions says how to verify. The zero value is ready to use.
type VerifyOptions struct {
	Jobs  int  // cores that hash at a time; zero: all
	Extra bool // a file that is not wanted is a finding
	Watch Watch

	// Midstates, which may be nil, returns those of a file, or nil. They need no trust: with them the parts of a file are
	// read and hashed at the same time, and a file that they do not fit is hashed in order.
	Midstates func(staging.File) *lanes.States
}

// Midstates asks a registry for those of a file. Nil: it has none, or none that fit, or they can't be had.
func Midstates(ctx context.Context, c *client.Client, f staging.File) *lanes.States {
	if f.Size <= 2*lanes.SegmentSize { // none are recorded
		return nil
	}
	form, err := c.Midstates(ctx, f.Digest, lanes.FormSize(f.Size))
	if err != nil {
		return nil
	}
	s, err := lanes.Parse(form)
	if err != nil || s.Digest != f.Digest || s.Size != f.Size {
		return nil
	}
	return s
}

// Doubt notes in the record beside a folder, which must be in the form that staging.Target returns, which of its files
// were found not to be what the record says, and returns their names: the next pull hashes them, although they may look
// as they did when they were verified. It is durable. There may be nothing to note. staging.ErrBusy, staging.ErrForeign,
// and what the filesystem says to who may not write there.
func Doubt(ctx context.Context, target string, found []Finding) (names []string, err error) {
	known, err := staging.Known(target)
	if err != nil || len(doubtful(known.Complete, found)) == 0 {
		return nil, err
	}
	area, err := staging.Open(ctx, target, staging.Options{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, area.Close()) }()
	if known, err = staging.Known(target); err != nil { // a pull may have ended just now
		return nil, err
	}
	if names = doubtful(known.Complete, found); len(names) == 0 {
		return nil, nil
	}
	b, err := json.MarshalIndent(known.Complete, "", "  ")
	if err == nil {
		err = area.Held()
	}
	if err == nil {
		path := filepath.Join(filepath.Dir(target), "."+filepath.Base(target)+".kiln", "complete.json")
		err = durable.Disk{}.WriteFile(path, append(b, '\n'), 0o644)
	}
	return names, err
}

// doubtful takes the look of files from a record that are found not to be what it says, and returns their names.
func doubtful(r *staging.Record, found []Finding) (names []string) {
	if r == nil {
		return nil
	}
	for i, f := range r.Files {
		wrong := func(x Finding) bool { return x.Name == f.Name && x.Want == f.Digest }
		if f.Stat != nil && slices.ContainsFunc(found, wrong) {
			r.Files[i].Stat = nil
			names = append(names, f.Name)
		}
	}
	return names
}

type piece [durable.PieceSize]byte

var pieces = sync.Pool{New: func() any { return new(piece) }}

// ErrChanged: a file changed while it was read.
var ErrChanged = errors.New("changed while it was read")

// Verify reads and hashes every file of a folder that is wanted. Symbolic links are not followed. An error means that it
// could not be told; what was found is in Verified.
func Verify(ctx context.Context, dir string, want []staging.File, o VerifyOptions) (Verified, error) {
	fi, err := os.Stat(dir)
	if err == nil && !fi.IsDir() {
		err = fmt.Errorf("%s: not a folder", dir)
	}
	if err != nil {
		return Verified{}, err
	}
	there, err := list(dir)
	if err != nil {
		return Verified{}, err
	}
	v := verify{dir: dir, o: o}
	var jobs []hashing.Job
	for _, f := range want {
		fi := there[f.Name]
		delete(there, f.Name)
		if v.plain(f, fi) {
			jobs = append(jobs, v.jobs(&candidate{v: &v, File: f, path: filepath.Join(dir, filepath.FromSlash(f.Name)),
				stat: staging.StatOf(fi)})...)
		}
	}
	err = v.run(ctx, jobs)
	for name, fi := range there {
		if o.Extra {
			v.found = append(v.found, Finding{Name: name, Code: FileExtra, GotSize: fi.Size()})
		}
	}
	slices.SortFunc(v.found, func(a, b Finding) int { return cmp.Compare(a.Name, b.Name) })
	return Verified{Files: v.files, Bytes: v.bytes, Findings: v.found}, err
}

type verify struct {
	dir string
	o   VerifyOptions

	mu    sync.Mutex // guards the rest, and what candidates say is guarded
	files int
	bytes int64
	found []Finding
	again []hashing.Job // of files of which midstates did not fit
}

// run hashes, and then again what is in doubt.
func (v *verify) run(ctx context.Context, jobs []hashing.Job) error {
	err := hashing.Run(ctx, jobs, hashing.Options{Cores: v.o.Jobs})
	if err == nil {
		err = hashing.Run(ctx, v.again, hashing.Options{Cores: v.o.Jobs})
	}
	return err
}

func (v *verify) add(f Finding) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.found = append(v.found, f)
}

// plain says whether a file is worth reading: it is there, regular and of the right size.
func (v *verify) plain(f staging.File, fi fs.FileInfo) bool {
	var code FindingCode
	switch {
	case fi == nil:
		v.add(Finding{Name: f.Name, Code: FileMissing, WantSize: f.Size, Want: f.Digest})
		return false
	case !fi.Mode().IsRegular():
		code = FileKind
	case fi.Size() < f.Size:
		code = FileShort
	case fi.Size() > f.Size:
		code = FileLong
	default:
		return true
	}
	v.add(Finding{Name: f.Name, Code: code, WantSize: f.Size, GotSize: fi.Size(), Want: f.Digest})
	return false
}

// candidate is a file that may be what it should be.
type candidate struct {
	staging.File
	v      *verify
	path   string
	stat   staging.Stat // when the folder was listed
	states *lanes.States

	// Guarded by the verify.
	left    int   // segments that are not checked yet
	moved   int64 // bytes that were hashed
	damaged []bool
}

// jobs are those of a file: one for each of its segments if there are midstates, else one.
func (v *verify) jobs(c *candidate) []hashing.Job {
	v.o.Watch.tell(Event{Step: Planned, Phase: PhaseVerify, File: c.Name, Total: c.Size})
	if v.o.Midstates != nil {
		c.states = v.o.Midstates(c.File)
	}
	if c.states == nil {
		return []hashing.Job{&whole{candidate: c}}
	}
	c.left, c.damaged = c.states.Len(), make([]bool, c.states.Len())
	jobs := make([]hashing.Job, c.left)
	for i := range jobs {
		jobs[i] = &segment{candidate: c, i: i}
	}
	return jobs
}

// open opens the file, which must be what it was when the folder was listed.
func (c *candidate) open() (*os.File, error) {
	in, err := os.OpenFile(c.path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, c.failed(err)
	}
	if err := c.unchanged(in); err != nil {
		in.Close()
		return nil, c.failed(err)
	}
	return in, nil
}

func (c *candidate) unchanged(in *os.File) error {
	fi, err := in.Stat()
	if err == nil && staging.StatOf(fi) != c.stat {
		err = ErrChanged
	}
	return err
}

// close closes the file after it was read, or could not be.
func (c *candidate) close(in *os.File, err error) error {
	defer in.Close()
	if err == nil {
		err = c.unchanged(in)
	}
	return c.failed(err)
}

func (c *candidate) failed(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("verify %s: %w", c.Name, err)
}

func (c *candidate) tell(s Step, n int64) {
	c.v.o.Watch.tell(Event{Step: s, Phase: PhaseVerify, File: c.Name, Bytes: n, Total: c.Size})
}

// matches counts the file.
func (c *candidate) matches() {
	c.v.mu.Lock()
	defer c.v.mu.Unlock()
	c.v.files++
	c.v.bytes += c.Size
}

// ranges joins the segments that are damaged.
func (c *candidate) ranges() (all []Range) {
	for i, damaged := range c.damaged {
		off, n := c.states.Range(i)
		if last := len(all) - 1; damaged && i > 0 && c.damaged[i-1] {
			all[last].Size += n
		} else if damaged {
			all = append(all, Range{off, n})
		}
	}
	return all
}

// whole is a file that is hashed in order.
type whole struct {
	*candidate
	in   *os.File
	hash identity.Hash
}

// Open implements hashing.Job.
func (w *whole) Open() (p hashing.Part, err error) {
	w.in, err = w.open()
	w.hash = identity.NewHash()
	return hashing.Part{File: w.in, End: -1, To: w.hash}, err
}

// Moved implements hashing.Job.
func (w *whole) Moved(n int64) { w.tell(Moved, n) }

// Close implements hashing.Job.
func (w *whole) Close(err error) error {
	if err := w.close(w.in, err); err != nil {
		return err
	}
	w.tell(Done, w.Size)
	if got := identity.DigestOf(w.hash); got != w.Digest {
		w.v.add(Finding{Name: w.Name, Code: FileMismatch, WantSize: w.Size, GotSize: w.Size, Want: w.Digest, Got: got,
			Damaged: w.ranges()})
		return nil
	}
	w.matches()
	return nil
}

// segment is a part of a file that is checked for itself.
type segment struct {
	*candidate
	i     int
	done  int64
	in    *os.File
	check *lanes.Check
}

// Open implements hashing.Job.
func (s *segment) Open() (p hashing.Part, err error) {
	s.in, err = s.open()
	s.check = s.states.Check(s.i)
	off, n := s.states.Range(s.i)
	return hashing.Part{File: s.in, Off: off, End: off + n, To: s.check}, err
}

// Moved implements hashing.Job.
func (s *segment) Moved(n int64) {
	s.v.mu.Lock()
	defer s.v.mu.Unlock()
	s.moved += n - s.done
	s.done = n
	s.tell(Moved, s.moved)
}

// Close implements hashing.Job.
func (s *segment) Close(err error) error {
	if err := s.close(s.in, err); err != nil {
		return err
	}
	if s.last(s.check.Err() != nil) {
		s.tell(Done, s.Size)
		s.matches()
	}
	return nil
}

// last notes how the check of a segment ended. It says whether it was the last one, and the file is what it should be.
func (s *segment) last(damaged bool) bool {
	s.v.mu.Lock()
	defer s.v.mu.Unlock()
	s.damaged[s.i] = damaged
	if s.left--; s.left > 0 {
		return false
	}
	if len(s.ranges()) == 0 {
		return true
	}
	s.v.again = append(s.v.again, &whole{candidate: s.candidate})
	return false
}
