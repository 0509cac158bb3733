package server

import (
	"cmp"
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

const purgeEvery = time.Hour

// chores are what a server does on its own, and how often.
type chores struct {
	gcEvery    time.Duration
	gcGrace    time.Duration
	gcMaxShare float64
	scrubEvery time.Duration
	scrubRate  cli.Size
	verify     bool
	lease      time.Duration
}

func (c *chores) bind(cmd *cobra.Command) {
	c.scrubRate = upkeep.DefaultScrubRate
	f := cmd.Flags()
	f.DurationVar(&c.gcEvery, "gc-interval", 24*time.Hour, "how often blobs go that nothing refers to; 0: never")
	f.DurationVar(&c.gcGrace, "gc-grace", upkeep.DefaultGrace, "how old a blob is at least when it goes")
	f.Float64Var(&c.gcMaxShare, "gc-max-share", upkeep.DefaultMaxShare,
		"let nothing go if a larger share of the blobs or bytes would")
	f.DurationVar(&c.lease, "lease", 7*24*time.Hour, "how long a blob that was pushed waits for its manifest")
	f.DurationVar(&c.scrubEvery, "scrub-interval", upkeep.DefaultScrubInterval,
		"how often every blob is read again; 0: never")
	f.Var(&c.scrubRate, "scrub-rate", "how many bytes of them in a second, as 100MB or 32MiB; 0: as fast as it goes")
	f.BoolVar(&c.verify, "verify-reads", false, "hash blobs that are sent whole, and cut off those that are damaged")
}

func (c *chores) check() error {
	if c.lease <= 0 {
		return cli.Usagef("--lease %s: want more than 0", c.lease)
	}
	return cmp.Or(
		cli.NotNegative("--gc-interval", c.gcEvery), cli.NotNegative("--gc-grace", c.gcGrace),
		cli.Share("--gc-max-share", c.gcMaxShare), cli.NotNegative("--scrub-interval", c.scrubEvery),
	)
}

// run does the chores of a registry that is ready, until ctx ends.
func (c *chores) run(ctx context.Context, p *home.Parts, log *slog.Logger) {
	var all sync.WaitGroup
	all.Go(func() { purge(ctx, p, log) })
	all.Go(func() { p.Registry.Scrubber().Run(ctx, c.scrubEvery, int64(c.scrubRate)) })
	if c.gcEvery > 0 {
		all.Go(func() {
			p.Registry.Collector().Run(ctx, c.gcEvery, upkeep.Terms{Grace: c.gcGrace, MaxShare: c.gcMaxShare})
		})
	}
	all.Wait()
}

// purge drops what has run out, now and then.
func purge(ctx context.Context, p *home.Parts, log *slog.Logger) {
	tick := time.NewTicker(purgeEvery)
	defer tick.Stop()
	for {
		if n, err := p.Registry.Purge(ctx); err != nil && ctx.Err() == nil {
			log.Error("purge", "error", err)
		} else if n > 0 {
			log.Info("abandoned uploads dropped", "count", n)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
