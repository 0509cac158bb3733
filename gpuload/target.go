// Package gpuload brings the weights of a base model into memory that other processes can use, and lets nobody have
// that memory before every byte of it was checked.
//
// It makes one pass: each byte is read once into a buffer, the same buffer is hashed and copied to the target, and the
// buffer is used again when both are done. A Target is the memory: hostmem keeps it in sealed files without a name,
// device targets come with their own packages. Memory for buffers does not depend on the size of the model.
package gpuload

import (
	"context"
	"io"
	"os"

	"github.com/kiln-registry/kiln-registry/identity"
)

// Device is one place where memory can be had.
type Device struct {
	Index       int    // as Alloc takes it
	Name        string // for people
	Backend     string // host, cuda, …
	Free        int64  // bytes that can be had now
	Granularity int64  // an allocation is rounded up to a multiple of it; 0 means 1
	UUID        string // by which another process finds the device; empty: the device has none
	PCI         string // its address on the bus, 0000:3b:00.0; empty: not known
}

// Block names one allocation of a target. Blocks count from 0 in the order of Alloc.
type Block int

// Token stands for one submitted copy.
type Token interface {
	// Wait returns when the copy no longer reads its buffer, or with an error when it failed or ctx ended. After an
	// error the buffer must be taken as still being read. nil does not promise that the bytes arrived: only
	// Target.Wait does.
	Wait(ctx context.Context) error
}

// Handle is how another process gets at a published block.
type Handle struct {
	Kind       string   // memfd, cuda-ipc, …; none when the target keeps no bytes
	Shard      int      // the index of the shard in the plan; Load sets it, a target leaves it at 0
	Device     int      // the index of the device that has the block
	Size       int64    // bytes of the block
	File       *os.File // kinds that are a descriptor; it belongs to the target and is closed by Free
	Raw        []byte   // other kinds; empty for a block of no bytes
	Allocation int64    // bytes of the memory behind the handle, where who opens it must know; else 0
}

// Target is the memory that one load fills. It serves one load: after Free it is not used again. Submit and
// Token.Wait are called from several goroutines at once, all else from one.
type Target interface {
	// Devices lists the devices of the target and what is free on them now.
	Devices(ctx context.Context) ([]Device, error)
	// Alloc takes n bytes on a device. n may be 0: the block then has no bytes.
	Alloc(ctx context.Context, device int, n int64) (Block, error)
	// Submit starts a copy of buf to offset off of block b. buf must stay as it is until the token's Wait is done.
	Submit(ctx context.Context, buf []byte, b Block, off int64) (Token, error)
	// Wait returns when every submitted copy is done, with nil only if all of them arrived. A device may report a
	// failed copy here and nowhere else.
	Wait(ctx context.Context) error
	// Publish makes the blocks usable by others and no longer writable by this process, and returns one handle for
	// each block, in order. Before it, no handle exists. After an error none does.
	Publish(ctx context.Context) ([]Handle, error)
	// Free waits until no copy reads its buffer any more, then gives all memory and all handles back. It may be
	// called at any time, and again. After ErrHung copies may read their buffers still.
	Free() error
}

// Pinner is what a target has in addition when its device copies faster from memory that was registered with it.
type Pinner interface {
	// Pin registers buf until unpin is called or the target is freed. When it fails, Load tries it with smaller buffers,
	// then goes on without, and says so.
	Pin(buf []byte) (unpin func() error, err error)
}

// Reader is what a target has in addition when its blocks can be read again by this process.
type Reader interface {
	// ReadBack fills buf with what block b holds from offset off, before publication or after it. It is called from
	// several goroutines at once, and not while a copy to the block is open. After ErrHung buf may be written to still.
	ReadBack(ctx context.Context, b Block, off int64, buf []byte) error
}

// Keeper keeps the bytes of a load on a disk, in the same pass. Keep is called once for each shard, from several
// goroutines at once; size is that of the file.
type Keeper interface {
	Keep(shard string, size int64) (Kept, error)
}

// Kept is one shard on its way to a disk. It is used by one goroutine at a time.
type Kept interface {
	// WriteAt is given every byte of the file once, also those of the header, in order. It may not keep b.
	io.WriterAt

	// Commit is called when the file is whole and has the digest that it must have, if one is known. It is not called
	// after an error.
	Commit(d identity.Digest) error

	// Close is called last, once, whatever happened. Without Commit what was kept is worth nothing.
	Close() error
}
