package made

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/transfer"
)

// maxNamed is how many manifests of one base are read to find the one whose shards have the names that were recorded.
const maxNamed = 32

// ErrNoBase: the artifact does not record the base that it was made from.
var ErrNoBase = errors.New("records no base")

// FindBase finds, in the registry that holds an artifact, the base that it was made from: the manifest that it refers
// to, else one whose shards are called as its documents record, else any. named says that the shards have the recorded
// names, or that none are recorded. The errors are ErrNoBase and those of transfer.ResolveAggregate.
func FindBase(ctx context.Context, c *client.Client, a Artifact, plan transfer.Plan) (
	base transfer.Plan, named bool, err error,
) {
	is := a.Aggregate()
	if is.IsZero() {
		return base, false, fmt.Errorf("%s: %w", a.Reference, ErrNoBase)
	}
	want := a.Binding().Manifest.Shards
	if !plan.Subject.IsZero() {
		h := api.Held{Repository: plan.Repository, Digest: plan.Subject}
		base, err = transfer.ResolveHeld(ctx, c, is, h)
		if err == nil && called(base, want) {
			return base, true, nil
		}
	}
	if len(want) > 0 {
		plans, err := calledSo(ctx, c, is, want)
		if err != nil {
			return base, false, err
		}
		if len(plans) > 0 {
			base, err = transfer.Choose(is, plans)
			return base, true, err
		}
	}
	base, err = transfer.ResolveAggregate(ctx, c, is, "")
	return base, err == nil && called(base, want), err
}

// called says whether the shards of a base have the names that were recorded.
func called(base transfer.Plan, want []identity.Shard) bool {
	return len(want) == 0 || slices.Equal(base.Base.Shards, want)
}

// calledSo returns the bases whose shards have the names that were recorded, one of each packaging, the newest first.
func calledSo(ctx context.Context, c *client.Client, a identity.Aggregate, want []identity.Shard) ([]transfer.Plan, error) {
	type candidate struct {
		packaging identity.Digest
		held      api.Held
	}
	var all []candidate
	for page, err := range transfer.Pages(ctx, c, a) {
		if err != nil {
			return nil, fmt.Errorf("resolve base %s: %w", a, err)
		}
		for _, p := range page.Packagings {
			for _, h := range p.Manifests {
				all = append(all, candidate{p.ID, h})
			}
		}
		slices.SortStableFunc(all, func(a, b candidate) int {
			return cmp.Or(b.held.Created.Compare(a.held.Created), cmp.Compare(a.held.Repository, b.held.Repository))
		})
		all = all[:min(len(all), maxNamed)]
	}
	var plans []transfer.Plan
	found := map[identity.Digest]bool{} // packagings
	for _, x := range all {
		if found[x.packaging] {
			continue
		}
		p, err := transfer.ResolveHeld(ctx, c, a, x.held)
		if err != nil {
			return nil, err
		}
		if called(p, want) {
			found[x.packaging] = true
			plans = append(plans, p)
		}
	}
	return plans, nil
}
