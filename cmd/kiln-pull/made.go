package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/identity/resume"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/cli/progress"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/made"
)

// prepare does all that may refuse a pull before anything is received: it reads what was made from a base and compares
// that base with the one at hand, and finds it if it is to be pulled too. base is nil if it is not.
func (f *pullFlags) prepare(
	ctx context.Context, c *client.Client, plan transfer.Plan, dir string, show *progress.Show,
) (from *made.Artifact, base *transfer.Plan, err error) {
	if err := f.checkFlags(plan, dir); err != nil {
		return nil, nil, err
	}
	switch plan.Kind {
	case api.KindAdapter, api.KindCheckpoint, api.KindReceipt, api.KindEval, api.KindStatement:
	default:
		return nil, nil, nil
	}
	if f.against == "" && f.withBase == "" && (plan.Kind == api.KindEval || plan.Kind == api.KindStatement) {
		a, err := made.Told(ctx, c, plan) // large as its one document may be, it is not read twice
		if a != nil && a.Conflict != "" {
			f.warn(show, a.Conflict)
		}
		return a, nil, err
	}
	a, err := made.Read(ctx, c, plan)
	if err != nil {
		return nil, nil, err
	}
	if a.Conflict != "" {
		f.warn(show, a.Conflict)
	}
	if f.against != "" {
		if err := f.compare(ctx, c, a, show); err != nil {
			return nil, nil, err
		}
	}
	if f.withBase == "" {
		return &a, nil, nil
	}
	found, err := f.baseOf(ctx, c, a, plan, show)
	if several := (*transfer.PackagingsError)(nil); errors.As(err, &several) && f.holds(ctx, a, show) {
		return &a, nil, nil
	}
	return &a, &found, err
}

// holds says whether the folder of --with-base is the base already, in whatever packaging, unless one was named. It is
// read for that, and left as it is.
func (f *pullFlags) holds(ctx context.Context, a made.Artifact, show *progress.Show) bool {
	if info, err := os.Stat(f.withBase); err != nil || !info.IsDir() || f.baseRepo != "" {
		return false
	}
	h, err := made.OpenHere(ctx, f.withBase, dial(&f.Flags, show), show.Watch)
	if err != nil || h.Aggregate() != a.Aggregate() {
		return false
	}
	show.Note(fmt.Sprintf("%s holds base %s already, as was read just now: it stays as it is", f.withBase, h.Aggregate()))
	if !made.Called(h.Base.Manifest, a.Binding().Manifest) {
		f.warn(show, otherNames(a))
	}
	return true
}

func otherNames(a made.Artifact) string {
	return fmt.Sprintf("no base that is held has the file names that %s recorded: the bytes are the same, but Kiln "+
		"compares the names too before it resumes exactly", a.Reference)
}

// offer says how the base is had that a pulled adapter or checkpoint was made from, unless one is at hand.
func (f *pullFlags) offer(ctx context.Context, c *client.Client, a *made.Artifact, dir string, show *progress.Show) {
	if a == nil || f.against != "" || f.withBase != "" ||
		a.Kind != api.KindAdapter && a.Kind != api.KindCheckpoint || a.Aggregate().IsZero() {
		return
	}
	if _, err := c.BasePage(ctx, a.Aggregate(), "", 1); errors.Is(err, api.ErrAggregateUnknown) {
		show.Note(fmt.Sprintf("its base is %s, of which %s holds nothing that may be pulled", a.Aggregate(), c.Host()))
		return
	}
	base := strings.TrimSuffix(filepath.Clean(dir), documents.CheckpointSuffix) + "-base"
	show.Note(fmt.Sprintf("its base is %s; to have it too: kiln-pull pull %s %s --with-base %s", a.Aggregate(), a.Reference,
		quoted(dir), quoted(base)))
}

// quoted is a path as a shell takes it.
func quoted(path string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("/._-+:@", r)
	}
	if path != "" && strings.IndexFunc(path, func(r rune) bool { return !plain(r) }) < 0 {
		return path
	}
	return "'" + strings.ReplaceAll(path, "'", `'\''`) + "'"
}

