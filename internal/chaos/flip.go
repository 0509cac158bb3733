package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/internal/chaos/rig"
)

// flip damages a blob by one bit: kiln-pull never takes it for good.
func (c chaos) flip(ctx context.Context) error {
	return c.at("", func(s *rig.Site) error {
		f := flipping{site: s, c: rig.NewClient(1, c.seed)}
		err := f.all(ctx)
		fmt.Fprintf(c.out, "flip: damaged %d, caught by kiln-pull, scrub and reads, and healed %d, lost %d\n", flipShards,
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

func (f *flipping) start(ctx context.Context, env ...string) (err error) {
	if f.v, err = f.site.Start(env...); err != nil {
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
	if err := f.scrub(ctx, b); err != nil {
		return err
	}
	if err := f.site.Flip(b.Digest, bit); err != nil {
		return err
	}
	if err := f.cutOff(ctx, b); err != nil {
		return err
	}
	f.caught++
	return nil
}

// cutOff checks that a server which hashes what it sends never sends a damaged blob to its end, and sets it aside.
func (f *flipping) cutOff(ctx context.Context, b rig.Blob) error {
	f.v.Kill()
	if err := f.start(ctx, "KILN_VERIFY_READS=true"); err != nil {
		return err
	}
	a, err := f.c.Ask(http.StatusOK, "GET", api.PathBlob("team/model", b.Digest), nil)
	if err == nil && a.Broken == nil {
		return errors.New("with --verify-reads the registry sent it to its end")
	}
	if err := f.aside(ctx); err != nil {
		return err
	}
	if err := f.heal(b); err != nil {
		return err
	}
	f.v.Kill()
	return f.start(ctx)
}

// aside returns when the registry has set the blob aside that it suspects.
func (f *flipping) aside(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		if n, err := f.quarantined(); n == 1 || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("a blob that was cut off is not set aside: %w", ctx.Err())
		}
	}
}

// scrub has the registry find a damaged blob.
func (f *flipping) scrub(ctx context.Context, b rig.Blob) error {
	out, err := f.site.Registry(ctx, "scrub")
	if err == nil || !strings.Contains(err.Error(), "exit status 1") || !strings.Contains(out, b.Digest.String()) {
		return fmt.Errorf("scrub did not find it: %s, %w", out, err)
	}
	if err := f.heal(b); err != nil {
		return err
	}
	_, err = f.site.Registry(ctx, "scrub")
	return err
}

// heal checks that a blob is set aside, refused to clients and shown to operators until its bytes come again.
func (f *flipping) heal(b rig.Blob) error {
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
	return nil
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
