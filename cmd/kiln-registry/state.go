package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

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
