package blobstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kiln-registry/kiln-registry/identity"
)

// Missing is a blob that a manifest refers to and that neither store shows.
type Missing struct {
	Digest   identity.Digest
	Repo     string          // of a manifest that refers to it
	Manifest identity.Digest // which one
	Err      error           // why the source has not given it: ErrQuarantined, or another ErrNotFound
}

// holder is a manifest in a repository.
type holder struct {
	repo   string
	digest identity.Digest
}

func (h holder) compare(o holder) int {
	return cmp.Or(cmp.Compare(h.repo, o.repo), h.digest.Compare(o.digest))
}

// lacking is what a manifest refers to and is not held.
type lacking struct {
	seq   uint64
	blobs []identity.Digest
}

// findMissing tells of the blobs that manifests of src refer to and that dst has not become a holder of, unless they
// were told of as damaged. It keeps the digests of all blobs in memory, 32 bytes each.
func (c *copying) findMissing(ctx context.Context) error {
	var held []identity.Digest
	for i, err := range c.dst.List(ctx, identity.Digest{}) {
		if err != nil {
			return fmt.Errorf("copy to: %w", err)
		}
		held = append(held, i.Digest)
	}
	incomplete, err := c.incomplete(ctx, held)
	if err != nil {
		return err
	}
	if len(incomplete) > 0 {
		if err := c.forgetDeleted(ctx, incomplete); err != nil {
			return err
		}
	}
	return c.tellMissing(ctx, incomplete)
}

// incomplete returns the manifests that were put and refer to blobs that are not held; some may be deleted by now.
func (c *copying) incomplete(ctx context.Context, held []identity.Digest) (map[holder]lacking, error) {
	found := map[holder]lacking{}
	for ref, err := range c.src.Since(ctx, 0) {
		if err != nil {
			return nil, fmt.Errorf("copy from: %w", err)
		}
		if ref.Deleted || ref.Name != ref.Digest.String() {
			continue
		}
		blobs, err := c.o.Refers(ref.Ref)
		if err != nil {
			return nil, fmt.Errorf("copy from: %s of %s: %w", ref.Name, ref.Repo, err)
		}
		blobs = slices.DeleteFunc(slices.Clone(blobs), func(d identity.Digest) bool {
			_, is := slices.BinarySearchFunc(held, d, identity.Digest.Compare)
			return is
		})
		h := holder{ref.Repo, ref.Digest}
		if len(blobs) > 0 && found[h].seq <= ref.Seq {
			found[h] = lacking{ref.Seq, blobs}
		}
	}
	return found, nil
}

// forgetDeleted leaves out the manifests that were deleted later: nobody misses what those refer to.
func (c *copying) forgetDeleted(ctx context.Context, all map[holder]lacking) error {
	for ref, err := range c.src.Since(ctx, 0) {
		if err != nil {
			return fmt.Errorf("copy from: %w", err)
		}
		h := holder{ref.Repo, ref.Digest}
		if m, is := all[h]; is && ref.Deleted && ref.Name == ref.Digest.String() && m.seq <= ref.Seq {
			delete(all, h)
		}
	}
	return nil
}

func (c *copying) tellMissing(ctx context.Context, incomplete map[holder]lacking) error {
	first := map[identity.Digest]holder{}
	for h, m := range incomplete {
		for _, d := range m.blobs {
			if was, is := first[d]; !is || h.compare(was) < 0 {
				first[d] = h
			}
		}
	}
	for d := range c.damaged {
		delete(first, d)
	}
	missing := make([]identity.Digest, 0, len(first))
	for d := range first {
		missing = append(missing, d)
	}
	slices.SortFunc(missing, identity.Digest.Compare)
	for _, d := range missing {
		_, err := c.src.Stat(ctx, d)
		if err != nil && !errors.Is(err, ErrNotFound) {
			return fmt.Errorf("copy from: %w", err)
		}
		if err == nil {
			err = errors.New("it came while the others were copied")
		}
		c.o.Missing(Missing{d, first[d].repo, first[d].digest, err})
	}
	c.did.Missing = len(missing)
	return nil
}
