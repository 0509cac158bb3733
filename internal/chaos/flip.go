package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/internal/chaos/rig"
)

// flip damages a blob by one bit: kiln-pull never takes it for good.
func (c chaos) flip(ctx context.Context) error {
	return c.at("", func(s *rig.Site) error {
		f := flipping{site: s, c: rig.NewClient(1, c.seed)}
		err := f.all(ctx)
		fmt.Fprintf(c.out, "flip: damaged %d, caught by kiln-pull and by scrub, and healed %d, lost %d\n", flipShards,
			f.caught, flipShards-f.caught)
		return err
	})
}

const flipShards = 3

// flipping is a run in which bits of stored blobs are flipped.
type flipping struct {
	site   *rig.Site
	c      *rig.Client
	v      *rig.Server
	caught int
}

func (f *flipping) start(ctx context.Context) (err error) {
	if f.v, err = f.site.Start(); err != nil {
		return err
	}
	if err := f.v.Ready(ctx); err != nil {
		return err
	}
	f.c.Wire = f.v.Wire()
	return nil
}

func (f *flipping) all(ctx context.Context) error {
	if err := f.start(ctx); err != nil {
		return err
	}
	defer func() { f.v.Kill() }()
	m, err := f.c.Base("team/model", flipShards, "v1")
	if err != nil {
		return err
	}
	if err := f.pulls(ctx, "whole"); err != nil {
		return fmt.Errorf("before anything is damaged: %w", err)
	}
	for p, b := range f.c.Blobs {
		if b.Size < 0 || !m.Lists(p.Digest) {
			continue
		}
		if err := f.one(ctx, b); err != nil {
			return fmt.Errorf("a bit of shard %s: %w", b.Digest, err)
		}
	}
	return f.pulls(ctx, "at last")
}

// one flips a bit of a blob on the disk and pulls, has the registry find it, and pushes the bytes again.
func (f *flipping) one(ctx context.Context, b rig.Blob) error {
	bit := f.c.Rand.Int64N(8 * b.Length)
	if err := f.site.Flip(b.Digest, bit); err != nil {
		return err
	}
	to := "damaged-" + b.Digest.Hex()[:12]
	err := f.pulls(ctx, to)
	if err == nil {
		return fmt.Errorf("kiln-pull took bit %d", bit)
	}
	if !strings.Contains(err.Error(), "exit status 1") || !strings.Contains(err.Error(), b.Digest.Hex()[:12]) {
		return fmt.Errorf("kiln-pull does not say what is damaged: %w", err)
	}
	if _, err := os.Stat(filepath.Join(f.site.Dir, to)); err == nil {
		return errors.New("kiln-pull left a folder of damaged files under the name that was asked for")
	}
	if err := f.heal(ctx, b); err != nil {
		return err
	}
	f.caught++
	return nil
}

// heal has the registry find a damaged blob: it is set aside, refused to clients and shown to operators until its bytes
// come again.
func (f *flipping) heal(ctx context.Context, b rig.Blob) error {
	out, err := f.site.Registry(ctx, "scrub")
	if err == nil || !strings.Contains(err.Error(), "exit status 1") || !strings.Contains(out, b.Digest.String()) {
		return fmt.Errorf("scrub did not find it: %s, %w", out, err)
	}
	if a, err := f.c.Ask(http.StatusNotFound, "GET", api.PathBlob("team/model", b.Digest), nil); err != nil ||
		a.Code() != api.CodeBlobUnknown || !strings.Contains(string(a.Body), "damaged") {
		return fmt.Errorf("a blob in quarantine: %s, %w", a, err)
	}
	if n, err := f.quarantined(); n != 1 {
		return fmt.Errorf("health says that %d blobs are in quarantine, want 1, %w", n, err)
	}
	if err := f.c.Post("team/model", b); err != nil {
		return err
	}
	if n, err := f.quarantined(); n != 0 || err != nil {
		return fmt.Errorf("after the bytes came again health says that %d blobs are in quarantine, %w", n, err)
	}
	_, err = f.site.Registry(ctx, "scrub")
	return err
}

// quarantined is how many blobs health says are in quarantine.
func (f *flipping) quarantined() (int, error) {
	var h api.Health
	err := f.c.Wire.JSON(api.PathHealthV1, &h)
	return h.Quarantined, err
}

// pulls has the real kiln-pull get the base into a folder.
func (f *flipping) pulls(ctx context.Context, to string) error {
	ref := strings.TrimPrefix(f.v.URL, "http://") + "/team/model:v1"
	_, err := f.site.Command(ctx, "kiln-pull", "pull", ref, to)
	return err
}
