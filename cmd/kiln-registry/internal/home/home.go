// Package home is where a registry keeps everything: the place of its store and its state, and how they are opened, by
// one process at a time.
package home

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
	IndexFile  = "index.db"
	newIndex   = "index.db.new"     // made by reindex; it takes the place of the other one when it is whole
	lostIndex  = "index.db.before-" // and a time: knew what reindex --accept-loss left out
	SocketFile = "admin.sock"
	lockFile   = "LOCK"
	ownerFile  = "state.json" // whose state it is; not in the folder of a store
)

// Home is where a registry keeps everything: the bytes at a place, and its state in a folder of this machine: the
// index, the administration socket and a lock. That may be the folder of the store itself.
type Home struct {
	Place
	State string
	Apart bool // State is not the store's own folder
}

// newHome refuses a state folder that is a store itself.
func newHome(p Place, state string) (Home, error) {
	switch {
	case state == "" && p.Folder != "":
		return Home{Place: p, State: p.Folder}, nil
	case state == "":
		state = defaultState
	}
	if sameFolder(state, p.Folder) {
		return Home{Place: p, State: state}, nil
	}
	if _, err := os.Lstat(filepath.Join(state, "store.json")); err == nil {
		return Home{}, cli.Hint(
			cli.Usagef("--state-dir %s is a store itself, and not that of --store", state),
			"give it a folder of its own, new or empty",
		)
	}
	return Home{Place: p, State: state, Apart: true}, nil
}

func sameFolder(a, b string) bool {
	x, err := os.Stat(a)
	if err != nil || b == "" {
		return false
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

// File is the path of a file in the state folder.
func (h Home) File(name string) string { return filepath.Join(h.State, name) }

// Command is how another command is run on this home.
func (h Home) Command(name string) string {
	text := fmt.Sprintf("kiln-registry %s --store %q", name, h.Name)
	if h.Apart {
		text += fmt.Sprintf(" --state-dir %q", h.State)
	}
	return text
}

// owned is the content of ownerFile.
type owned struct {
	Store string `json:"store"`   // the ID of the store
	At    string `json:"address"` // where it was when its state was last used
}

// owner reads whose state this is; zero: it does not say.
func (h Home) owner() (o owned, err error) {
	b, err := os.ReadFile(h.File(ownerFile))
	if errors.Is(err, fs.ErrNotExist) {
		return o, nil
	} else if err != nil {
		return o, err
	}
	if err := json.Unmarshal(b, &o); err != nil || o.Store == "" {
		return owned{}, fmt.Errorf("%s is not what this program writes", h.File(ownerFile))
	}
	return o, nil
}

// claim makes this the state of a store. A state that has the index of another one, or of an unknown one, is refused.
func (h Home) claim(id string) error {
	_, absent := os.Lstat(h.File(IndexFile))
	want := owned{id, h.Address()}
	o, err := h.owner()
	switch {
	case err == nil && (o == want || o.Store == "" && !h.Apart):
		return nil
	case absent != nil, err == nil && o.Store == id:
		b, err := json.Marshal(want)
		if err != nil {
			return err
		}
		return durable.Disk{}.WriteFile(h.File(ownerFile), append(b, '\n'), 0o600)
	case err != nil:
		return h.another(err)
	case o.Store == "":
		return h.another(fmt.Errorf("%s does not say of which store its %s is", h.State, IndexFile))
	}
	return h.another(fmt.Errorf("%s has the index of another store, %s", h.State, o.At))
}

func (h Home) another(err error) error {
	return cli.Hint(cli.Exit(cli.CodeUsage, err),
		"give this store a --state-dir of its own, or make its index anew here: "+h.Command("reindex"))
}

// exchange puts the new index of a store, which is whole, in the place of the one that is there, however damaged that is
// and of whichever store. It keeps the old one as keep, unless that is empty. At no instant is there an index that
// counts as that of another store.
func (h Home) exchange(id, keep string) error {
	var disk durable.Disk
	if keep != "" {
		err := disk.MoveNew(h.File(IndexFile), h.File(keep))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := h.claim(id); err != nil { // it is of another store
		if err := errors.Join(disk.Remove(h.File(IndexFile)), disk.SyncDir(h.State)); err != nil {
			return err
		}
		if err := h.claim(id); err != nil {
			return err
		}
	}
	return disk.Move(h.File(newIndex), h.File(IndexFile))
}

// lock takes the state folder, which is made if it is missing. A store's own folder is locked with the store.
func (h Home) lock() (*durable.Lock, error) {
	if !h.Apart {
		return nil, nil
	}
	if err := private(h.State); err != nil {
		return nil, fmt.Errorf("make state folder %s: %w", h.State, err)
	}
	l, err := durable.Acquire(h.File(lockFile))
	if errors.Is(err, durable.ErrLocked) {
		err = cli.Hint(cli.Exit(cli.CodeTryAgain, err), "one process owns a state folder at a time; stop the other one first")
	}
	return l, err
}
