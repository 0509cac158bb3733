package main

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/cli/settings"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/metrics"
)

const (
	defaultStore = "kiln-data"
	defaultState = "kiln-state"
)

// logging is where and how the log goes.
type logging struct{ format, level string }

func (l *logging) bind(cmd *cobra.Command) {
	cmd.Flags().StringVar(&l.format, "log-format", "text", "text or json")
	cmd.Flags().StringVar(&l.level, "log-level", "info", "debug (every request), info, warn or error")
}

func (l *logging) open(w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(l.level)); err != nil {
		return nil, cli.Usagef("--log-level %s: want debug, info, warn or error", l.level)
	}
	o := &slog.HandlerOptions{Level: level}
	switch l.format {
	case "text":
		return slog.New(slog.NewTextHandler(w, o)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, o)), nil
	}
	return nil, cli.Usagef("--log-format %s: want text or json", l.format)
}

// store is what the flags say about where a registry keeps things.
type store struct {
	at       string
	stateDir string
	given    bool // somebody named the store, so that it is not the default
	init     bool
	home     // set by check
}

// bind adds the flags. What the command line does not say of them is looked for in the environment.
func (s *store) bind(cmd *cobra.Command) {
	f := cmd.Flags()
	cmd.PreRunE = func(*cobra.Command, []string) error {
		_, err := settings.Environment(f, os.Environ(), "store", "state-dir")
		return err
	}
	f.StringVar(&s.at, "store", defaultStore, "where everything is: "+placeForms)
	f.StringVar(&s.stateDir, "state-dir", "",
		"folder of the index, which is made anew if it is lost (default: --store, or ./"+defaultState+" if that is a bucket)")
}

func (s *store) check() error {
	p, err := parsePlace("--store", s.at)
	if err != nil {
		return cli.Hint(err, "name the folder or the bucket, or leave --store out for ./"+defaultStore)
	}
	s.home, err = newHome(p, s.stateDir)
	return err
}

// prepare makes a store where that was asked for: by --init, or by a first start on the default folder.
func (s *store) prepare(ctx context.Context) error {
	first := false
	if !s.given {
		_, err := os.Lstat(s.folder)
		first = errors.Is(err, fs.ErrNotExist)
	}
	if !first && !s.init {
		return nil
	}
	return s.make(ctx)
}

// parts is an opened store with its registry.
type parts struct {
	home
	lock  *durable.Lock // of a state folder of its own; nil otherwise
	store engine
	ix    *index.Index
	reg   *registry.Registry

	checked func(context.Context) error // waits until the file of the index is read through, and returns what was found

	metrics http.Handler // nil: there are none
}

// opening is how the parts are opened.
type opening struct {
	home
	gate  *access.Gate
	idle  time.Duration
	log   *slog.Logger
	fresh bool // put the index aside, however damaged it is, and start an empty one
	lease time.Duration

	checkLater  int64 // bytes of an index from which whoever opens looks at checked; 0: never
	readOnly    bool
	verify      bool // blobs that are read whole
	immutable   access.TagPatterns
	metrics     *metrics.Metrics // nil: none
	metricsHere bool             // the registry itself answers with them
}

// lost is closed when another process took the store from this one. It is nil where none can.
func (p *parts) lost() <-chan struct{} {
	if s, ok := p.store.(interface{ Lost() <-chan struct{} }); ok {
		return s.Lost()
	}
	return nil
}

// open fails if another process has the store or the state folder.
func (o opening) open(ctx context.Context) (*parts, error) {
	st, err := o.place.open(ctx, func(line string) { o.log.Warn(line) })
	if err != nil {
		return nil, err
	}
	p := &parts{home: o.home, store: st}
	if err := p.complete(ctx, o); err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

func (p *parts) complete(ctx context.Context, o opening) (err error) {
	if p.lock, err = o.lock(); err != nil {
		return err
	}
	if p.ix, p.checked, err = o.openIndex(ctx, p.store.ID()); err != nil {
		return err
	}
	c := registry.Config{
		Store: p.store, Refs: p.store, Uploads: p.store, Index: p.ix, Access: o.gate, Log: o.log, Version: cli.Version(),
		IdleTimeout: o.idle, ReadOnly: o.readOnly, Immutable: o.immutable, Lease: o.lease, VerifyReads: o.verify,
	}
	if o.metrics != nil {
		p.metrics, c.Observe = o.metrics.Handler(), o.metrics.Observe
		if o.metricsHere {
			c.Metrics = p.metrics
		}
	}
	if p.reg, err = registry.New(c); err == nil && o.metrics != nil {
		o.metrics.Watch(p.reg)
	}
	return err
}

// close gives back what is open.
func (p *parts) close() error {
	var errs []error
	if p.ix != nil {
		errs = append(errs, p.ix.Close())
	}
	if p.lock != nil {
		errs = append(errs, p.lock.Release())
	}
	return errors.Join(append(errs, p.store.Close())...)
}

func (o opening) openIndex(ctx context.Context, id string) (*index.Index, func(context.Context) error, error) {
	if o.fresh {
		if err := o.setAside(); err != nil {
			return nil, nil, err
		}
	}
	if err := o.claim(id); err != nil {
		return nil, nil, err
	}
	path := o.file(indexFile)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		o.log.Info("no index: it is made from the store", "path", path)
	}
	kv, err := boltkv.Open(path, boltkv.Options{CheckLater: o.checkLater})
	if err != nil {
		return nil, nil, o.damaged(err)
	}
	engine := breakable(kv)
	if o.metrics != nil {
		engine = o.metrics.KV(engine)
	}
	ix, err := index.New(ctx, engine)
	if err != nil {
		return nil, nil, errors.Join(o.damaged(err), kv.Close())
	}
	return ix, kv.Checked, nil
}

// notReplayed says what to do when the index can't be brought level with the store. It is never a matter of an address
// of a registry, whatever the error looks like.
func (h home) notReplayed(err error) error {
	hint := "check the disk; " + h.command("reindex") + " makes the index anew"
	switch {
	case errors.Is(err, context.Canceled):
		return err
	case errors.Is(err, index.ErrDamaged), errors.Is(err, index.ErrInUse):
		return h.damaged(err)
	case errors.Is(err, blobstore.ErrUnavailable), errors.Is(err, blobstore.ErrInUse):
		return h.explain(err)
	case errors.Is(err, blobstore.ErrDamaged):
		hint = "the store lacks records that the index knows: put them back from a backup, or go on with what is left by " +
			h.command("reindex")
	case errors.Is(err, blobstore.ErrNoSpace), errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		hint = "free some space on the disk of the index, and start again"
	}
	return cli.Hint(cli.Exit(cli.CodeDisk, err), hint)
}

func (h home) damaged(err error) error {
	switch {
	case errors.Is(err, index.ErrDamaged), errors.Is(err, index.ErrFormat):
		return cli.Hint(
			cli.Exit(cli.CodeDisk, err),
			"nothing is lost: "+h.command("reindex")+" makes the index anew",
		)
	case errors.Is(err, index.ErrInUse):
		return cli.Exit(cli.CodeTryAgain, err)
	}
	return err
}
