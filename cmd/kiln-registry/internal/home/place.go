package home

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/fsstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// Engine is an open store.
type Engine interface {
	blobstore.Engine
	// ID tells this store from all others, wherever it was moved to.
	ID() string
}

// Place is where a store is: a folder, or the prefix of a bucket.
type Place struct {
	Name   string // as it was given
	Folder string // empty: the bucket
	Bucket s3store.Config
}

// PlaceForms is how a place is written.
const PlaceForms = "a folder, or s3://bucket/prefix?endpoint=https://host:port"

// schemeLike is how what was meant for a URL begins. A folder of that name can be written ./s3:
var schemeLike = regexp.MustCompile(`^(?i)(s3:|[a-z][a-z0-9+.-]*:/)`)

// ParsePlace reads the argument or flag that is called what. Its errors have nothing of the name that may be a secret.
func ParsePlace(what, name string) (p Place, err error) {
	p.Name = name
	switch {
	case name == "":
		return p, cli.Usagef("%s is empty", what)
	case strings.HasPrefix(name, "s3://"):
		p.Bucket, err = s3store.Parse(name)
		if err != nil {
			return p, cli.Usagef("%s: %w", what, err)
		}
		return p, nil
	case strings.Contains(name, "://"), schemeLike.MatchString(name): // s3:/ is a slip, and may have a secret after it
		return p, cli.Usagef("%s: want %s", what, PlaceForms)
	}
	p.Folder = name
	return p, nil
}

func (p Place) String() string {
	if p.Folder != "" {
		return p.Folder
	}
	return p.Bucket.String()
}

// Address is String, in a form that another command of this machine can compare.
func (p Place) Address() string {
	if p.Folder == "" {
		return p.Bucket.String() + " at " + p.Bucket.Endpoint
	}
	abs, err := filepath.Abs(p.Folder)
	if err != nil {
		return p.Folder
	}
	return abs
}

// Same says whether two places are one.
func (p Place) Same(o Place) bool {
	return p.Address() == o.Address() || sameFolder(p.Folder, o.Folder)
}

// Make makes the place a store, if it is empty.
func (p Place) Make(ctx context.Context) error {
	if p.Folder == "" {
		return p.Explain(s3store.Init(ctx, p.Bucket))
	}
	if err := private(p.Folder); err != nil {
		return fmt.Errorf("make store %s: %w", p.Folder, err)
	}
	return p.Explain(fsstore.Init(p.Folder))
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

// Way is how a store is opened. The zero Way is the usual one.
type Way struct {
	AcceptLoss bool // leave out the refs that are damaged
	ReadOnly   bool // change nothing
}

// Open opens the store, so that no other process can. What is left out of its refs is told to notify.
func (p Place) Open(ctx context.Context, notify func(string), w Way) (Engine, error) {
	var e Engine
	var err error
	if p.Folder != "" {
		e, err = fsstore.Open(p.Folder, fsstore.Options{Notify: notify, AcceptLoss: w.AcceptLoss, ReadOnly: w.ReadOnly})
	} else {
		e, err = s3store.Open(ctx, p.Bucket, s3store.Options{
			Notify: notify, Exclusive: true, AcceptLoss: w.AcceptLoss, ReadOnly: w.ReadOnly,
		})
	}
	if err != nil {
		return nil, p.Explain(err)
	}
	return e, nil
}

// Explain says what can be done about an error of the place.
func (p Place) Explain(err error) error {
	var path *fs.PathError // of the certificates
	var stranger x509.UnknownAuthorityError
	switch {
	case err == nil, errors.Is(err, context.Canceled):
		return err
	case errors.Is(err, blobstore.ErrNotStore):
		hint := "check the path and that its disk is mounted; --init once makes a new or empty folder a store"
		if p.Folder == "" {
			hint = "check bucket and prefix; --init once makes a prefix a store that nothing is below"
		}
		return cli.Hint(cli.Exit(cli.CodeUsage, err), hint)
	case errors.Is(err, durable.ErrLocked), errors.Is(err, blobstore.ErrInUse):
		hint := "one process owns a store at a time; stop the other one first"
		if p.Folder == "" {
			hint += ", or give this command the --state-dir of the server if it is one of this machine"
		}
		return cli.Hint(cli.Exit(cli.CodeTryAgain, err), hint)
	case errors.As(err, &stranger):
		return cli.Hint(cli.Exit(cli.CodeUnreachable, err), "ca-file=PATH in the URL names the certificates to trust")
	case errors.Is(err, blobstore.ErrUnavailable):
		return cli.Hint(cli.Exit(cli.CodeUnreachable, err), "check the endpoint and that its server runs; then try again")
	case errors.Is(err, blobstore.ErrDamaged):
		return cli.Hint(cli.Exit(cli.CodeDisk, err), p.repair(err))
	case p.Folder != "", errors.As(err, &path):
		return err
	}
	// What a bucket's server refuses says itself what to do, and is never a matter of a registry's address.
	hint := "check the bucket, the credentials, and what it allows them"
	if set, missing := halfSet("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"); missing != "" {
		hint = fmt.Sprintf("%s is set and %s is not: set both, or neither for other credentials", set, missing)
	}
	return cli.Hint(cli.Exit(cli.CodeUsage, err), hint)
}

// repair says what can be done about a damaged store.
func (p Place) repair(err error) string {
	const log = "refs.log"
	_, statErr := os.Lstat(filepath.Join(p.Folder, log))
	switch {
	case p.Folder != "" && errors.Is(statErr, fs.ErrNotExist):
		return "put the newest copy of " + log + " back from a backup: it says what everything is called; without one, " +
			"push the models again to a new store"
	case errors.Is(err, blobstore.ErrRefsDamaged):
		return "put what is damaged back from a backup; without one, kiln-registry reindex --accept-loss goes on with what " +
			"is left"
	}
	return "put what is damaged back from a backup"
}

// halfSet tells two variables of which only one is set; missing is empty if both or none are.
func halfSet(a, b string) (set, missing string) {
	switch hasA, hasB := os.Getenv(a) != "", os.Getenv(b) != ""; {
	case hasA && !hasB:
		return a, b
	case hasB && !hasA:
		return b, a
	}
	return "", ""
}
