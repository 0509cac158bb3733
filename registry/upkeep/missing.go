package upkeep

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
)

const (
	// maxMissing is how many missing blobs are kept in mind. Each is found by every pass, however many there are.
	maxMissing = 4096
	// maxReferrers is how many of the manifests that refer to a missing blob are named.
	maxReferrers = 16
	// missingNote keeps the missing blobs in the index.
	missingNote = "missing"
)

// Lost is a blob that manifests refer to and that the store does not have.
type Lost struct {
	Digest identity.Digest `json:"digest"`
	Since  time.Time       `json:"since"` // when it was first found missing
}

// lost are the missing blobs that are known. They are kept in the index, as nothing else says which those are.
type lost struct {
	mu     sync.Mutex
	loaded bool
	since  map[identity.Digest]time.Time
}

// load reads what an earlier process knew. The caller has mu.
func (l *lost) load(ctx context.Context, ix *index.Index) error {
	if l.loaded {
		return nil
	}
	var kept []Lost
	if _, err := load(ctx, ix, missingNote, &kept); err != nil {
		return err
	}
	l.since, l.loaded = map[identity.Digest]time.Time{}, true
	for _, m := range kept {
		l.since[m.Digest] = m.Since
	}
	return nil
}

// list returns them in order of digest. The caller has mu.
func (l *lost) list() []Lost {
	all := make([]Lost, 0, len(l.since))
	for d, since := range l.since {
		all = append(all, Lost{d, since})
	}
	slices.SortFunc(all, func(a, b Lost) int { return a.Digest.Compare(b.Digest) })
	return all
}

// note has the missing blobs changed by change, which says whether it did, and keeps them. A failure is logged: the next
// pass finds them again.
func (s *Scrubber) note(ctx context.Context, change func(since map[identity.Digest]time.Time) bool) {
	s.lost.mu.Lock()
	defer s.lost.mu.Unlock()
	err := s.lost.load(ctx, s.ix)
	if err == nil && change(s.lost.since) {
		err = save(context.WithoutCancel(ctx), s.ix, missingNote, s.lost.list())
	}
	if err != nil && ctx.Err() == nil {
		s.log.Error("missing blobs not kept in mind", "error", err)
	}
}

// Arrived says that the store has a blob: if it was missing, it is not any more.
func (s *Scrubber) Arrived(ctx context.Context, d identity.Digest) {
	s.note(ctx, func(since map[identity.Digest]time.Time) bool {
		_, was := since[d]
		delete(since, d)
		if was {
			s.log.Info("missing blob is back", "digest", d.String())
		}
		return was
	})
}

// Remember keeps the missing blobs in an index that was emptied since they were found.
func (s *Scrubber) Remember(ctx context.Context) {
	s.note(ctx, func(since map[identity.Digest]time.Time) bool { return len(since) > 0 })
}

// Missing returns the blobs that were found missing, in order of digest: the first 4,096 that were found.
func (s *Scrubber) Missing(ctx context.Context) ([]Lost, error) {
	s.lost.mu.Lock()
	defer s.lost.mu.Unlock()
	if err := s.lost.load(ctx, s.ix); err != nil {
		return nil, fmt.Errorf("missing blobs: %w", err)
	}
	return s.lost.list(), nil
}

// ForgetUnused forgets the missing blobs to which no manifest refers any more: nobody misses them. The index must know
// all that the store holds.
func (s *Scrubber) ForgetUnused(ctx context.Context) error {
	missing, err := s.Missing(ctx)
	if err != nil || len(missing) == 0 {
		return err
	}
	ds := make([]identity.Digest, len(missing))
	for i, m := range missing {
		ds[i] = m.Digest
	}
	used, err := s.ix.ReferredOf(ctx, ds)
	if err != nil || len(used) == len(ds) {
		return err
	}
	s.note(ctx, func(since map[identity.Digest]time.Time) bool {
		for _, d := range ds {
			if _, is := slices.BinarySearchFunc(used, d, identity.Digest.Compare); !is {
				delete(since, d)
			}
		}
		return true
	})
	return nil
}

// absent finds out about a blob that the store did not list. It is missing if manifests refer to it: one that is in
// quarantine is not.
func (s *Scrubber) absent(ctx context.Context, d identity.Digest) (Finding, error) {
	gone := Finding{Digest: d, Verdict: Gone}
	for look := 0; ; look++ { // once more after it was seen to be referred to: it may have come and gone
		_, err := s.store.Stat(ctx, d)
		switch {
		case err == nil, errors.Is(err, blobstore.ErrQuarantined), errors.Is(err, blobstore.ErrCut):
			return gone, nil // it came since, or is another matter
		case !errors.Is(err, blobstore.ErrNotFound):
			return Finding{Digest: d, Verdict: Unreadable, Why: err.Error()}, unreachable(err)
		case look == 0:
			if referred, err := s.ix.Referred(ctx, d); err != nil || !referred {
				gone.Why = blobstore.ErrNotFound.Error()
				return gone, err
			}
			continue
		}
		return s.missing(ctx, d)
	}
}

// missing notes a blob that is missing, and names what refers to it.
func (s *Scrubber) missing(ctx context.Context, d identity.Digest) (Finding, error) {
	f := Finding{Digest: d, Verdict: Missing, Why: "the store has no such blob"}
	var names []string
	for r, err := range s.ix.BlobReferrers(ctx, d) {
		if err != nil {
			return f, fmt.Errorf("manifests that refer to %s: %w", d, err)
		}
		if len(f.Manifests) == maxReferrers {
			f.Why += "; more manifests refer to it than are named"
			break
		}
		f.Manifests = append(f.Manifests, r)
		names = append(names, r.Repository+"@"+r.Digest.String())
	}
	s.log.Error("blob missing", "digest", d.String(), "manifests", strings.Join(names, " "), "why", f.Why)
	s.note(ctx, func(since map[identity.Digest]time.Time) bool {
		_, known := since[d]
		if known || len(since) == maxMissing {
			return false
		}
		since[d] = s.now().UTC()
		return true
	})
	return f, nil
}

// due is a blob that is to be looked at: one that the store has, or one that manifests refer to and the store did not
// list.
type due struct {
	blobstore.Info // of one that is not listed: the digest
	listed         bool
}

// due yields what there is and what there should be, in order of digest, after one; zero: from the start.
func (s *Scrubber) due(ctx context.Context, after identity.Digest) iter.Seq2[due, error] {
	return func(yield func(due, error) bool) {
		next, stop := iter.Pull2(s.ix.Blobs(ctx, after))
		defer stop()
		at, failed, more := next()
		// before yields what manifests refer to before a blob; without one, up to the end.
		before := func(i *blobstore.Info) bool {
			for ; more && failed == nil && (i == nil || at.Compare(i.Digest) < 0); at, failed, more = next() {
				if !yield(due{Info: blobstore.Info{Digest: at}}, nil) {
					return false
				}
			}
			if failed != nil {
				yield(due{}, failed)
				return false
			}
			if more && i != nil && at == i.Digest {
				at, failed, more = next()
			}
			return true
		}
		for i, err := range s.store.List(ctx, after) {
			if err != nil {
				yield(due{}, err)
				return
			}
			if !before(&i) || !yield(due{i, true}, nil) {
				return
			}
		}
		before(nil)
	}
}

// look looks at a blob.
func (s *Scrubber) look(ctx context.Context, b due, p *pace) (Finding, error) {
	if !b.listed {
		return s.absent(ctx, b.Digest)
	}
	s.Arrived(ctx, b.Digest)
	return s.blob(ctx, b.Info, p)
}
