// Package holding brings a model into memory for kiln-pull resident: from a folder, or from a registry in one pass.
package holding

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
	"github.com/kiln-registry/kiln-registry/gpuload/resident"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

const (
	phaseLoad  = "load"
	configName = "config.json"
	maxConfig  = 16 << 20 // bytes of a config.json that is read
)

// Options says what is held, and how it is loaded.
type Options struct {
	Dir    string             // the folder; with Resolve, the one that is made, or empty for none
	Want   identity.Aggregate // what the shards must be; zero: whatever they are
	Target gpuload.Target
	Cache  string // a folder, through which files are pulled; empty: none

	// Resolve says what is held and where it comes from; nil: Dir is held as it is. The client is closed once it is not
	// needed.
	Resolve func(context.Context) (*client.Client, transfer.Plan, error)

	Direct, VerifyDevice bool              // Direct: past the page cache, where a folder is read
	MaxBuffer            int64             // as in gpuload.Options
	Placement            gpuload.Placement // as there
	Note, Warn           func(line string) // for people
	Watch                transfer.Watch
}

// Holding is one model on its way into memory. Made by New; it is loaded once. The zero value holds nothing.
type Holding struct {
	Options
	made string // a folder that nobody named; empty: none
}

// New returns the holding of what o says. It owns the target from the call on.
func New(o Options) *Holding { return &Holding{Options: o} }

// Close frees the target, also where nothing was loaded, and removes what Load has left and nobody named.
func (h *Holding) Close() error {
	var err error
	if h.Target != nil {
		err = h.Target.Free()
	}
	if h.made != "" {
		err = errors.Join(err, os.RemoveAll(h.made))
	}
	return err
}

// Load holds the weights of the folder, or those that a registry has. These come straight into memory, each byte
// received once and hashed once; with Dir they are written there in the same pass, and the folder is one that was
// pulled, or is not there. Where it is there already, or some of the shards are, from an interrupted pull or in the
// Cache, the pull ends first and the folder is loaded. The errors are those of gpuload.Load and transfer.Pull, and
// ErrSent.
func (h *Holding) Load(ctx context.Context) (resident.Held, error) {
	if h.Resolve == nil {
		return h.folder(ctx, h.Dir)
	}
	return h.registry(ctx)
}

// folder holds the weights of a folder.
func (h *Holding) folder(ctx context.Context, dir string) (held resident.Held, err error) {
	if dir, err = filepath.Abs(dir); err != nil {
		return held, err
	}
	in, err := folder.Open(dir, folder.Options{})
	if err != nil {
		return held, err
	}
	for _, w := range in.Warnings {
		h.Warn(fmt.Sprintf("%s (%s)", w.Message, w.Code))
	}
	want, err := h.wanted(in)
	if err != nil {
		return held, err
	}
	weights, err := h.read(ctx, in, want)
	if err != nil {
		return held, err
	}
	return resident.Held{Weights: weights, Path: in.Dir, Config: config(in), At: time.Now()}, nil
}

// IsDir says whether an argument is meant as a folder: it is one, or it is written as a path.
func IsDir(arg string) bool {
	if info, err := os.Stat(arg); err == nil && info.IsDir() {
		return true
	}
	return strings.HasPrefix(arg, "/") || strings.HasPrefix(arg, "./") || strings.HasPrefix(arg, "../")
}

// wanted says what the shards of a folder must be: what the record of the pull says, if it was pulled.
func (h *Holding) wanted(in *folder.Folder) (gpuload.Want, error) {
	want := gpuload.Want{Aggregate: h.Want}
	target, err := staging.Target(in.Dir)
	if err != nil {
		h.noRecord()
		return want, nil // no record can be beside it
	}
	known, err := staging.Known(target)
	if err != nil {
		return want, err
	}
	if known.Complete == nil {
		h.noRecord()
		return want, nil
	}
	want.Aggregate = cmp.Or(want.Aggregate, known.Complete.Aggregate)
	if m, ok := recorded(*known.Complete, in.Shards); ok {
		want.Manifest = &m
	}
	return want, nil
}

// noRecord says that nothing tells what the shards of a folder must be.
func (h *Holding) noRecord() {
	if h.Want == (identity.Aggregate{}) {
		h.Note("no record of a pull beside it: taken as it is; --expect AGGREGATE checks it")
	}
}

// recorded returns the manifest of the shards as a record has them, false if it lacks one.
func recorded(r staging.Record, shards []folder.File) (identity.Manifest, bool) {
	var found []identity.Shard
	for _, s := range shards {
		for _, x := range r.Files {
			if x.Name == s.Name {
				found = append(found, identity.Shard{Filename: x.Name, Size: uint64(x.Size), Digest: x.Digest})
			}
		}
	}
	m, err := identity.New(found)
	return m, err == nil && len(found) == len(shards)
}

// read loads the shards of a folder.
func (h *Holding) read(ctx context.Context, in *folder.Folder, want gpuload.Want) (_ *gpuload.Resident, err error) {
	src, err := gpuload.OpenDir(in.Dir, h.Direct, h.Note)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	sizes := map[string]int64{}
	for _, s := range in.Shards {
		sizes[s.Name] = s.Size
	}
	return h.fill(ctx, src, sizes, want, gpuload.Options{ChunkBytes: h.chunk(h.Direct)})
}

// chunk is the size of the buffers that suits the target, and a source that nobody reads ahead of if direct is set.
func (h *Holding) chunk(direct bool) int64 {
	if _, host := h.Target.(*hostmem.Target); host && !direct {
		return hostmem.Chunk
	}
	return gpuload.DefaultChunk // one read for each buffer, few calls of the device
}

// fill reads, checks and loads shards of the given sizes in one pass.
func (h *Holding) fill(ctx context.Context, src gpuload.Source, sizes map[string]int64, want gpuload.Want,
	o gpuload.Options,
) (*gpuload.Resident, error) {
	names := slices.Sorted(maps.Keys(sizes))
	for _, name := range names {
		h.Watch(transfer.Event{Step: transfer.Planned, Phase: phaseLoad, File: name, Total: sizes[name]})
	}
	plan, err := gpuload.NewPlan(ctx, src, names, want)
	if err != nil {
		return nil, err
	}
	o.MaxBuffer, o.Placement, o.VerifyDevice, o.Notify = h.MaxBuffer, h.Placement, h.VerifyDevice, h.Note
	o.Progress = func(shard string, done int64) {
		h.Watch(transfer.Event{Step: transfer.Moved, Phase: phaseLoad, File: shard, Bytes: done, Total: sizes[shard]})
	}
	return gpuload.Load(ctx, plan, src, h.Target, o)
}

// config reads the folder's config.json, if it is a regular file.
func config(in *folder.Folder) resident.Config {
	for _, o := range in.Others {
		if o.Name != configName {
			continue
		}
		f, err := os.Open(filepath.Join(in.Dir, o.Name))
		if err != nil {
			break
		}
		defer f.Close()
		if b, err := io.ReadAll(io.LimitReader(f, maxConfig)); err == nil {
			return resident.ParseConfig(b)
		}
	}
	return resident.Config{}
}
