package answers

import (
	"context"
	"errors"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/classify"
)

// Evals yields a row for each run of each eval that used a base. It holds one eval in memory at a time. Rows come
// repository after repository, newest first in each; an error ends them.
func (d *Desk) Evals(
	ctx context.Context, c access.Caller, a identity.Aggregate, yield func(api.EvalRow) error,
) error {
	if err := c.CheckAnywhere(access.Pull); err != nil {
		return err
	}
	v := d.view(ctx, c)
	own, err := d.BaseManifest(ctx, c, a, "", identity.Digest{})
	if err != nil && !errors.Is(err, api.ErrAggregateUnknown) && !errors.Is(err, index.ErrNotFound) {
		return err
	}
	q := index.Query{Aggregate: a, Kind: api.KindEval, See: c.Sees, Next: c.Next}
	for rec, err := range d.Index.Find(ctx, q) {
		if err != nil {
			return err
		}
		if err := v.eval(rec, a, own, yield); err != nil {
			return err
		}
	}
	return nil
}

// eval yields the rows of one eval.
func (v *view) eval(
	rec index.Record, a identity.Aggregate, own identity.Manifest, yield func(api.EvalRow) error,
) error {
	row := api.EvalRow{Repository: rec.Repo, Digest: rec.Digest, Name: rec.Name, NotProven: api.NotProven,
		Binding: api.Binding{Aggregate: a, Evidence: rec.Evidence}}
	if !rec.BoundBy.IsZero() {
		row.Binding.Source = "statement " + rec.BoundBy.String()
	}
	var err error
	if row.Binding.Held, err = v.holds(a); err != nil {
		return err
	}
	f, err := facts(rec)
	if err != nil {
		return err
	}
	row.Legacy = f.Legacy
	var runs []api.EvalRun
	if e := f.Eval; e != nil {
		row.State, row.Rows, runs = e.State, e.Rows, e.Runs
	}
	if len(own.Shards) > 0 {
		row.Manifest = &own
	}
	if rec.Evidence == api.EvidenceDocument {
		said, all, err := v.evalDocument(rec)
		switch {
		case errors.Is(err, index.ErrNotFound): // deleted meanwhile
			return nil
		case unreadable(err):
			row.Unavailable = true
		case err != nil:
			return err
		default:
			row.Manifest, runs = &said, all
		}
	}
	if len(runs) == 0 {
		return yield(row)
	}
	for i := range runs {
		row.Run = &runs[i]
		if err := yield(row); err != nil {
			return err
		}
	}
	return nil
}

// unreadable says whether a document can't be read any more: its blob is gone or damaged, or it was taken by other
// rules. What was found of it then is in the facts.
func unreadable(err error) bool {
	return errors.Is(err, blobstore.ErrNotFound) || errors.Is(err, blobstore.ErrDamaged) ||
		errors.Is(err, classify.ErrDamaged) || errors.Is(err, api.ErrManifestInvalid)
}

// evalDocument reads the manifest that an eval holds, and all its runs.
func (v *view) evalDocument(rec index.Record) (identity.Manifest, []api.EvalRun, error) {
	docs, release, err := v.read(rec)
	defer release()
	if err != nil {
		return identity.Manifest{}, nil, err
	}
	if docs.Eval == nil {
		return docs.Shards(), nil, nil
	}
	return docs.Shards(), classify.Runs(*docs.Eval), nil
}

// read reads the documents of a record again. release is to be called when they are not needed any more, also after an
// error. ErrNotFound of package index if the manifest is gone.
func (v *view) read(rec index.Record) (docs classify.Documents, release func(), err error) {
	release = func() {}
	_, body, err := v.Index.Manifest(v.ctx, rec.Repo, rec.Digest.String())
	if err != nil {
		return docs, release, err
	}
	m, err := classify.ParseTaken(rec.MediaType, body)
	if err != nil {
		return docs, release, err
	}
	release = v.Admit(m.TextSize())
	docs, err = classify.Read(v.ctx, v.Blobs, m)
	return docs, release, err
}
