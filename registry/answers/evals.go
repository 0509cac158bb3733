package answers

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/classify"
)

const (
	// maxEvalPage is from how many bytes on a page of rows ends, and maxEvalTexts of documents that were read for it.
	maxEvalPage  = 2 << 20
	maxEvalTexts = 64 << 20
)

// evals is a page of the rows of evals on its way.
type evals struct {
	*view
	base  identity.Aggregate
	own   *identity.Manifest // of a base that is held; nil: none is
	most  int                // rows
	rows  int
	texts int64 // bytes of the documents that were read
	buf   []byte
}

// full says whether no other row goes on the page.
func (e *evals) full() bool { return e.rows == e.most || e.rows > 0 && len(e.buf) >= maxEvalPage }

// Evals appends a page of up to n rows to buf, one JSON object a line: a row for each run of each eval that used a
// base, up to api.MaxEvalRuns of one eval. Rows come repository after repository, newest first in each. next is the after of
// the following page, empty if there is none. One eval is in memory at a time. ErrCursor.
func (d *Desk) Evals(
	ctx context.Context, c access.Caller, a identity.Aggregate, after string, n int, buf []byte,
) (page []byte, next string, err error) {
	if err := c.CheckAnywhere(access.Pull); err != nil {
		return nil, "", err
	}
	e := &evals{view: d.view(ctx, c), base: a, most: n, buf: buf[:0]}
	own, err := d.BaseManifest(ctx, c, a, "", identity.Digest{})
	switch {
	case err == nil:
		e.own = &own
	case !errors.Is(err, api.ErrAggregateUnknown) && !errors.Is(err, index.ErrNotFound):
		return nil, "", err
	}
	at, err := parseEvalCursor(after)
	if err != nil {
		return nil, "", err
	}
	q := index.Query{Aggregate: a, Kind: api.KindEval, See: c.Sees, Next: c.Next, After: at.behind}
	for rec, err := range d.Index.Find(ctx, q) {
		if err != nil {
			return nil, "", err
		}
		from := 0
		if at.rows > 0 && at.name == evalName(rec) {
			from, at.rows = at.rows, 0
		}
		if e.full() || e.texts >= maxEvalTexts {
			return e.buf, evalCursor{behind: at.behind}.String(), nil
		}
		done, err := e.add(rec, from)
		if err != nil {
			return nil, "", err
		}
		if done > 0 {
			return e.buf, evalCursor{at.behind, done, evalName(rec)}.String(), nil
		}
		at.behind = index.Cursor(q, rec)
	}
	return e.buf, "", nil
}

// evalCursor is where a page of rows ended: behind an eval, and behind so many rows of the one that follows, if that is
// still the one of that name.
type evalCursor struct {
	behind string
	rows   int
	name   string
}

func (c evalCursor) String() string { return strconv.Itoa(c.rows) + "." + c.name + "." + c.behind }

func parseEvalCursor(s string) (c evalCursor, err error) {
	if s == "" {
		return c, nil
	}
	rows, rest, _ := strings.Cut(s, ".")
	name, behind, found := strings.Cut(rest, ".")
	n, err := strconv.ParseUint(rows, 10, 31)
	if err != nil || !found {
		return c, api.Errorf(api.CodeParameterInvalid, "after=%.80q is no cursor of this listing", s)
	}
	return evalCursor{behind, int(n), name}, nil
}

// evalName tells the evals of a cursor apart.
func evalName(rec index.Record) string {
	return identity.Sum([]byte(rec.Repo + "@" + rec.Digest.String())).Hex()[:16]
}

// add adds the rows of an eval from one on. done is how many rows of it are on this page and those before; 0: all.
func (e *evals) add(rec index.Record, from int) (done int, err error) {
	rows, err := e.of(rec)
	if err != nil {
		return 0, err
	}
	for i := from; i < len(rows); i++ {
		if e.full() {
			return i, nil
		}
		row := rows[i]
		if m := row.Manifest; m != nil && len(m.Shards) > api.MaxRowShards && i > from {
			row.Manifest, row.ManifestOmitted = nil, true
		}
		b, err := json.Marshal(row)
		if err != nil {
			return 0, err
		}
		e.buf, e.rows = append(append(e.buf, b...), '\n'), e.rows+1
	}
	return 0, nil
}

