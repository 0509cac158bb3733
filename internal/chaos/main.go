// Command chaos breaks a real registry process and looks at what it had acknowledged: it kills it at random instants
// and at every durable change, fills its disk, lets changes fail, and damages what it stored. The registry is built with
// the tag chaos; scripts/chaos.sh does all of it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/internal/chaos/rig"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// chaos is one run: what to break, and how long.
type chaos struct {
	bin   string // folder of kiln-registry, built with the tag chaos, and kiln-pull
	dir   string // where stores are made
	store string // a bucket instead of folders, for the part kill
	seed  uint64
	kills int
	limit time.Duration // of the part kill
	every int           // the part boundaries takes one of so many changes
	some  int           // the part faults takes so many rules; 0: all
	out   io.Writer
}

func run(ctx context.Context, args []string, out io.Writer) error {
	f := flag.NewFlagSet("chaos", flag.ContinueOnError)
	bin := f.String("bin", ".bin", "folder of kiln-registry, built with the tag chaos, and kiln-pull")
	c := chaos{out: out}
	f.StringVar(&c.dir, "dir", os.TempDir(), "folder in which stores are made")
	f.StringVar(&c.store, "store", "", "s3://… for the part kill; else a new folder")
	f.Uint64Var(&c.seed, "seed", rand.Uint64(), "what chance begins with")
	f.IntVar(&c.kills, "kills", 200, "how often the part kill kills")
	f.DurationVar(&c.limit, "limit", time.Minute, "how long the part kill may take")
	f.IntVar(&c.every, "every", 1, "the part boundaries takes one of so many")
	f.IntVar(&c.some, "some", 0, "the part faults takes so many rules; 0: all")
	if err := f.Parse(args); err != nil {
		return err
	}
	var err error
	if c.bin, err = filepath.Abs(*bin); err != nil {
		return err
	}
	parts := map[string]func(context.Context) error{
		"kill": c.kill, "boundaries": c.boundaries, "faults": c.faults,
		"full": c.full, "flip": c.flip,
	}
	for _, name := range f.Args() {
		part, ok := parts[name]
		if !ok {
			return fmt.Errorf("no part %q: want kill, boundaries, faults, full or flip", name)
		}
		if err := part(ctx); err != nil {
			return fmt.Errorf("%s (seed %d): %w", name, c.seed, err)
		}
	}
	return nil
}

// at makes a site for work, and keeps it if that fails.
func (c chaos) at(store string, work func(*rig.Site) error) error {
	s, err := rig.NewSite(c.bin, c.dir, store)
	if err != nil {
		return err
	}
	if err := work(s); err != nil {
		return fmt.Errorf("%w\nhint: the store is kept in %s", err, s.Dir)
	}
	return os.RemoveAll(s.Dir)
}

func (c chaos) kill(ctx context.Context) error {
	name := "kill"
	if c.store != "" {
		name = "kill-s3"
	}
	return c.at(c.store, func(s *rig.Site) error {
		s.Chores = true
		r := newKilling(s, c.seed, c.kills, c.limit)
		err := r.run(ctx)
		if !errors.Is(err, context.Canceled) {
			fmt.Fprintf(c.out, "%s: %s\n", name, r)
		}
		return err
	})
}
