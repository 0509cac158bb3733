package holding

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-pull/internal/caching"
	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/remote"
	"github.com/kiln-registry/kiln-registry/gpuload/resident"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// ErrSent: the bytes that a registry sent are not those of the digest that they were asked for by. It comes with
// gpuload.ErrMismatch.
var ErrSent = errors.New("the registry sent them so")

// registry holds the weights that a registry has.
func (h *Holding) registry(ctx context.Context) (held resident.Held, err error) {
	c, plan, err := h.Resolve(ctx)
	if err != nil {
		return held, err
	}
	defer c.Close()
	if len(plan.Base.Shards) == 0 {
		err = fmt.Errorf("%s is no base that can be held: %w", plan.Reference(), plan.NoBase)
		return held, cli.Exit(cli.CodeBadInput, err)
	}
	h.Want = cmp.Or(h.Want, plan.Base.Aggregate)
	if h.Dir != "" || h.Cache != "" {
		return h.pull(ctx, c, plan)
	}
	h.Note("loading " + plan.Reference())
	weights, err := h.stream(ctx, c, plan, nil)
	if err != nil {
		return held, err
	}
	return resident.Held{Weights: weights, Config: h.config(ctx, c, plan), At: time.Now()}, nil
}

// config fetches the config.json of an artifact. It is for people only: without it the weights are held as well.
func (h *Holding) config(ctx context.Context, c *client.Client, plan transfer.Plan) resident.Config {
	if !plan.Has(configName) {
		return resident.Config{}
	}
	b, err := plan.Document(ctx, c, configName, maxConfig)
	if err != nil {
		h.Warn(fmt.Sprintf("%s can't be read, and what it says of the model is left out: %v", configName, err))
	}
	return resident.ParseConfig(b)
}

// stream loads the shards as they come from the registry. keep, which may be nil, keeps them besides.
func (h *Holding) stream(ctx context.Context, c *client.Client, plan transfer.Plan, keep gpuload.Keeper) (
	*gpuload.Resident, error,
) {
	sizes := map[string]int64{}
	for _, s := range plan.Base.Shards {
		sizes[s.Filename] = int64(s.Size)
	}
	want := gpuload.Want{Manifest: &plan.Base, Aggregate: h.Want}
	weights, err := h.fill(ctx, remote.New(c, plan.Repository, plan.Base), sizes, want,
		gpuload.Options{ChunkBytes: h.chunk(false), Keep: keep})
	if e := (*gpuload.Error)(nil); errors.As(err, &e) && errors.Is(err, gpuload.ErrMismatch) {
		err = fmt.Errorf("%w (%w: %s)", err, ErrSent, c.Host())
	}
	return weights, err
}

// pull makes the folder of a base and holds its weights, in one pass where nothing of them is there yet.
func (h *Holding) pull(ctx context.Context, c *client.Client, plan transfer.Plan) (held resident.Held, err error) {
	dir, err := h.place(plan)
	if err != nil {
		return held, err
	}
	o := transfer.PullOptions{Watch: h.Watch}
	if o.Cache, err = caching.Open(h.Cache, h.Note); err != nil {
		return held, err
	}
	var weights *gpuload.Resident
	if o.Cache != nil {
		h.Note("with a cache the model is pulled first, then loaded")
	} else {
		o.Bring = func(ctx context.Context, missing []staging.File, to *staging.Area) (err error) {
			weights, err = h.bring(ctx, c, plan, missing, to)
			return err
		}
	}
	h.Note("pulling " + plan.Reference())
	done, err := transfer.Pull(ctx, c, plan, dir, o)
	if weights == nil {
		if err != nil {
			return held, err
		}
		return h.folder(ctx, done.Target)
	}
	var in *folder.Folder
	if err == nil {
		in, err = folder.Open(done.Target, folder.Options{})
	}
	if err != nil {
		return held, errors.Join(err, weights.Close(context.WithoutCancel(ctx)))
	}
	return resident.Held{Weights: weights, Path: in.Dir, Config: config(in), At: time.Now()}, nil
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

// bring loads the shards of a base and brings them to where a folder is made, in one pass. Nil: some of them are there,
// and the pull goes on from there.
func (h *Holding) bring(ctx context.Context, c *client.Client, plan transfer.Plan, missing []staging.File,
	to *staging.Area,
) (*gpuload.Resident, error) {
	k := &keeper{to: to, digests: map[string]identity.Digest{}, begun: map[identity.Digest]bool{}}
	for _, s := range plan.Base.Shards {
		lacks := slices.ContainsFunc(missing, func(f staging.File) bool { return f.Digest == s.Digest })
		if !lacks || to.Begun(s.Digest, int64(s.Size)) {
			h.Note("some of the shards are here already: they are pulled first, then loaded")
			return nil, nil
		}
		k.digests[s.Filename] = s.Digest
	}
	return h.stream(ctx, c, plan, k)
}

// keeper keeps shards in the area of a pull. It is safe for concurrent use.
type keeper struct {
	to      *staging.Area
	digests map[string]identity.Digest // of the shards, by name

	mu    sync.Mutex // guards begun
	begun map[identity.Digest]bool
}

// Keep implements gpuload.Keeper. Of several shards with the same bytes it keeps one.
func (k *keeper) Keep(shard string, size int64) (gpuload.Kept, error) {
	d := k.digests[shard]
	k.mu.Lock()
	again := k.begun[d]
	k.begun[d] = true
	k.mu.Unlock()
	if again {
		return twin{}, nil
	}
	return k.to.Bring(d, size)
}

// twin is a shard whose bytes are kept as those of another.
type twin struct{}

func (twin) WriteAt(b []byte, _ int64) (int, error) { return len(b), nil }
func (twin) Commit(identity.Digest) error           { return nil }
func (twin) Close() error                           { return nil }
