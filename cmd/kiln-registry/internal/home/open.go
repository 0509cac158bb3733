package home

import (
	"context"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"syscall"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/metrics"
)

// Parts is an opened store with its registry.
type Parts struct {
	Home
	Registry *registry.Registry
	Metrics  http.Handler                // nil: there are none
	Checked  func(context.Context) error // waits until the file of the index is read through, and returns what was found

	lock  *durable.Lock // of a state folder of its own; nil otherwise
	store Engine
	ix    *index.Index
}

// Opening is how the parts are opened.
type Opening struct {
	Home
	Config registry.Config // all of it but what is opened here: the store, its parts and the index
	Fresh  bool            // put the index aside, however damaged it is, and start an empty one
	// AcceptLoss goes on with the refs that are left of damaged ones. It needs Fresh.
	AcceptLoss bool

	CheckLater  int64            // bytes of an index from which whoever opens looks at Checked; 0: never
	Metrics     *metrics.Metrics // nil: none
	MetricsHere bool             // the registry itself answers with them
}

// Lost is closed when another process took the store from this one. It is nil where none can.
func (p *Parts) Lost() <-chan struct{} {
	if s, ok := p.store.(interface{ Lost() <-chan struct{} }); ok {
		return s.Lost()
	}
	return nil
}

// Open fails if another process has the store or the state folder.
func (o Opening) Open(ctx context.Context) (*Parts, error) {
	st, err := o.Place.Open(ctx, func(line string) { o.Config.Log.Warn(line) }, Way{o.AcceptLoss, o.Config.ReadOnly})
	if err != nil {
		return nil, err
	}
	p := &Parts{Home: o.Home, store: st}
	if err := p.complete(ctx, o); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

func (p *Parts) complete(ctx context.Context, o Opening) (err error) {
	if p.lock, err = o.lock(); err != nil {
		return err
	}
	if p.ix, p.Checked, err = o.openIndex(ctx, p.store.ID()); err != nil {
		return err
	}
	c, st := o.Config, blobstore.Engine(p.store)
	if o.Metrics != nil {
		st = o.Metrics.Store(st)
		p.Metrics, c.Observe = o.Metrics.Handler(), o.Metrics.Observe
		if o.MetricsHere {
			c.Metrics = p.Metrics
		}
	}
	c.Store, c.Refs, c.Uploads, c.Index, c.Version = st, st, st, p.ix, cli.Version()
	if p.Registry, err = registry.New(c); err == nil && o.Metrics != nil {
		o.Metrics.Watch(p.Registry)
	}
	return err
}

// Close gives back what is open.
func (p *Parts) Close() error {
	var errs []error
	if p.ix != nil {
		errs = append(errs, p.ix.Close())
	}
	if p.lock != nil {
		errs = append(errs, p.lock.Release())
	}
	return errors.Join(append(errs, p.store.Close())...)
}

func (o Opening) openIndex(ctx context.Context, id string) (*index.Index, func(context.Context) error, error) {
	if o.Fresh {
		if err := o.setAside(); err != nil {
			return nil, nil, err
		}
	}
	if err := o.claim(id); err != nil {
		return nil, nil, err
	}
	path := o.File(IndexFile)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		o.Config.Log.Info("no index: it is made from the store", "path", path)
	}
	kv, err := boltkv.Open(path, boltkv.Options{CheckLater: o.CheckLater})
	if err != nil {
		return nil, nil, o.damaged(err)
	}
	Engine := breakable(kv)
	if o.Metrics != nil {
		Engine = o.Metrics.KV(Engine)
	}
	ix, err := index.New(ctx, Engine)
	if err != nil {
		return nil, nil, errors.Join(o.damaged(err), kv.Close())
	}
	return ix, kv.Checked, nil
}

// NotReplayed says what to do when the index can't be brought level with the store. It is never a matter of an address
// of a registry, whatever the error looks like.
func (h Home) NotReplayed(err error) error {
	hint := "check the disk; " + h.Command("reindex") + " makes the index anew"
	switch {
	case err == nil, errors.Is(err, context.Canceled):
		return err
	case errors.Is(err, index.ErrDamaged), errors.Is(err, index.ErrInUse):
		return h.damaged(err)
	case errors.Is(err, blobstore.ErrUnavailable), errors.Is(err, blobstore.ErrInUse):
		return h.Explain(err)
	case errors.Is(err, blobstore.ErrDamaged):
		hint = "the store lacks records that the index knows: put them back from a backup, or go on with what is left by " +
			h.Command("reindex") + "; if that refuses too, add --accept-loss"
	case errors.Is(err, blobstore.ErrNoSpace), errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		hint = "free some space on the disk of the index, and start again"
	}
	return cli.Hint(cli.Exit(cli.CodeDisk, err), hint)
}

func (h Home) damaged(err error) error {
	switch {
	case errors.Is(err, index.ErrDamaged), errors.Is(err, index.ErrFormat):
		return cli.Hint(
			cli.Exit(cli.CodeDisk, err),
			"nothing is lost: "+h.Command("reindex")+" makes the index anew",
		)
	case errors.Is(err, index.ErrInUse):
		return cli.Exit(cli.CodeTryAgain, err)
	}
	return err
}
