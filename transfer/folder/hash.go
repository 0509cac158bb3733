package folder

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/transfer/hashing"
)

// Piece is how much is best read at once: 256 KiB fit the cache that a hash works from; more cost time.
const Piece = 256 << 10

// ErrChanged: a file is no longer what it was when the directory was listed.
var ErrChanged = errors.New("file changed while it was being read")

// stamp is what changes with a file's content.
type stamp struct {
	dev, ino uint64
	size     int64
	modified time.Time
	changed  syscall.Timespec
}

func stampOf(info fs.FileInfo) stamp {
	s := stamp{size: info.Size(), modified: info.ModTime()}
	if sys, ok := info.Sys().(*syscall.Stat_t); ok {
		s.dev, s.ino, s.changed = uint64(sys.Dev), sys.Ino, sys.Ctim
	}
	return s
}

// unchanged says whether the open file is still what it was when it was listed, and still the one of that name.
func unchanged(file *os.File, f File) error {
	info, err := file.Stat()
	if err != nil {
		return err
	}
	if now := stampOf(info); now != f.seen {
		if now.size != f.seen.size {
			return fmt.Errorf("%s: %w: it had %d bytes and has %d", f.Name, ErrChanged, f.seen.size, now.size)
		}
		return fmt.Errorf("%s: %w", f.Name, ErrChanged)
	}
	if named, err := os.Lstat(f.path); err != nil || stampOf(named) != f.seen {
		return fmt.Errorf("%s: %w: another file has its name", f.Name, ErrChanged)
	}
	return nil
}

// Hashed is what was found out about a file.
type Hashed struct {
	Digest   identity.Digest
	Warnings []safetensors.Warning
}

// Hashing says who is told of the files that are hashed, by their numbers. The functions are called from several
// goroutines, for one file by one at a time; nil ones are not.
type Hashing struct {
	Moved   func(i int, done int64) // bytes of the file that were read
	Done    func(i int, h Hashed)
	Streams func() int // as in hashing.Options
}

// HashAll reads files, each once, from its start to one byte past its end, and tells of their SHA-256. They are read at
// the same time as far as that is of use, those first that come first. A shard's header is checked in the same pass. The
// first error ends it: ErrChanged where a file changes meanwhile, *safetensors.Error where a shard is none.
func (f *Folder) HashAll(ctx context.Context, files []File, o Hashing) error {
	jobs := make([]*job, len(files))
	for i, file := range files {
		jobs[i] = &job{f: f, ctx: ctx, i: i, file: file, o: o}
	}
	return hashing.Run(ctx, jobs, hashing.Options{Streams: o.Streams})
}

// job is one file that is hashed.
type job struct {
	f        *Folder
	ctx      context.Context
	i        int
	file     File
	o        Hashing
	in       *os.File
	hash     identity.Hash
	head     int64 // bytes read to check the header
	done     int64
	warnings []safetensors.Warning
}

// Open implements hashing.Job.
func (j *job) Open() (p hashing.Part, err error) {
	if j.in, err = open(j.file); err != nil {
		return p, err
	}
	j.hash = identity.NewHash()
	r := &hasher{in: j.in, hash: j.hash, ctx: j.ctx}
	j.warnings, err = j.f.check(r, j.file)
	j.head, j.done = r.done, r.done
	if err != nil && err != io.EOF {
		return p, j.Close(err)
	}
	if j.head > 0 {
		j.Moved(0)
	}
	return hashing.Part{File: j.in, Off: j.head, End: -1, To: j.hash}, nil
}

// Moved implements hashing.Job.
func (j *job) Moved(n int64) {
	j.done = j.head + n
	if j.o.Moved != nil {
		j.o.Moved(j.i, j.done)
	}
}

