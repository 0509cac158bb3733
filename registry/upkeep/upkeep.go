// Package upkeep does to a registry what has to be done while it runs: it collects the blobs that nothing refers to any
// more, and reads all others again to find those that have become damaged.
package upkeep

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/kiln-registry/kiln-registry/index"
)

// wait waits, unless ctx ends first.
func wait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// load reads a note into v, which stays as it is if there is none. A note that does not read is taken for none: it only
// says where to go on.
func load(ctx context.Context, ix *index.Index, name string, v any) (found bool, err error) {
	b, err := ix.Note(ctx, name)
	if err != nil || b == nil {
		return false, err
	}
	return json.Unmarshal(b, v) == nil, nil
}

func save(ctx context.Context, ix *index.Index, name string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := ix.Apply(ctx, index.Note{Name: name, Value: b}); err != nil {
		return fmt.Errorf("keep note %s: %w", name, err)
	}
	return nil
}
