package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-pull/internal/show"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/transfer/made"
)

const (
	maxInTable = 10_000  // scores, which are sorted before they are shown
	maxRow     = 4 << 20 // bytes of a row of evals: a base of 4096 shards takes less
)

func (f *findFlags) writeTable(ctx context.Context, c *client.Client, s subject, stdout io.Writer) error {
	var of show.Adapter
	switch {
	case s.made != nil && s.made.Disputed != "":
		return cli.Exit(cli.CodeUsage, fmt.Errorf("%s: %w: %s", s.made.Reference, made.ErrDisputed, s.made.Disputed))
	case s.aggregate.IsZero():
		return cli.Exit(cli.CodeUsage, fmt.Errorf("%s: %w, so no evals are known for it", s.plan.Reference(), made.ErrNoBase))
	case s.made != nil && s.made.Kind != api.KindAdapter:
		return cli.Usagef("--table is of a base or an adapter; %s is %s", s.made.Reference, made.Named(s.made.Kind))
	case s.made != nil && s.made.Name == "":
		return cli.Usagef("%s has no name, so no eval can name it", s.made.Reference)
	case s.made != nil:
		of = show.Adapter{Name: s.made.Name, Weights: s.made.Weights}
	}
	f.kind = string(api.KindEval)
	var scores []show.Score
	var long []api.Artifact // evals with more runs than their facts list
	for page, err := range f.pages(ctx, c, s.aggregate) {
		if err != nil {
			return err
		}
		for _, x := range page.Artifacts {
			if !f.wants(x) {
				continue
			}
			if x.FactsOmitted {
				l, err := c.Lineage(ctx, x.Digest, x.Repository, "", 1)
				if err != nil {
					return err
				}
				x.Facts = l.Artifact.Facts
			}
			if show.OmittedOf(s.registry, x).Runs > 0 {
				long = append(long, x)
			} else {
				scores = append(scores, show.ScoresOf(s.registry, x, of)...)
			}
		}
		if len(scores)+len(long) > maxInTable {
			return tooMany()
		}
	}
	longer, omitted, err := f.longEvals(ctx, c, s, long, of, maxInTable-len(scores))
	if err != nil {
		return err
	}
	scores = append(scores, longer...)
	if len(scores)+len(omitted) == 0 {
		err := fmt.Errorf("%s: no eval of %s that may be seen has a run", s.registry, s.aggregate)
		hint := "kiln-pull find without --table lists what is there"
		if f.name+f.since+f.binding+f.repo != "" {
			hint = "no run passes the filters, which are about the evals, --name too; without them there may be more"
		}
		return cli.Hint(cli.Exit(cli.CodeNotFound, err), hint)
	}
	show.Sort(scores)
	return errors.Join(show.WriteScores(stdout, scores, f.JSON), show.WriteOmitted(stdout, omitted, f.JSON))
}

func tooMany() error {
	return cli.Hint(cli.Usagef("more than %d runs", maxInTable), "--since, --repo and --name choose among them")
}

// evalID is an eval in one repository.
type evalID struct {
	repo   string
	digest identity.Digest
}

// longEvals returns the scores of evals whose facts do not list all runs, of the adapter that is asked for: from the rows
// of the base's evals, as far as the registry lists them. omitted are those with more runs than that.
func (f *findFlags) longEvals(ctx context.Context, c *client.Client, s subject, long []api.Artifact, of show.Adapter, most int) (
	scores []show.Score, omitted []show.Omitted, err error,
) {
	if len(long) == 0 {
		return nil, nil, nil
	}
	err = c.Retry(ctx, "evals of "+s.aggregate.String(), func() (err error) {
		wanted := make(map[evalID]api.Artifact, len(long))
		for _, x := range long {
			wanted[evalID{x.Repository, x.Digest}] = x
		}
		scores, omitted, err = readLong(ctx, c, s, wanted, of, most)
		return err
	})
	return scores, omitted, err
}

// readLong reads the rows of a base's evals until those that are wanted were seen. An eval that is gone meanwhile has no
// rows.
func readLong(ctx context.Context, c *client.Client, s subject, wanted map[evalID]api.Artifact, of show.Adapter, most int) (
	scores []show.Score, omitted []show.Omitted, err error,
) {
	rows, err := c.Evals(ctx, s.aggregate)
	if err != nil {
		return nil, nil, err
	}
	defer rows.Close()
	lines := bufio.NewScanner(rows)
	lines.Buffer(nil, maxRow)
	var last evalID
	for lines.Scan() {
		var row struct {
			Repository string          `json:"repository"`
			Digest     identity.Digest `json:"digest"`
			Run        *api.EvalRun    `json:"run"`
			Omitted    int             `json:"runs_omitted"`
		}
		if err := json.Unmarshal(lines.Bytes(), &row); err != nil {
			return nil, nil, fmt.Errorf("%s: a row of its evals: %w: %w", s.registry, client.ErrNotBlob, err)
		}
		is := evalID{row.Repository, row.Digest}
		if is != last {
			delete(wanted, last) // whose rows stand together
			last = is
		}
		if len(wanted) == 0 {
			break
		}
		x, ok := wanted[is]
		if !ok {
			continue
		}
		scores = append(scores, show.RowOf(s.registry, x, row.Run, of)...)
		if row.Omitted > 0 {
			omitted = append(omitted, show.Omitted{
				Event: show.EventOmitted, Eval: show.Reference(s.registry, x.Held), Runs: row.Omitted,
			})
		}
		if len(scores)+len(omitted) > most {
			return nil, nil, tooMany()
		}
	}
	if err := lines.Err(); err != nil {
		return nil, nil, fmt.Errorf("%s: rows of its evals: %w", s.registry, err)
	}
	return scores, omitted, nil
}