// Close implements hashing.Job.
func (j *job) Close(err error) error {
	defer j.in.Close()
	switch changed := unchanged(j.in, j.file); {
	case changed != nil:
		return changed
	case err != nil:
		return safetensors.InFile(j.file.Name, err)
	case j.done != j.file.Size:
		return fmt.Errorf("%s: %w: it has %d bytes, %d were read", j.file.Name, ErrChanged, j.file.Size, j.done)
	}
	if j.o.Done != nil {
		j.o.Done(j.i, Hashed{identity.DigestOf(j.hash), j.warnings})
	}
	return nil
}

// hasher hashes what is read through it.
type hasher struct {
	in   io.Reader
	hash identity.Hash
	ctx  context.Context
	done int64
}

func (r *hasher) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, context.Cause(r.ctx)
	}
	n, err := r.in.Read(p)
	r.hash.Write(p[:n])
	r.done += int64(n)
	return n, err
}

// check reads the header of a shard.
func (f *Folder) check(r io.Reader, file File) ([]safetensors.Warning, error) {
	if file.Kind != Weight {
		return nil, nil
	}
	_, _, err := Header(r, file.Size)
	var rule *safetensors.Error
	if f.options.AnyDType && errors.As(err, &rule) && rule.Code == safetensors.CodeUnknownDType {
		return []safetensors.Warning{{Code: rule.Code, Message: safetensors.InFile(file.Name, rule).Error()}}, nil
	}
	return nil, err
}

// Header reads and checks the header of a shard of size bytes, of which r gives the first. rest gives what follows the
// header. The errors are those of safetensors.Read.
func Header(r io.Reader, size int64) (h safetensors.Header, rest io.Reader, err error) {
	read := &start{r: r}
	h, err = safetensors.Read(read, size)
	if err != nil {
		return h, nil, err
	}
	return h, io.MultiReader(bytes.NewReader(read.buf[h.Size:]), r), nil
}

// start gives the start of a stream as an io.ReaderAt, and keeps what it has read of it.
type start struct {
	r   io.Reader
	buf []byte
}

func (s *start) ReadAt(p []byte, off int64) (int, error) {
	if missing := off + int64(len(p)) - int64(len(s.buf)); missing > 0 {
		at := len(s.buf)
		s.buf = append(s.buf, make([]byte, missing)...)
		n, err := io.ReadFull(s.r, s.buf[at:])
		if s.buf = s.buf[:at+n]; err != nil {
			return 0, err
		}
	}
	return copy(p, s.buf[off:]), nil
}

// Sum is the identity of a directory.
type Sum struct {
	Manifest identity.Manifest
	Warnings []safetensors.Warning // those of Open and those found while reading
}

// Sum hashes all shards, several at a time, and returns their manifest. moved, which may be nil, is told how many bytes of
// a file are done; it is called from several goroutines.
func (f *Folder) Sum(ctx context.Context, moved func(file File, done int64)) (Sum, error) {
	files := slices.SortedFunc(slices.Values(f.Shards), func(a, b File) int { return cmp.Compare(b.Size, a.Size) })
	hashed := make([]Hashed, len(files))
	o := Hashing{Done: func(i int, h Hashed) { hashed[i] = h }}
	if moved != nil {
		o.Moved = func(i int, done int64) { moved(files[i], done) }
	}
	sum := Sum{Warnings: slices.Clone(f.Warnings)}
	if err := f.HashAll(ctx, files, o); err != nil {
		return sum, err
	}
	shards := make([]identity.Shard, len(files))
	for i, h := range hashed {
		sum.Warnings = append(sum.Warnings, h.Warnings...)
		shards[i] = identity.Shard{Filename: files[i].Name, Size: uint64(files[i].Size), Digest: h.Digest}
	}
	m, err := identity.New(shards)
	sum.Manifest = m
	return sum, err
}

// Read opens a file for sending what HashAll has hashed. unchangedSince says whether it is still that; it is to be asked
// after the last byte was read and before r is closed. ErrChanged where it is not so from the start.
func (f *Folder) Read(file File) (r io.ReadSeekCloser, unchangedSince func() error, err error) {
	in, err := open(file)
	if err != nil {
		return nil, nil, err
	}
	return in, func() error { return unchanged(in, file) }, nil
}
