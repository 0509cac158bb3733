package prune

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

// Abandoned says which uploads may go.
type Abandoned struct {
	OlderThan time.Duration // those that got no byte for this long
	Repos     []string      // of these repositories: globs, as in the rules of access; none: of all
	ID        string        // this one only; empty: all
	DryRun    bool          // change nothing
}

// Upload is an upload that was dropped, or would be.
type Upload struct {
	ID         string    `json:"id"`
	Repository string    `json:"repository,omitempty"` // empty: not known, as the index was made anew since it began
	Bytes      int64     `json:"bytes"`                // received; 0 of one that became a blob, which stays
	Touched    time.Time `json:"touched"`              // when it got its last byte, or began
	Seconds    int64     `json:"age_seconds"`          // since then
}

// Age is how long ago the upload got its last byte.
func (u Upload) Age() time.Duration { return time.Duration(u.Seconds) * time.Second }

// Purged counts the uploads that a purge was about.
type Purged struct {
	DryRun  bool  `json:"dry_run"`
	Found   int   `json:"found"`
	Young   int   `json:"young"`   // got a byte not long enough ago
	Busy    int   `json:"busy"`    // in use right now
	Dropped int   `json:"dropped"` // or would be
	Bytes   int64 `json:"bytes"`   // of those
}

// Query returns o in the form that the handler reads.
func (o Abandoned) Query() url.Values {
	return url.Values{
		"older-than": {o.OlderThan.String()}, "repo": o.Repos, "id": {o.ID}, "dry-run": {strconv.FormatBool(o.DryRun)},
	}
}

// parseAbandoned reads a query, in which nothing may be left out but the repositories.
func parseAbandoned(q url.Values) (o Abandoned, err error) {
	var bad error
	o.OlderThan, err = time.ParseDuration(q.Get("older-than"))
	o.DryRun, bad = strconv.ParseBool(q.Get("dry-run"))
	o.Repos, o.ID = q["repo"], q.Get("id")
	return o, errors.Join(err, bad)
}

// PurgeUploads drops uploads that nobody goes on with, and tells gone of each. One that is in use right now stays,
// whatever its age. ErrParameterInvalid for what is no glob, ErrBlobUploadUnknown if there is no upload of the ID,
// ErrNameUnknown if there is no repository, and no upload to one, of a name that is no glob, ErrUnsupported if the registry is read-only, ErrUnavailable while the index is not level with the store; what it
// returns is true also with an error.
func (p *Pruner) PurgeUploads(ctx context.Context, o Abandoned, gone func(Upload) error) (Purged, error) {
	did := Purged{DryRun: o.DryRun}
	if p.ReadOnly && !o.DryRun {
		return did, errReadOnly
	}
	repos, err := access.ParseRepositories(o.Repos)
	if err != nil {
		return did, api.Errorf(api.CodeParameterInvalid, "%v", err)
	}
	if err := p.Level(ctx); err != nil {
		return did, err
	}
	if err := p.checkNames(ctx, o.Repos); err != nil {
		return did, err
	}
	for open, err := range p.Uploads.Uploads(ctx) {
		if err != nil {
			return did, fmt.Errorf("list uploads: %w", err)
		}
		u, err := p.upload(ctx, open)
		if err != nil {
			return did, err
		}
		if o.ID != "" && o.ID != u.ID || len(o.Repos) > 0 && !repos.Match(u.Repository) {
			continue
		}
		if err := p.purge(ctx, u, o, &did, gone); err != nil {
			return did, fmt.Errorf("upload %s: %w", u.ID, err)
		}
	}
	if o.ID != "" && did.Found == 0 {
		return did, api.Errorf(api.CodeBlobUploadUnknown, "there is no upload %.80q", o.ID)
	}
	return did, nil
}

// checkNames refuses names that are no globs and of which there is neither a repository nor an upload to one.
func (p *Pruner) checkNames(ctx context.Context, repos []string) error {
	unknown := map[string]bool{}
	for _, name := range repos {
		if !strings.Contains(name, "*") {
			unknown[name] = true
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	for repo, err := range p.Index.Repos(ctx, "") {
		if err != nil {
			return err
		}
		delete(unknown, repo)
	}
	for open, err := range p.Uploads.Uploads(ctx) {
		if err != nil || len(unknown) == 0 {
			return err
		}
		u, err := p.upload(ctx, open)
		if err != nil {
			return err
		}
		delete(unknown, u.Repository)
	}
	for _, name := range repos {
		if unknown[name] {
			return api.Errorf(api.CodeNameUnknown, "there is no repository %s", name)
		}
	}
	return nil
}

func (p *Pruner) upload(ctx context.Context, open blobstore.UploadInfo) (Upload, error) {
	u := Upload{ID: open.ID, Bytes: open.Size, Touched: open.Touched}
	if !open.Blob.IsZero() { // a receipt
		u.Bytes = 0
	}
	u.Seconds = int64(max(p.Now().Sub(open.Touched), 0) / time.Second)
	known, err := p.Index.Upload(ctx, open.ID)
	if errors.Is(err, index.ErrNotFound) {
		return u, nil
	}
	u.Repository = known.Repo
	return u, err
}

func (p *Pruner) purge(ctx context.Context, u Upload, o Abandoned, did *Purged, gone func(Upload) error) error {
	did.Found++
	if p.Now().Sub(u.Touched) < o.OlderThan {
		did.Young++
		return nil
	}
	if !o.DryRun {
		err := p.Drop(ctx, u.ID)
		if errors.Is(err, blobstore.ErrUploadBusy) {
			did.Busy++
			return nil
		} else if err != nil {
			return err
		}
	}
	did.Dropped, did.Bytes = did.Dropped+1, did.Bytes+u.Bytes
	return gone(u)
}
