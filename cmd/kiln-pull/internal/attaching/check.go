package attaching

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/internal/cli"
)

// piece is how much of a device's memory is read at a time, in bytes.
const piece = 4 << 20

// checked is what --check --json prints.
type checked struct {
	Aggregate identity.Aggregate `json:"aggregate_sha256"`
	Shards    int                `json:"shards"`
	Tensors   int                `json:"tensors"`
	Bytes     int64              `json:"bytes"`          // hashed, headers included, each replica for itself
	Attached  float64            `json:"attach_seconds"` // from the connection to the last mapping
	Hashed    float64            `json:"hash_seconds"`
}

// check proves without the holder's word that the mapped memory is the base.
func (f *flags) check(ctx context.Context, a identity.Aggregate, stdout io.Writer) (err error) {
	start := time.Now()
	at, err := f.attach(ctx, a)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, at.Close()) }()
	open, err := opened(at)
	defer func() { err = closed(open, err) }()
	if err != nil {
		return err
	}
	attached := time.Now()
	n, err := f.prove(ctx, at, open)
	if err != nil {
		return err
	}
	d := at.Document
	out := checked{a, len(d.Shards), len(d.Tensors), n, attached.Sub(start).Seconds(), time.Since(attached).Seconds()}
	if f.json {
		return json.NewEncoder(stdout).Encode(out)
	}
	_, err = fmt.Fprintf(stdout, "intact: %s; attached in %.4f s, hashed here in %.3f s\n", summary(d), out.Attached,
		out.Hashed)
	return err
}

// block is the data of a shard that can be read here.
type block struct {
	shard int
	io.ReaderAt
	close func() error
}

// closed closes blocks after a use of them that ended with err. When a device does not answer it leaves them to the end
// of the process: each would be waited for.
func closed(blocks []block, err error) error {
	for _, b := range blocks {
		if errors.Is(err, gpuload.ErrHung) {
			break
		}
		err = errors.Join(err, b.close())
	}
	return err
}

// opened opens the memory of devices. What it returns is to be closed also after an error.
func opened(at *attach.Attachment) (all []block, err error) {
	has := map[int]bool{}
	for _, b := range at.Blocks {
		has[b.Shard] = true
		if b.Data != nil {
			all = append(all, block{b.Shard, bytes.NewReader(b.Data), func() error { return nil }})
			continue
		}
		m, err := cuda.Import(b.Device.UUID, b.Handle)
		if err != nil {
			return all, cli.Exit(cli.CodeDevice, fmt.Errorf("shard %s: %w", at.Document.Shards[b.Shard].Name, err))
		}
		all = append(all, block{b.Shard, io.NewSectionReader(m, b.Offset, at.Document.Shards[b.Shard].Data), m.Close})
	}
	for i := range at.Document.Shards {
		if !has[i] {
			all = append(all, block{i, bytes.NewReader(nil), func() error { return nil }})
		}
	}
	return all, nil
}

// prove hashes every block with the header of its shard, on all processors, and returns how many bytes that were. It
// ends with the first error.
func (f *flags) prove(ctx context.Context, at *attach.Attachment, blocks []block) (int64, error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	told := make([][]gpuload.Tensor, len(at.Document.Shards)) // of each shard
	for _, t := range at.Document.Tensors {
		told[t.Shard] = append(told[t.Shard], t)
	}
	var next, total atomic.Int64
	var work sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(blocks)) {
		work.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(blocks)) && ctx.Err() == nil; i = next.Add(1) - 1 {
				b := blocks[i]
				s := at.Document.Shards[b.shard]
				if err := f.proveBlock(ctx, &at.Document, s, told[b.shard], b); err != nil {
					stop(fmt.Errorf("shard %s: %w", s.Name, err))
				}
				total.Add(s.Size)
			}
		})
	}
	work.Wait()
	return total.Load(), context.Cause(ctx)
}

func (f *flags) proveBlock(
	ctx context.Context, d *attach.Document, s attach.Shard, told []gpuload.Tensor, b block,
) error {
	head, err := f.header(ctx, d, s.Digest)
	if err == nil {
		err = tensors(s, told, head)
	}
	if err == nil {
		err = hash(ctx, s, head, b)
	}
	return err
}

func (f *flags) header(ctx context.Context, d *attach.Document, shard identity.Digest) ([]byte, error) {
	if d.Adapter != nil {
		return f.client().AdapterHeader(ctx, d.Aggregate, d.Adapter.Digest, shard)
	}
	return f.client().Header(ctx, d.Aggregate, shard)
}

// tensors compares what the document says of a shard with what its header says.
func tensors(s attach.Shard, told []gpuload.Tensor, head []byte) error {
	if int64(len(head)) != s.Size-s.Data {
		return cli.Exit(cli.CodeNo, fmt.Errorf("the header has %d bytes, want %d", len(head), s.Size-s.Data))
	}
	h, err := safetensors.ParseHeader([8]byte(head[:8]), head[8:], s.Size)
	if err != nil {
		return cli.Exit(cli.CodeNo, err)
	}
	same := func(t safetensors.Tensor, o gpuload.Tensor) bool {
		return t.Name == o.Name && string(t.DType) == o.DType && slices.Equal(t.Shape, o.Shape) && t.Begin == o.Offset &&
			t.End-t.Begin == o.NBytes
	}
	for i, t := range h.Tensors {
		if i >= len(told) || !same(t, told[i]) {
			return cli.Exit(cli.CodeNo, fmt.Errorf("tensor %.100q is not where its header says", t.Name))
		}
	}
	if len(told) != len(h.Tensors) {
		return cli.Exit(cli.CodeNo, fmt.Errorf("%d tensors, the header has %d", len(told), len(h.Tensors)))
	}
	return nil
}

// hash compares the digest of a header and a block.
func hash(ctx context.Context, s attach.Shard, head []byte, b block) error {
	h := identity.NewHash()
	h.Write(head)
	buf := make([]byte, min(piece, s.Data))
	for off := int64(0); off < s.Data; {
		if err := ctx.Err(); err != nil {
			return err
		}
		part := buf[:min(int64(len(buf)), s.Data-off)]
		if n, err := b.ReadAt(part, off); n < len(part) {
			return cli.Exit(cli.CodeDevice, err)
		}
		h.Write(part)
		off += int64(len(part))
	}
	if got := identity.DigestOf(h); got != s.Digest {
		return cli.Exit(cli.CodeNo,
			fmt.Errorf("the mapped memory is not what was published: expected %s, got %s", s.Digest, got))
	}
	return nil
}
