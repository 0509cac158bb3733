package main

import (
	"context"
	"crypto/x509"
	"encoding/json"
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

// schemeLike is how what was meant for a URL begins. A folder of that name can be written ./s3:
var schemeLike = regexp.MustCompile(`^(?i)(s3:|[a-z][a-z0-9+.-]*:/)`)

// parsePlace reads the argument or flag that is called what. Its errors have nothing of the name that may be a secret.
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
	case strings.Contains(name, "://"), schemeLike.MatchString(name): // s3:/ is a slip, and may have a secret after it
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
		hint := "one process owns a store at a time; stop the other one first"
		if p.folder == "" {
			hint += ", or give this command the --state-dir of the server if it is one of this machine"
		}
		return cli.Hint(cli.Exit(cli.CodeTryAgain, err), hint)
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

// The names in a state folder.
const (
	indexFile  = "index.db"
	oldIndex   = "index.db.old" // put aside by reindex until it has ended
	socketFile = "admin.sock"
	lockFile   = "LOCK"
	ownerFile  = "state.json" // whose state it is; not in the folder of a store
)

// home is where a registry keeps everything: the bytes at a place, and its state in a folder of this machine: the index,
// the administration socket and a lock. That may be the folder of the store itself.
type home struct {
	place
	state string
	apart bool // state is not the store's own folder
}

// newHome refuses a state folder that is a store itself.
func newHome(p place, state string) (home, error) {
	switch {
	case state == "" && p.folder != "":
		return home{place: p, state: p.folder}, nil
	case state == "":
		state = defaultState
	}
	if sameFolder(state, p.folder) {
		return home{place: p, state: state}, nil
	}
	if _, err := os.Lstat(filepath.Join(state, "store.json")); err == nil {
		return home{}, cli.Hint(
			cli.Usagef("--state-dir %s is a store itself, and not that of --store", state),
			"give it a folder of its own, new or empty",
		)
	}
	return home{place: p, state: state, apart: true}, nil
}

func sameFolder(a, b string) bool {
	x, err := os.Stat(a)
	if err != nil || b == "" {
		return false
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

func (h home) file(name string) string { return filepath.Join(h.state, name) }

// command is how another command is run on this home.
func (h home) command(name string) string {
	text := fmt.Sprintf("kiln-registry %s --store %q", name, h.name)
	if h.apart {
		text += fmt.Sprintf(" --state-dir %q", h.state)
	}
	return text
}

// owned is the content of ownerFile.
type owned struct {
	Store string `json:"store"`   // the ID of the store
	At    string `json:"address"` // where it was when its state was last used
}

// owner reads whose state this is; zero: it does not say.
func (h home) owner() (o owned, err error) {
	b, err := os.ReadFile(h.file(ownerFile))
	if errors.Is(err, fs.ErrNotExist) {
		return o, nil
	} else if err != nil {
		return o, err
	}
	if err := json.Unmarshal(b, &o); err != nil || o.Store == "" {
		return owned{}, fmt.Errorf("%s is not what this program writes", h.file(ownerFile))
	}
	return o, nil
}

// claim makes this the state of a store. A state that has the index of another one, or of an unknown one, is refused.
func (h home) claim(id string) error {
	_, absent := os.Lstat(h.file(indexFile))
	want := owned{id, h.address()}
	o, err := h.owner()
	switch {
	case err == nil && (o == want || o.Store == "" && !h.apart):
		return nil
	case absent != nil, err == nil && o.Store == id:
		b, err := json.Marshal(want)
		if err != nil {
			return err
		}
		return durable.Disk{}.WriteFile(h.file(ownerFile), append(b, '\n'), 0o600)
	case err != nil:
		return h.another(err)
	case o.Store == "":
		return h.another(fmt.Errorf("%s does not say of which store its %s is", h.state, indexFile))
	}
	return h.another(fmt.Errorf("%s has the index of another store, %s", h.state, o.At))
}

func (h home) another(err error) error {
	return cli.Hint(cli.Exit(cli.CodeUsage, err),
		"give this store a --state-dir of its own, or make its index anew here: "+h.command("reindex"))
}

// setAside puts the index aside, however damaged it is and of whichever store.
func (h home) setAside() error {
	err := os.Rename(h.file(indexFile), h.file(oldIndex))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// lock takes the state folder, which is made if it is missing. A store's own folder is locked with the store.
func (h home) lock() (*durable.Lock, error) {
	if !h.apart {
		return nil, nil
	}
	if err := private(h.state); err != nil {
		return nil, fmt.Errorf("make state folder %s: %w", h.state, err)
	}
	l, err := durable.Acquire(h.file(lockFile))
	if errors.Is(err, durable.ErrLocked) {
		err = cli.Hint(cli.Exit(cli.CodeTryAgain, err), "one process owns a state folder at a time; stop the other one first")
	}
	return l, err
}
