package upkeep

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
)

const (
	// maxMissing is how many lost blobs are kept in mind. Each is found by every pass, however many there are.
	maxMissing = 4096
	// maxReferrers is how many of the manifests that refer to a blob that is not there are named.
	maxReferrers = 16
	// missingNote keeps the lost blobs in the index.
	missingNote = "missing"
)

// Lost is a blob that can't be had, and of which the store does not say so itself, as it does of what is set aside.
type Lost struct {
	Digest identity.Digest `json:"digest"`
	Since  time.Time       `json:"since"` // when it was first found so
	// Verdict is Missing: manifests refer to it, and the store does not have it; Unreadable; or Damaged: it could not be
	// set aside.
	Verdict Verdict `json:"verdict"`
	Why     string  `json:"why"`
}

// lost are those that are known. They are kept in the index, as nothing else says which those are.
type lost struct {
	mu     sync.Mutex
	loaded bool
	known  map[identity.Digest]Lost
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
	l.known, l.loaded = map[identity.Digest]Lost{}, true
	for _, m := range kept {
		l.known[m.Digest] = m
	}
	return nil
}

// list returns them in order of digest. The caller has mu.
func (l *lost) list() []Lost {
	return slices.SortedFunc(maps.Values(l.known), func(a, b Lost) int { return a.Digest.Compare(b.Digest) })
}

// note has the lost blobs changed by change, which says whether it did, and keeps them. A failure is logged: the next
// pass finds them again.
func (s *Scrubber) note(ctx context.Context, change func(known map[identity.Digest]Lost) bool) {
	s.lost.mu.Lock()
	defer s.lost.mu.Unlock()
	err := s.lost.load(ctx, s.ix)
	if err == nil && change(s.lost.known) {
		err = save(context.WithoutCancel(ctx), s.ix, missingNote, s.lost.list())
	}
	if err != nil && ctx.Err() == nil {
		s.log.Error("lost blobs not kept in mind", "error", err)
	}
}

// Arrived says that the store was given a blob, or that it reads well: if it was lost, it is not any more.
func (s *Scrubber) Arrived(ctx context.Context, d identity.Digest) {
	s.back(ctx, d, Missing, Unreadable, Damaged)
}

// back forgets a blob that was lost in one of these ways.
func (s *Scrubber) back(ctx context.Context, d identity.Digest, ways ...Verdict) {
	s.note(ctx, func(known map[identity.Digest]Lost) bool {
		l, was := known[d]
		if was = was && slices.Contains(ways, l.Verdict); was {
			delete(known, d)
			s.log.Info(string(l.Verdict)+" blob is back", "digest", d.String())
		}
		return was
	})
}

// settle keeps in mind what was found out about a blob that the store has.
func (s *Scrubber) settle(ctx context.Context, f Finding) Finding {
	if f.Verdict == Unreadable || f.Verdict == Damaged && !f.Aside {
		s.lose(ctx, Lost{Digest: f.Digest, Verdict: f.Verdict, Why: f.Why})
	} else {
		s.back(ctx, f.Digest, Unreadable, Damaged)
	}
	return f
}

// lose keeps a blob in mind that is lost.
func (s *Scrubber) lose(ctx context.Context, l Lost) {
	s.note(ctx, func(known map[identity.Digest]Lost) bool {
		was, is := known[l.Digest]
		if is && was.Verdict == l.Verdict || !is && len(known) >= maxMissing {
			return false
		}
		l.Since = s.now().UTC()
		known[l.Digest] = l
		return true
	})
}

// Unreadable keeps in mind that the store failed to read a blob, as err says.
func (s *Scrubber) Unreadable(ctx context.Context, d identity.Digest, err error) {
	s.log.Error("blob unreadable", "digest", d.String(), "why", err)
	s.lose(ctx, Lost{Digest: d, Verdict: Unreadable, Why: err.Error()})
}

// Unusable says whether a blob that the store shows was found unreadable or damaged.
func (s *Scrubber) Unusable(ctx context.Context, d identity.Digest) (bool, error) {
	s.lost.mu.Lock()
	defer s.lost.mu.Unlock()
	if err := s.lost.load(ctx, s.ix); err != nil {
		return false, fmt.Errorf("lost blobs: %w", err)
	}
	l, is := s.lost.known[d]
	return is && l.Verdict != Missing, nil
}

// Remember keeps the lost blobs in an index that was emptied since they were found.
func (s *Scrubber) Remember(ctx context.Context) {
	s.note(ctx, func(known map[identity.Digest]Lost) bool { return len(known) > 0 })
}

