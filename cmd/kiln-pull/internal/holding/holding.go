// Package holding brings a model into memory for kiln-pull resident.
package holding

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-pull/internal/caching"
	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
	"github.com/kiln-registry/kiln-registry/gpuload/resident"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

const (
	phaseLoad = "load"
	maxConfig = 16 << 20 // bytes of a config.json that is read
)

// Options says what is held, and how it is loaded.
type Options struct {
	Dir    string             // the folder; with Resolve, where one is made, and may be empty
	Want   identity.Aggregate // what the shards must be; zero: whatever they are
	Target gpuload.Target
	Cache  string // a folder, for what is pulled; empty: none

	// Resolve says what is pulled and from where; nil: Dir is held as it is. The client is closed once it is not needed.
	Resolve func(context.Context) (*client.Client, transfer.Plan, error)

	Direct, VerifyDevice bool
	MaxBuffer            int64             // as in gpuload.Options
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

// Load finds the folder, or makes it, and holds its weights.
func (h *Holding) Load(ctx context.Context) (held resident.Held, err error) {
	dir := h.Dir
	if h.Resolve != nil {
		if dir, err = h.pull(ctx); err != nil {
			return held, err
		}
	}
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
	weights, err := h.fill(ctx, in, want)
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

// pull makes the folder of a reference or an aggregate.
func (h *Holding) pull(ctx context.Context) (string, error) {
	c, plan, err := h.Resolve(ctx)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if len(plan.Base.Shards) == 0 {
		return "", cli.Exit(cli.CodeBadInput, fmt.Errorf("%s is no base that can be held: %w", plan.Reference(), plan.NoBase))
	}
	dir, err := h.place(plan)
	if err != nil {
		return "", err
	}
	h.Want = cmp.Or(h.Want, plan.Base.Aggregate)
	h.Note("pulling " + plan.Reference())
	kept, err := caching.Open(h.Cache, h.Note)
	if err != nil {
		return "", err
	}
	done, err := transfer.Pull(ctx, c, plan, dir, transfer.PullOptions{Cache: kept, Watch: h.Watch})
	return done.Target, err
}

// place is the folder to pull to: Dir, else one in the cache of the user, else one that goes with this process.
func (h *Holding) place(plan transfer.Plan) (string, error) {
	if h.Dir != "" {
		return h.Dir, nil
	}
	name := plan.Manifest.Hex()
	cache, err := os.UserCacheDir()
	if err == nil {
		dir := filepath.Join(cache, "kiln", "resident")
		return filepath.Join(dir, name), os.MkdirAll(dir, 0o700)
	}
	dir, err := os.MkdirTemp("", "kiln-resident-")
	h.made = dir
	return filepath.Join(dir, name), err
}

// wanted says what the shards of a folder must be: what the record of the pull says, if it was pulled.
func (h *Holding) wanted(in *folder.Folder) (gpuload.Want, error) {
	want := gpuload.Want{Aggregate: h.Want}
	target, err := staging.Target(in.Dir)
	if err != nil {
		return want, nil // no record can be beside it
	}
	known, err := staging.Known(target)
	if err != nil || known.Complete == nil {
		return want, err
	}
	want.Aggregate = cmp.Or(want.Aggregate, known.Complete.Aggregate)
	if m, ok := recorded(*known.Complete, in.Shards); ok {
		want.Manifest = &m
	}
	return want, nil
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

// fill reads, checks and loads the shards in one pass.
func (h *Holding) fill(ctx context.Context, in *folder.Folder, want gpuload.Want) (_ *gpuload.Resident, err error) {
	src, err := gpuload.OpenDir(in.Dir, h.Direct, h.Note)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	sizes := map[string]int64{}
	var names []string
	for _, s := range in.Shards {
		names, sizes[s.Name] = append(names, s.Name), s.Size
		h.Watch(transfer.Event{Step: transfer.Planned, Phase: phaseLoad, File: s.Name, Total: s.Size})
	}
	plan, err := gpuload.NewPlan(ctx, src, names, want)
	if err != nil {
		return nil, err
	}
	chunk := int64(hostmem.Chunk)
	if _, host := h.Target.(*hostmem.Target); h.Direct || !host {
		chunk = gpuload.DefaultChunk // one read for each buffer, and nothing reads ahead; few calls of the device
	}
	return gpuload.Load(ctx, plan, src, h.Target, gpuload.Options{
		ChunkBytes:   chunk,
		MaxBuffer:    h.MaxBuffer,
		VerifyDevice: h.VerifyDevice,
		Notify:       h.Note,
		Progress: func(shard string, done int64) {
			h.Watch(transfer.Event{Step: transfer.Moved, Phase: phaseLoad, File: shard, Bytes: done, Total: sizes[shard]})
		},
	})
}

// config reads the folder's config.json, if it is a regular file.
func config(in *folder.Folder) resident.Config {
	for _, o := range in.Others {
		if o.Name != "config.json" {
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
