package adapters

import (
	"context"
	"fmt"
	"io"
	"io/fs"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// Ranges reads the files of an artifact from its registry, one request for each read, which is tried again as
// client.Retry does. It suits files of some buffers, as adapters are.
func Ranges(c *client.Client, p transfer.Plan) gpuload.Source { return ranges{c, p} }

type ranges struct {
	c *client.Client
	p transfer.Plan
}

// Open implements gpuload.Source.
func (s ranges) Open(ctx context.Context, name string) (gpuload.File, error) {
	for _, f := range s.p.Files {
		if f.Name == name {
			return remote{ctx, s, f}, nil
		}
	}
	return nil, fmt.Errorf("open %s of %s: %w", name, s.p.Reference(), fs.ErrNotExist)
}

type remote struct {
	ctx context.Context
	ranges
	file staging.File
}

// ReadAt implements io.ReaderAt.
func (f remote) ReadAt(b []byte, off int64) (n int, err error) {
	want := min(int64(len(b)), f.file.Size-off)
	if want <= 0 {
		return 0, io.EOF
	}
	err = f.c.Retry(f.ctx, f.file.Name, func() error {
		r, err := f.c.Blob(f.ctx, f.p.Repository, f.file.Digest, off, want, f.file.Size)
		if err != nil {
			return err
		}
		defer r.Close()
		n, err = io.ReadFull(r, b[:want])
		return err
	})
	if err == nil && n < len(b) {
		err = io.EOF
	}
	return n, err
}

// Stamp implements gpuload.File.
func (f remote) Stamp() (gpuload.Stamp, error) { return gpuload.Stamp{Size: f.file.Size}, nil }

// Close implements gpuload.File.
func (f remote) Close() error { return nil }
