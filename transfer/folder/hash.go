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
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
)

// Piece is how much is read at once: 256 KiB fits the cache that the hash works from; more costs time.
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

var pieces = sync.Pool{New: func() any { return new([Piece]byte) }}

// Hash reads a file once, from its start to one byte past its end, and returns its SHA-256. A shard's header is checked
// in the same pass. moved, which may be nil, is told how many bytes are done. ErrChanged where the file changes
// meanwhile; *safetensors.Error where a shard is none.
func (f *Folder) Hash(ctx context.Context, file File, moved func(int64)) (identity.Digest, []safetensors.Warning, error) {
	in, err := open(file)
	if err != nil {
		return identity.Digest{}, nil, err
	}
	defer in.Close()
	r := &hasher{in: in, hash: identity.NewHash(), ctx: ctx, moved: moved}
	warnings, err := f.check(r, file)
	if err == nil {
		buf := pieces.Get().(*[Piece]byte)
		defer pieces.Put(buf)
		for err == nil {
			_, err = r.Read(buf[:])
		}
	}
	switch changed := unchanged(in, file); {
	case changed != nil:
		return identity.Digest{}, nil, changed
	case err != io.EOF:
		return identity.Digest{}, nil, safetensors.InFile(file.Name, err)
	case r.done != file.Size:
		err := fmt.Errorf("%s: %w: it has %d bytes, %d were read", file.Name, ErrChanged, file.Size, r.done)
		return identity.Digest{}, nil, err
	}
	return identity.DigestOf(r.hash), warnings, nil
}

// hasher hashes what is read through it.
type hasher struct {
	in    io.Reader
	hash  identity.Hash
	ctx   context.Context
	moved func(int64)
	done  int64
}

func (r *hasher) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, context.Cause(r.ctx)
	}
	n, err := r.in.Read(p)
	r.hash.Write(p[:n])
	r.done += int64(n)
	if r.moved != nil && n > 0 {
		r.moved(r.done)
	}
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
	sum := Sum{Warnings: slices.Clone(f.Warnings)}
	shards := make([]identity.Shard, len(f.Shards))
	order := make([]int, len(f.Shards))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(f.Shards[b].Size, f.Shards[a].Size) })
	var mu sync.Mutex
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	for _, i := range order {
		g.Go(func() error {
			file := f.Shards[i]
			d, warnings, err := f.Hash(ctx, file, func(n int64) {
				if moved != nil {
					moved(file, n)
				}
			})
			mu.Lock()
			defer mu.Unlock()
			sum.Warnings = append(sum.Warnings, warnings...)
			shards[i] = identity.Shard{Filename: file.Name, Size: uint64(file.Size), Digest: d}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return sum, err
	}
	m, err := identity.New(shards)
	sum.Manifest = m
	return sum, err
}

// Read opens a file for sending what Hash has hashed. unchangedSince says whether it is still that; it is to be asked
// after the last byte was read and before r is closed. ErrChanged where it is not so from the start.
func (f *Folder) Read(file File) (r io.ReadSeekCloser, unchangedSince func() error, err error) {
	in, err := open(file)
	if err != nil {
		return nil, nil, err
	}
	return in, func() error { return unchanged(in, file) }, nil
}