// Lost returns the blobs that were found lost, in order of digest: the first 4,096 that were found.
func (s *Scrubber) Lost(ctx context.Context) ([]Lost, error) {
	s.lost.mu.Lock()
	defer s.lost.mu.Unlock()
	if err := s.lost.load(ctx, s.ix); err != nil {
		return nil, fmt.Errorf("lost blobs: %w", err)
	}
	return s.lost.list(), nil
}

// ForgetUnused forgets the lost blobs that nobody misses: to which no manifest refers any more, and which the store does
// not have either. The index must know all that the store holds.
func (s *Scrubber) ForgetUnused(ctx context.Context) error {
	all, err := s.Lost(ctx)
	if err != nil || len(all) == 0 {
		return err
	}
	ds := make([]identity.Digest, len(all))
	for i, l := range all {
		ds[i] = l.Digest
	}
	used, err := s.ix.ReferredOf(ctx, ds)
	if err != nil || len(used) == len(ds) {
		return err
	}
	all = slices.DeleteFunc(all, func(l Lost) bool {
		_, is := slices.BinarySearchFunc(used, l.Digest, identity.Digest.Compare)
		return is || l.Verdict != Missing && !s.isGone(ctx, l.Digest)
	})
	s.note(ctx, func(known map[identity.Digest]Lost) bool {
		for _, l := range all {
			delete(known, l.Digest)
		}
		return len(all) > 0
	})
	return nil
}

func (s *Scrubber) isGone(ctx context.Context, d identity.Digest) bool {
	_, err := s.store.Stat(ctx, d)
	return errors.Is(err, blobstore.ErrNotFound) && !errors.Is(err, blobstore.ErrDamaged)
}

// absent finds out about a blob that the store did not list. It is missing if manifests refer to it, or damaged if it is
// in quarantine.
func (s *Scrubber) absent(ctx context.Context, d identity.Digest) (Finding, error) {
	gone := Finding{Digest: d, Verdict: Gone}
	for look := 0; ; look++ { // once more after it was seen to be referred to: it may have come and gone
		_, err := s.store.Stat(ctx, d)
		aside := errors.Is(err, blobstore.ErrQuarantined)
		switch {
		case err == nil, errors.Is(err, blobstore.ErrCut):
			return gone, nil // it came since
		case !errors.Is(err, blobstore.ErrNotFound):
			return s.settle(ctx, Finding{Digest: d, Verdict: Unreadable, Why: err.Error()}), unreachable(err)
		case look == 0:
			if referred, err := s.ix.Referred(ctx, d); err != nil || !referred {
				gone.Why, gone.Aside, gone.Before = blobstore.ErrNotFound.Error(), aside, aside
				return gone, err
			}
		case aside:
			return s.stillAside(ctx, d)
		default:
			return s.missing(ctx, d)
		}
	}
}

// stillAside names what refers to a blob that was set aside and is not healed.
func (s *Scrubber) stillAside(ctx context.Context, d identity.Digest) (Finding, error) {
	f := Finding{Digest: d, Verdict: Damaged, Why: "it was set aside before, and is not healed", Aside: true, Before: true}
	s.back(ctx, d, Unreadable, Damaged)
	return s.named(ctx, f)
}

// missing notes a blob that is missing, and names what refers to it.
func (s *Scrubber) missing(ctx context.Context, d identity.Digest) (Finding, error) {
	f := Finding{Digest: d, Verdict: Missing, Why: "the store has no such blob"}
	s.lose(ctx, Lost{Digest: d, Verdict: Missing, Why: f.Why})
	return s.named(ctx, f)
}

// named logs what was found out about a blob that is not there, with manifests that refer to it.
func (s *Scrubber) named(ctx context.Context, f Finding) (Finding, error) {
	var names []string
	for r, err := range s.ix.BlobReferrers(ctx, f.Digest) {
		if err != nil {
			return f, fmt.Errorf("manifests that refer to %s: %w", f.Digest, err)
		}
		if len(f.Manifests) == maxReferrers {
			f.Why += "; more manifests refer to it than are named"
			break
		}
		f.Manifests = append(f.Manifests, r)
		names = append(names, r.Repository+"@"+r.Digest.String())
	}
	s.log.Error("blob "+string(f.Verdict), "digest", f.Digest.String(), "manifests", strings.Join(names, " "), "why", f.Why)
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
	s.back(ctx, b.Digest, Missing)
	f, err := s.blob(ctx, b.Info, p)
	if err == nil {
		f = s.settle(ctx, f)
	}
	return f, err
}
