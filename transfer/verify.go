package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
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
		return fmt.Sprintf("%s: %s: want %s, got %s", f.Name, f.Code, f.Want, f.Got)
	}
	return f.Name + ": " + string(f.Code)
}

// Verified is what a check of a folder found.
type Verified struct {
	Files    int       `json:"files"`      // that match
	Bytes    int64     `json:"size_bytes"` // of those
	Findings []Finding `json:"findings"`   // in ascending order of name; empty: all is well
}

// VerifyOptions says how to verify. The zero value is ready to use.
type VerifyOptions struct {
	Jobs  int  // files read at a time; zero: one per core
	Extra bool // a file that is not wanted is a finding
	Watch Watch
}

type piece [durable.PieceSize]byte

var pieces = sync.Pool{New: func() any { return new(piece) }}

// ErrChanged: a file changed while it was read.
var ErrChanged = errors.New("changed while it was read")

// Verify reads and hashes every file of a folder that is wanted. Symbolic links are not followed. An error means that it
// could not be told; what was found is in Verified.
func Verify(ctx context.Context, dir string, want []staging.File, o VerifyOptions) (Verified, error) {
	if o.Jobs <= 0 {
		o.Jobs = runtime.GOMAXPROCS(0)
	}
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
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(o.Jobs)
	for _, f := range want {
		fi := there[f.Name]
		delete(there, f.Name)
		if v.plain(f, fi) {
			o.Watch.tell(Event{Step: Planned, Phase: PhaseVerify, File: f.Name, Total: f.Size})
			g.Go(func() error { return v.hash(ctx, f, fi) })
		}
	}
	err = g.Wait()
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

	mu    sync.Mutex // guards the rest
	files int
	bytes int64
	found []Finding
}

func (v *verify) add(f staging.File, code FindingCode, size int64, got identity.Digest) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.found = append(v.found, Finding{f.Name, code, f.Size, size, f.Digest, got})
}

// plain says whether a file is worth reading: it is there, regular and of the right size.
func (v *verify) plain(f staging.File, fi fs.FileInfo) bool {
	var code FindingCode
	switch {
	case fi == nil:
		v.add(f, FileMissing, 0, identity.Digest{})
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
	v.add(f, code, fi.Size(), identity.Digest{})
	return false
}

func (v *verify) hash(ctx context.Context, f staging.File, fi fs.FileInfo) error {
	got, err := v.read(ctx, f, fi)
	if err != nil {
		return fmt.Errorf("verify %s: %w", f.Name, err)
	}
	if got != f.Digest {
		v.add(f, FileMismatch, f.Size, got)
		return nil
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.files++
	v.bytes += f.Size
	return nil
}

// read hashes a file, which must be the one that fi described, from its start to its end.
func (v *verify) read(ctx context.Context, f staging.File, fi fs.FileInfo) (d identity.Digest, err error) {
	path := filepath.Join(v.dir, filepath.FromSlash(f.Name))
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return d, err
	}
	defer file.Close()
	now, err := file.Stat()
	if err != nil {
		return d, err
	}
	if staging.StatOf(now) != staging.StatOf(fi) {
		return d, ErrChanged
	}
	h := identity.NewHash()
	buf := pieces.Get().(*piece)
	defer pieces.Put(buf)
	for done := int64(0); ; {
		if err := context.Cause(ctx); err != nil {
			return d, err
		}
		n, err := io.ReadFull(file, buf[:])
		h.Write(buf[:n])
		done += int64(n)
		v.o.Watch.tell(Event{Step: Moved, Phase: PhaseVerify, File: f.Name, Bytes: done, Total: f.Size})
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			break
		}
		if err != nil {
			return d, err
		}
	}
	if now, err = file.Stat(); err != nil {
		return d, err
	}
	if staging.StatOf(now) != staging.StatOf(fi) {
		return d, ErrChanged
	}
	v.o.Watch.tell(Event{Step: Done, Phase: PhaseVerify, File: f.Name, Bytes: f.Size, Total: f.Size})
	return identity.DigestOf(h), nil
}