// checkFlags refuses flags that do not go with what is pulled.
func (f *pullFlags) checkFlags(plan transfer.Plan, dir string) error {
	switch k := plan.Kind; {
	case k == api.KindCheckpoint && !strings.HasSuffix(filepath.Clean(dir), documents.CheckpointSuffix):
		return cli.Hint(cli.Usagef("%s: the folder of a checkpoint is called *%s, or Kiln refuses it", dir,
			documents.CheckpointSuffix), "name it "+filepath.Clean(dir)+documents.CheckpointSuffix)
	case f.withBase == "" && f.against == "" && !f.allow:
		return nil
	case f.withBase != "" && overlap(dir, f.withBase):
		return cli.Hint(cli.Usagef("%s and --with-base %s are one folder, or one is inside the other", dir, f.withBase),
			"name two folders beside each other")
	case f.allow && f.against == "":
		return cli.Usagef("--allow-mismatch goes with --against")
	case k == api.KindAdapter, k == api.KindCheckpoint, k == api.KindReceipt, k == api.KindEval:
		return nil
	}
	return cli.Usagef("--with-base and --against go with what was made from a base; %s is %s", plan.Reference(),
		made.Named(plan.Kind))
}

// overlap says whether two folders, which need not be there, are the same or one is inside the other.
func overlap(a, b string) bool {
	a, b = settled(a), settled(b)
	within := func(in, of string) bool {
		rel, err := filepath.Rel(of, in)
		return err == nil && filepath.IsLocal(rel)
	}
	return within(a, b) || within(b, a)
}

// settled is a path without links, as far as it is there.
func settled(path string) string {
	abs, err := filepath.Abs(path)
	if err != nil {
		return path
	}
	if real, err := filepath.EvalSymlinks(abs); err == nil {
		return real
	}
	if parent := filepath.Dir(abs); parent != abs {
		return filepath.Join(settled(parent), filepath.Base(abs))
	}
	return abs
}

// compare refuses an artifact that was made from another base than the one at hand, and one of which that can't be told.
// Where nothing but somebody's word, or a bare aggregate, says that the base is the same, it warns.
func (f *pullFlags) compare(ctx context.Context, c *client.Client, a made.Artifact, show *progress.Show) error {
	h, err := made.OpenHere(ctx, f.against, dial(&f.Flags, show), show.Watch)
	if err != nil {
		return err
	}
	answer := made.Compare(a, h)
	switch {
	case answer.Verdict == resume.Yes:
		show.Note(fmt.Sprintf("it was made from the base of %s: %s", f.against, h.Aggregate()))
		return nil
	case h.Contradicts(summaryOf(ctx, c, a)):
		return f.refuse(show, cli.CodeUsage, fmt.Sprintf("%s is no base that can be told: it names the aggregate %s, but with "+
			"another count or size of shards", f.against, h.Aggregate()))
	case answer.Verdict == resume.CannotTell && a.Disputed == "" && !h.Aggregate().IsZero() && h.Aggregate() == a.Aggregate():
		f.warn(show, fmt.Sprintf("it is not proven that %s was made from the base of %s: %s", a.Reference, f.against,
			answer.Reason))
		return nil
	case answer.Verdict == resume.CannotTell:
		return f.refuse(show, cli.CodeUsage, fmt.Sprintf("it can't be told whether %s was made from the base of %s: %s",
			a.Reference, f.against, answer.Reason))
	}
	text := fmt.Sprintf("%s was made from base %s (%s: %s), and %s is base %s", a.Reference, a.Aggregate(),
		a.Binding().Evidence, a.Binding().Where(), f.against, h.Aggregate())
	hosts := []string{a.Registry, h.Registry}
	for _, line := range transfer.DerivedFrom(ctx, hosts, dial(&f.Flags, show), a.Aggregate(), h.Aggregate()).Lines() {
		text += "; " + line
	}
	return f.refuse(show, cli.CodeNo, text)
}

