package upkeep

import (
	"context"
	"errors"

	"github.com/kiln-registry/kiln-registry/blobstore"
)

// records reads the refs of the store again, as a rebuild of the index would. It returns what is wrong with them, or
// nothing; the error says that they could not be read now.
func (s *Scrubber) records(ctx context.Context, p *pace) (why string, err error) {
	if s.Refs == nil {
		return "", nil
	}
	for ref, err := range s.Refs.Since(ctx, 0) {
		switch {
		case errors.Is(err, blobstore.ErrRefsDamaged):
			s.log.Error("records of manifests and tags damaged: an index could not be made anew from them", "error", err)
			return err.Error(), nil
		case err != nil:
			return "", err
		}
		if err := p.read(ctx, len(ref.Manifest)+len(ref.Finding)+len(ref.Name)); err != nil {
			return "", err
		}
	}
	return "", nil
}
