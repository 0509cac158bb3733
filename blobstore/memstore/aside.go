package memstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
)

// SetAside implements blobstore.Quarantine.
func (st *Store) SetAside(ctx context.Context, i blobstore.Info, why string) error {
	return st.do(OpSetAside, func() error {
		b := st.blobs[i.Digest]
		if b == nil || b.Generation != i.Generation {
			return st.absent("set aside", i)
		}
		delete(st.blobs, i.Digest)
		st.aside[i.Digest] = &aside{blobstore.AsideInfo{Info: b.Info, Why: why, Since: time.Now()}, b.data}
		return nil
	})
}

// Aside implements blobstore.Quarantine.
func (st *Store) Aside(ctx context.Context) iter.Seq2[blobstore.AsideInfo, error] {
	return func(yield func(blobstore.AsideInfo, error) bool) {
		var found []blobstore.AsideInfo
		err := st.view(ctx, func() error {
			for _, a := range st.aside {
				found = append(found, a.AsideInfo)
			}
			return nil
		})
		yieldAll(found, err, yield)
	}
}

// Segments implements blobstore.Segments.
func (st *Store) Segments(ctx context.Context, i blobstore.Info) (form []byte, err error) {
	err = st.view(ctx, func() error {
		b := st.blobs[i.Digest]
		if b == nil || b.Generation != i.Generation {
			return st.absent("midstates of", i)
		}
		if b.midstates == nil {
			return fmt.Errorf("midstates of blob %s: %w: it has one segment", i.Digest, blobstore.ErrNotFound)
		}
		form = bytes.Clone(b.midstates)
		return blobstore.FitMidstates(form, i, st.segment)
	})
	if err != nil {
		return nil, err
	}
	return form, nil
}

// KeepSegments implements blobstore.Segments.
func (st *Store) KeepSegments(ctx context.Context, i blobstore.Info, form []byte) error {
	return st.do(OpKeep, func() error {
		b := st.blobs[i.Digest]
		if b == nil || b.Generation != i.Generation {
			return st.absent("keep midstates of", i)
		}
		if err := blobstore.FitMidstates(form, b.Info, st.segment); err != nil {
			return fmt.Errorf("keep midstates of blob %s: %w", i.Digest, err)
		}
		b.midstates = bytes.Clone(form)
		return nil
	})
}

// midstates returns those of all bytes, whose digest is d; nil if there is one segment.
func (s *session) midstates(d identity.Digest, segment int64) ([]byte, error) {
	size := int64(len(s.data))
	n := lanes.Edges(size, segment)
	if n == 0 {
		return nil, nil
	}
	_, noted := s.hash.Take()
	states, err := lanes.New(segment, size, d, noted[:n])
	if err != nil {
		return nil, err
	}
	return states.MarshalBinary()
}

// checkMidstates hashes the blob by its midstates.
func (b *blob) checkMidstates(segment int64) error {
	if b.midstates == nil && lanes.Edges(b.Size, segment) == 0 {
		return nil
	}
	s, err := lanes.ParseSegments(b.midstates, segment)
	if err != nil {
		return err
	}
	stream := s.Stream()
	stream.Write(b.data)
	if s.Digest != b.Digest || len(stream.End()) > 0 {
		return errors.New("they are of other bytes")
	}
	return nil
}
