package main

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/fsstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// engine is an open store.
type engine interface {
	blobstore.Engine
	// ID tells this store from all others, wherever it was moved to.
	ID() string
}

// place is where a store is: a folder, or the prefix of a bucket.
type place struct {
	name   string // as it was given
	folder string // empty: the bucket
	bucket s3store.Config
}

const placeForms = "a folder, or s3://bucket/prefix?endpoint=https://host:port"

// parsePlace reads the argument or flag that is called what.
func parsePlace(what, name string) (p place, err error) {
	p.name = name
	switch {
	case name == "":
		return p, cli.Usagef("%s is empty", what)
	case strings.HasPrefix(name, "s3://"):
		p.bucket, err = s3store.Parse(name)
		if err != nil {
			return p, cli.Usagef("%s: %w", what, err)
		}
		return p, nil
	case strings.Contains(name, "://"):
		return p, cli.Usagef("%s: want %s", what, placeForms)
	}
	p.folder = name
	return p, nil
}

func (p place) String() string {
	if p.folder != "" {
		return p.folder
	}
	return p.bucket.String()
}

// address is String, in a form that another command of this machine can compare.
func (p place) address() string {
	if p.folder == "" {
		return p.bucket.String() + " at " + p.bucket.Endpoint
	}
	abs, err := filepath.Abs(p.folder)
	if err != nil {
		return p.folder
	}
	return abs
}

// make makes the place a store, if it is empty.
func (p place) make(ctx context.Context) error {
	if p.folder == "" {
		return p.explain(s3store.Init(ctx, p.bucket))
	}
	if err := private(p.folder); err != nil {
		return fmt.Errorf("make store %s: %w", p.folder, err)
	}
	return p.explain(fsstore.Init(p.folder))
}

// private makes a folder for this user alone, as files in it can be read by everybody who gets in. The mode of a folder
// that is there already is its owner's choice.
func private(dir string) error {
	var disk durable.Disk
	if err := disk.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	return disk.Mkdir(0o700, dir)
}

// open opens the store, so that no other process can.
func (p place) open(ctx context.Context, notify func(string)) (engine, error) {
	var e engine
	var err error
	if p.folder != "" {
		e, err = fsstore.Open(p.folder, fsstore.Options{Notify: notify})
	} else {
		e, err = s3store.Open(ctx, p.bucket, s3store.Options{Notify: notify, Exclusive: true})
	}
	if err != nil {
		return nil, p.explain(err)
	}
	return e, nil
}

// explain says what can be done about an error of the place.
func (p place) explain(err error) error {
	var path *fs.PathError // of the certificates
	var stranger x509.UnknownAuthorityError
	switch {
	case err == nil, errors.Is(err, context.Canceled):
		return err
	case errors.Is(err, blobstore.ErrNotStore):
		hint := "check the path and that its disk is mounted; --init once makes a new or empty folder a store"
		if p.folder == "" {
			hint = "check bucket and prefix; --init once makes a prefix a store that nothing is below"
		}
		return cli.Hint(cli.Exit(cli.CodeUsage, err), hint)
	case errors.Is(err, durable.ErrLocked), errors.Is(err, blobstore.ErrInUse):
		return cli.Hint(cli.Exit(cli.CodeTryAgain, err), "one process owns a store at a time; stop the other one first")
	case errors.As(err, &stranger):
		return cli.Hint(cli.Exit(cli.CodeUnreachable, err), "ca-file=PATH in the URL names the certificates to trust")
	case errors.Is(err, blobstore.ErrUnavailable):
		return cli.Hint(cli.Exit(cli.CodeUnreachable, err), "check the endpoint and that its server runs; then try again")
	case errors.Is(err, blobstore.ErrDamaged), p.folder != "", errors.As(err, &path):
		return err
	}
	// What a bucket's server refuses says itself what to do, and is never a matter of a registry's address.
	return cli.Hint(cli.Exit(cli.CodeUsage, err), "check the bucket, the credentials, and what it allows them")
}
