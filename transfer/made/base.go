package made

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

const (
	maxNamed  = 32 // manifests of one base that are read to find the one whose shards have the names that were recorded
	maxChoice = 8  // packagings that are named where somebody has to choose
)

// ErrNoBase: the artifact does not record the base that it was made from.
var ErrNoBase = errors.New("records no base")

// ErrDisputed: statements alone name the base of the artifact, and they name several.
var ErrDisputed = errors.New("it can't be told which base it was made from")

// ErrSeveral: the artifact has outcome rows of several bases.
var ErrSeveral = errors.New("it was made from several bases")

// Names says under which names the shards of a base come.
type Names string

// The names.
const (
	NamesHeld     Names = "held"     // those that were recorded, or none were recorded: as the registry holds them
	NamesRestored Names = "restored" // those that were recorded, which the registry holds under others
	NamesOther    Names = "other"    // others than those that were recorded
)

// FindBase finds, in the registry that holds an artifact, the base that it was made from: the manifest that it refers
// to, else one whose shards are called as its documents record, else any; in one repository or, if repo is empty, in
// all; repo may also name one artifact, as repository:tag or repository@digest. The names that were recorded are
// restored where no shard index says others. The errors are ErrNoBase, ErrDisputed, ErrSeveral and those of
// transfer.ResolveAggregate.
func FindBase(ctx context.Context, c *client.Client, a Artifact, plan transfer.Plan, repo string) (
	base transfer.Plan, names Names, err error,
) {
	is := a.Aggregate()
	switch several := a.Bases(); {
	case a.Disputed != "":
		return base, "", fmt.Errorf("%s: %w: %s", a.Reference, ErrDisputed, a.Disputed)
	case len(several) > 1:
		return base, "", fmt.Errorf("%s: %w: %s", a.Reference, ErrSeveral, listed(several))
	case is.IsZero():
		return base, "", fmt.Errorf("%s: %w", a.Reference, ErrNoBase)
	}
	want := a.Binding().Manifest
	if !plan.Subject.IsZero() && (repo == "" || repo == plan.Repository) {
		h := api.Held{Repository: plan.Repository, Digest: plan.Subject}
		base, err = transfer.ResolveHeld(ctx, c, is, h)
		if err == nil && Called(base.Base, want) {
			return base, NamesHeld, nil
		}
	}
	if len(want.Shards) > 0 && !strings.ContainsAny(repo, ":@") {
		plans, err := calledSo(ctx, c, is, want, repo)
		if err != nil {
			return base, "", err
		}
		if len(plans) > 0 {
			more := max(0, len(plans)-maxChoice)
			base, err = transfer.Choose(is, plans[:len(plans)-more], more)
			return base, NamesHeld, err
		}
	}
	if base, err = transfer.ResolveAggregate(ctx, c, is, repo); err != nil {
		return base, "", err
	}
	if Called(base.Base, want) {
		return base, NamesHeld, nil
	}
	if named, ok := rename(base, want); ok {
		return named, NamesRestored, nil
	}
	return base, NamesOther, nil
}

// rename gives the shards of a base the names that were recorded. ok is false where a shard index names them, since
// that would be wrong then, and where the loader would not choose the same files any more.
func rename(base transfer.Plan, want identity.Manifest) (_ transfer.Plan, ok bool) {
	if base.Has(safetensors.IndexName) {
		return base, false
	}
	free := map[identity.Shard][]string{} // names that were recorded, by content
	for _, s := range want.Shards {
		content := identity.Shard{Size: s.Size, Digest: s.Digest}
		free[content] = append(free[content], s.Filename)
	}
	to := map[string]string{}
	for _, s := range base.Base.Shards {
		content := identity.Shard{Size: s.Size, Digest: s.Digest}
		if len(free[content]) == 0 {
			return base, false
		}
		to[s.Filename], free[content] = free[content][0], free[content][1:]
	}
	files := slices.Clone(base.Files)
	var entries []safetensors.Entry
	for i, f := range files {
		files[i].Name = cmp.Or(to[f.Name], f.Name)
		if name := files[i].Name; !strings.Contains(name, "/") {
			entries = append(entries, safetensors.Entry{Name: name, Mode: safetensors.Regular, Size: f.Size})
		}
	}
	slices.SortFunc(files, func(a, b staging.File) int { return cmp.Compare(a.Name, b.Name) })
	sel, err := safetensors.Select(entries, nil)
	if err != nil || !slices.Equal(sel.Shards, namesOf(want)) || twice(files) {
		return base, false
	}
	base.Files, base.Base = files, want
	return base, true
}

func namesOf(m identity.Manifest) (names []string) {
	for _, s := range m.Shards {
		names = append(names, s.Filename)
	}
	return names
}

// twice says whether two of the sorted files have one name.
func twice(files []staging.File) bool {
	same := func(a, b staging.File) bool { return a.Name == b.Name }
	return len(slices.CompactFunc(slices.Clone(files), same)) < len(files)
}

// listed names bases for people.
func listed(all []documents.Binding) string {
	var names []string
	for _, b := range all {
		names = append(names, b.Aggregate.String())
	}
	return strings.Join(names, ", ")
}

// Called says whether the shards of a base have the names that were recorded, if any were: want is zero then.
func Called(base, want identity.Manifest) bool {
	return len(want.Shards) == 0 || slices.Equal(base.Shards, want.Shards)
}

// calledSo returns the bases whose shards have the names that were recorded, one of each packaging, the newest first.
func calledSo(
	ctx context.Context, c *client.Client, a identity.Aggregate, want identity.Manifest, repo string,
) ([]transfer.Plan, error) {
	type candidate struct {
		packaging identity.Digest
		held      api.Held
	}
	var all []candidate
	for page, err := range c.BasePages(ctx, a) {
		if err != nil {
			return nil, fmt.Errorf("resolve base %s: %w", a, err)
		}
		for _, p := range page.Packagings {
			for _, h := range p.Manifests {
				if repo == "" || repo == h.Repository {
					all = append(all, candidate{p.ID, h})
				}
			}
		}
		slices.SortStableFunc(all, func(a, b candidate) int {
			return cmp.Or(b.held.Created.Compare(a.held.Created), cmp.Compare(a.held.Repository, b.held.Repository))
		})
		all = all[:min(len(all), maxNamed)]
	}
	var plans []transfer.Plan
	found := map[identity.Digest]bool{} // packagings
	var passed error
	for _, x := range all {
		if found[x.packaging] {
			continue
		}
		p, err := transfer.ResolveHeld(ctx, c, a, x.held)
		switch {
		case err == nil:
		case !transfer.Passable(err):
			return nil, err
		case passed == nil:
			passed = err
			continue
		default:
			continue
		}
		if Called(p.Base, want) {
			found[x.packaging] = true
			plans = append(plans, p)
		}
	}
	if len(plans) > 0 {
		plans[0].Passed = passed
	}
	return plans, nil
}
