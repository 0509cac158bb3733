package home

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// Compact writes the file of the index anew, without the room that it has left, and returns its bytes before and after.
// The copy takes the place of the file when it is whole, durable and has been compared; until then, and after an error,
// the file stays as it is. It fails if another process has the store or the state folder.
func (h Home) Compact(ctx context.Context, notify func(string)) (was, is int64, err error) {
	st, err := h.Place.Open(ctx, notify, Way{})
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	l, err := h.lock()
	if err != nil {
		return 0, 0, err
	}
	if l != nil {
		defer func() { err = errors.Join(err, l.Release()) }()
	}
	info, err := os.Stat(h.File(IndexFile))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return 0, 0, cli.Hint(cli.Exit(cli.CodeNotFound, fmt.Errorf("there is no index: %w", err)),
			"nothing is lost: the next start makes it from the store")
	case err != nil:
		return 0, 0, err
	}
	if err := h.claim(st.ID()); err != nil {
		return 0, 0, err
	}
	is, err = h.compact(ctx)
	return info.Size(), is, err
}

func (h Home) compact(ctx context.Context) (size int64, err error) {
	from, to := h.File(IndexFile), h.File(newIndex)
	if err := os.RemoveAll(to); err != nil { // of a run that was killed
		return 0, err
	}
	if err := boltkv.Compact(ctx, from, to); err != nil {
		return 0, h.notCompacted(err)
	}
	info, err := os.Stat(to)
	if err != nil {
		return 0, err
	}
	return info.Size(), durable.Disk{}.Move(to, from)
}

func (h Home) notCompacted(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return cli.Hint(cli.Exit(cli.CodeDisk, err), "the copy needs about as much room as the index; nothing was changed")
	}
	return h.damaged(err)
}