// of returns the rows of one eval.
func (e *evals) of(rec index.Record) (rows []api.EvalRow, err error) {
	row := api.EvalRow{Repository: rec.Repo, Digest: rec.Digest, Name: rec.Name, NotProven: api.NotProven, Manifest: e.own,
		Binding: api.Binding{Aggregate: e.base, Evidence: rec.Evidence}}
	if !rec.BoundBy.IsZero() {
		row.Binding.Source = "statement " + rec.BoundBy.String()
	}
	if row.Binding.Held, err = e.holds(e.base); err != nil {
		return nil, err
	}
	all, err := e.bindings(rec)
	if err != nil {
		return nil, err
	}
	if len(all) > 1 {
		row.Bindings = all
	}
	f, err := facts(rec)
	if err != nil {
		return nil, err
	}
	row.Legacy = f.Legacy
	var runs []api.EvalRun
	omitted := 0
	if x := f.Eval; x != nil {
		row.State, row.Rows, runs, omitted = x.State, x.Rows, x.Runs, x.Omitted
		for _, b := range x.Bases {
			if b.Aggregate == e.base {
				row.Rows = b.Rows
			}
		}
	}
	if rec.Evidence == api.EvidenceDocument {
		said, all, more, err := e.document(rec)
		switch {
		case errors.Is(err, index.ErrNotFound): // deleted meanwhile
			return nil, nil
		case unreadable(err):
			row.Unavailable = true
		case err != nil:
			return nil, err
		default:
			row.Manifest, runs, omitted = &said, all, more
		}
	}
	for i := range runs {
		row.Run = &runs[i]
		rows = append(rows, row)
	}
	if row.Run, row.Omitted = nil, omitted; omitted > 0 || len(rows) == 0 {
		rows = append(rows, row)
	}
	return rows, nil
}

// unreadable says whether a document can't be read any more: its blob is gone or damaged, or it was taken by other
// rules. What was found of it then is in the facts.
func unreadable(err error) bool {
	return errors.Is(err, blobstore.ErrNotFound) || errors.Is(err, blobstore.ErrDamaged) ||
		errors.Is(err, classify.ErrDamaged) || errors.Is(err, api.ErrManifestInvalid)
}

// document reads the manifest that an eval holds, and its first runs; omitted is how many others there are.
func (e *evals) document(rec index.Record) (m identity.Manifest, runs []api.EvalRun, omitted int, err error) {
	docs, release, err := e.read(rec, func(text int64) int64 {
		e.texts += text
		return text
	})
	defer release()
	if err != nil || docs.Eval == nil {
		return docs.Shards(e.base), nil, 0, err
	}
	all := classify.Runs(*docs.Eval)
	runs = slices.Clone(all[:min(len(all), api.MaxEvalRuns)])
	return docs.Shards(e.base), runs, len(all) - len(runs), nil
}

// read reads the documents of a record again. weigh says of their size as text how much memory the answer takes, as the
// size of a text, too. release is to be called when they are not needed any more, also after an error. ErrNotFound of
// package index if the manifest is gone.
func (v *view) read(rec index.Record, weigh func(text int64) int64) (
	docs classify.Documents, release func(), err error,
) {
	release = func() {}
	m, err := v.taken(rec)
	if err != nil {
		return docs, release, err
	}
	release, err = v.Admit(v.ctx, weigh(m.TextSize()))
	if err != nil {
		return docs, release, err
	}
	docs, err = classify.Read(v.ctx, v.Blobs, m)
	return docs, release, err
}

// taken reads the manifest of a record. ErrNotFound of package index if it is gone.
func (v *view) taken(rec index.Record) (classify.Manifest, error) {
	_, body, err := v.Index.Manifest(v.ctx, rec.Repo, rec.Digest.String())
	if err != nil {
		return classify.Manifest{}, err
	}
	return classify.ParseTaken(rec.MediaType, body)
}
