package home

import (
	"context"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"syscall"
	"time"

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
	Fresh  bool            // start an empty index beside the one that is there, which Do puts in its place
	// AcceptLoss goes on with the refs that are left of damaged ones. It needs Fresh.
	AcceptLoss bool
	// Agree looks at the index that Fresh made before Do puts it in its place: an error keeps the one that is there. nil:
	// any will do.
	Agree func(context.Context, *index.Index) error

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
	c.Checked, c.TempDir = p.Checked, p.State
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
	path := o.File(IndexFile)
	if o.Fresh {
		path = o.File(newIndex)
	} else if err := o.claim(id); err != nil {
		return nil, nil, err
	}
	if err := os.RemoveAll(o.File(newIndex)); err != nil { // of a reindex that did not end
		return nil, nil, err
	}
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) && !o.Fresh {
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

// exchange has the index that was made anew take the place of the one that is there. What it can, it takes over.
func (p *Parts) exchange(ctx context.Context, o Opening) error {
	more, err := p.takeOver(ctx)
	if err != nil {
		o.Config.Log.Warn("blobs that wait for their manifest and open uploads are forgotten: the index that knew them can't "+
			"be read", "error", err)
	}
	ix := p.ix
	p.ix = nil
	if err := ix.Close(); err != nil {
		return err
	}
	if s, ok := p.store.(blobstore.Losses); ok && o.AcceptLoss && len(s.Dropped()) > 0 {
		more = true
	}
	keep := ""
	if more {
		keep = lostIndex + time.Now().UTC().Format("20060102T150405.000Z")
		o.Config.Log.Warn("the old index knows of more than the store: it is kept", "file", keep)
	}
	return p.Home.exchange(p.store.ID(), keep)
}

// discard removes the index that was to take the place of the one that is there.
func (p *Parts) discard() (err error) {
	if p.ix != nil {
		err = p.ix.Close()
		p.ix = nil
	}
	return errors.Join(err, os.RemoveAll(p.File(newIndex)))
}

// takeOver takes over what no store has from the index that is there, if that is of this store. more says that it knows
// of changes that the store lacks.
func (p *Parts) takeOver(ctx context.Context) (more bool, err error) {
	o, err := p.owner()
	_, absent := os.Lstat(p.File(IndexFile))
	if err != nil || absent != nil || o.Store != p.store.ID() && (p.Apart || o.Store != "") {
		return false, nil
	}
	kv, err := boltkv.Open(p.File(IndexFile), boltkv.Options{})
	if err != nil {
		return false, err
	}
	old, err := index.New(ctx, kv)
	if err != nil {
		return false, errors.Join(err, kv.Close())
	}
	was, err := old.Checkpoint(ctx)
	now, nowErr := p.ix.Checkpoint(ctx)
	return was > now, errors.Join(err, nowErr, p.Registry.TakeOver(ctx, old), old.Close())
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