// refuse is the error of a pull that --against forbids, or a warning where it shall go on.
func (f *pullFlags) refuse(show *progress.Show, code int, text string) error {
	if f.allow {
		f.warn(show, text)
		return nil
	}
	hint := "--allow-mismatch pulls it all the same"
	if code == cli.CodeUsage {
		hint = "kiln-pull find REF --tree shows what is said of its base, kiln-push bind says more; " + hint
	}
	return cli.Hint(cli.Exit(code, errors.New("refused: "+text)), hint)
}

// summaryOf is that of the base an artifact names: by its own document, else as its registry holds that base; zero:
// neither.
func summaryOf(ctx context.Context, c *client.Client, a made.Artifact) identity.Summary {
	if m := a.Binding().Manifest; len(m.Shards) > 0 {
		return m.Summary()
	}
	if a.Aggregate().IsZero() {
		return identity.Summary{}
	}
	base, err := c.BasePage(ctx, a.Aggregate(), "", 1)
	if err != nil {
		return identity.Summary{}
	}
	return base.Identity
}

// warn shows a warning, also where progress is not shown.
func (f *pullFlags) warn(show *progress.Show, text string) {
	if f.Quiet && !f.JSON {
		cli.Warn(f.stderr, "%s", text)
		return
	}
	show.Note("warning: " + client.Line(text))
}

// baseOf finds the base that an artifact was made from.
func (f *pullFlags) baseOf(
	ctx context.Context, c *client.Client, a made.Artifact, plan transfer.Plan, show *progress.Show,
) (transfer.Plan, error) {
	base, names, err := made.FindBase(ctx, c, a, plan, f.baseRepo)
	switch {
	case errors.Is(err, made.ErrDisputed):
		return base, cli.Hint(cli.Exit(cli.CodeUsage, err), "say which: --with-base needs one base; delete the statement that is "+
			"wrong (by its manifest, as with oras manifest delete), or pull the base by itself")
	case errors.Is(err, made.ErrSeveral):
		return base, cli.Hint(cli.Exit(cli.CodeUsage, err), "pull it without --with-base, and each base by its aggregate")
	case errors.Is(err, made.ErrNoBase):
		return base, cli.Hint(cli.Exit(cli.CodeNotFound, err),
			"pull the base by itself; kiln-push bind says which one it is")
	case err != nil:
		return base, fmt.Errorf("the base of %s: %w", a.Reference, err)
	}
	notePassed(base, show.Note)
	switch names {
	case made.NamesRestored:
		show.Note("the shards of " + base.Reference() + " get the file names that were recorded")
	case made.NamesOther:
		f.warn(show, otherNames(a))
	}
	return base, nil
}

// madeFrom is what was pulled says of its base.
type madeFrom struct {
	Aggregate identity.Aggregate `json:"aggregate_sha256,omitzero"`
	Evidence  documents.Evidence `json:"evidence"`
	Source    string             `json:"source,omitempty"`
	Legacy    bool               `json:"legacy,omitempty"`
	Disputed  string             `json:"disputed,omitempty"` // why statements decide nothing
	Conflict  string             `json:"conflict,omitempty"` // that its subject, or a statement, names another base
	NotProven []string           `json:"not_proven"`
}

func (p pulled) madeFrom() *madeFrom {
	if p.made == nil {
		return nil
	}
	b := p.made.Binding()
	m := &madeFrom{Aggregate: b.Aggregate, Evidence: b.Evidence, Legacy: p.made.Legacy, Disputed: p.made.Disputed,
		Conflict: p.made.Conflict, NotProven: api.NotProven}
	if !b.Aggregate.IsZero() {
		m.Source = b.Where()
	}
	return m
}

func (m madeFrom) line() string {
	archive := ""
	if m.Legacy {
		archive = "; an archive"
	}
	switch {
	case m.Disputed != "":
		return "can't be told: " + m.Disputed + archive
	case m.Aggregate.IsZero():
		return "not recorded" + archive
	}
	return fmt.Sprintf("base %s (%s: %s%s)", m.Aggregate, m.Evidence, strings.TrimSpace(m.Source), archive)
}
