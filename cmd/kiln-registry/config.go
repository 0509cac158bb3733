package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/fsstore"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

const (
	defaultStore = "kiln-data"
	indexFile    = "index.db"
	socketFile   = "admin.sock"
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

// store is the folder of a registry.
type store struct {
	dir   string
	given bool // named by the caller, not the default
	init  bool
}

func (s *store) bind(cmd *cobra.Command) {
	cmd.Flags().StringVar(&s.dir, "store", defaultStore, "folder that holds everything")
}

func (s *store) check() error {
	if s.dir == "" {
		return cli.Hint(cli.Usagef("--store is empty"), "name the folder, or leave --store out for ./"+defaultStore)
	}
	return nil
}

// prepare makes the folder a store where that was asked for: by --init, or by a first start on the default folder.
func (s *store) prepare() error {
	_, err := os.Lstat(s.dir)
	if first := !s.given && errors.Is(err, fs.ErrNotExist); !first && !s.init {
		return nil
	}
	if err := private(s.dir); err != nil {
		return fmt.Errorf("make store %s: %w", s.dir, err)
	}
	return notStore(fsstore.Init(s.dir))
}

// private makes the folder of a new store for this user alone, as files in it can be read by everybody who gets in. The
// mode of a folder that is there already is its owner's choice.
func private(dir string) error {
	var disk durable.Disk
	if err := disk.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	return disk.Mkdir(0o700, dir)
}

func notStore(err error) error {
	if errors.Is(err, blobstore.ErrNotStore) {
		return cli.Hint(
			cli.Exit(cli.CodeUsage, err),
			"check the path and that its disk is mounted; --init once makes a new or empty folder a store",
		)
	}
	return err
}

// parts is an opened store with its registry.
type parts struct {
	dir   string
	store *fsstore.Store
	ix    *index.Index
	reg   *registry.Registry
}

// opening is how the files of a store are opened.
type opening struct {
	dir   string
	gate  *access.Gate
	idle  time.Duration
	log   *slog.Logger
	fresh bool // put the index aside, however damaged it is, and start an empty one
}

// open fails if another process has the files.
func (o opening) open(ctx context.Context) (*parts, error) {
	st, err := fsstore.Open(o.dir, fsstore.Options{Notify: func(line string) { o.log.Warn(line) }})
	if err != nil {
		return nil, inUse(notStore(err))
	}
	p := &parts{dir: o.dir, store: st}
	if p.ix, err = o.openIndex(ctx); err != nil {
		return nil, errors.Join(err, st.Close())
	}
	p.reg, err = registry.New(registry.Config{
		Store: st, Refs: st, Uploads: st, Index: p.ix, Access: o.gate, Log: o.log, Version: cli.Version(),
		IdleTimeout: o.idle,
	})
	if err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

func inUse(err error) error {
	if errors.Is(err, durable.ErrLocked) {
		return cli.Hint(cli.Exit(cli.CodeTryAgain, err), "one process owns a store at a time; stop the other one first")
	}
	return err
}

func (o opening) openIndex(ctx context.Context) (*index.Index, error) {
	path := filepath.Join(o.dir, indexFile)
	if o.fresh {
		if err := os.Rename(path, path+".old"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		o.log.Info("no index: it is made from the store", "path", path)
	}
	kv, err := boltkv.Open(path, boltkv.Options{})
	if err != nil {
		return nil, damaged(o.dir, err)
	}
	ix, err := index.New(ctx, kv)
	if err != nil {
		return nil, errors.Join(damaged(o.dir, err), kv.Close())
	}
	return ix, nil
}

// notReplayed says what to do when the index can't be brought level with the store. It is never a matter of an address
// or of another server, whatever the error looks like.
func notReplayed(dir string, err error) error {
	hint := fmt.Sprintf("check the disk; kiln-registry reindex --store %q makes the index anew", dir)
	switch {
	case errors.Is(err, context.Canceled):
		return err
	case errors.Is(err, index.ErrDamaged), errors.Is(err, index.ErrInUse):
		return damaged(dir, err)
	case errors.Is(err, blobstore.ErrDamaged):
		hint = fmt.Sprintf("the store lacks records that the index knows: put refs.log back from a backup, "+
			"or go on with what is left by kiln-registry reindex --store %q", dir)
	case errors.Is(err, blobstore.ErrNoSpace), errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		hint = "free some space on the disk of the store, and start again"
	}
	return cli.Hint(cli.Exit(cli.CodeDisk, err), hint)
}

func damaged(dir string, err error) error {
	switch {
	case errors.Is(err, index.ErrDamaged):
		return cli.Hint(
			cli.Exit(cli.CodeDisk, err),
			fmt.Sprintf("nothing is lost: kiln-registry reindex --store %q makes the index anew", dir),
		)
	case errors.Is(err, index.ErrInUse):
		return cli.Exit(cli.CodeTryAgain, err)
	}
	return err
}

func (p *parts) close() error { return errors.Join(p.ix.Close(), p.store.Close()) }
