package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-pull/internal/show"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/resume"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/cli/progress"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
	"github.com/kiln-registry/kiln-registry/transfer/made"
)

const findPage = 100 // artifacts asked for at a time

type findFlags struct {
	cli.Flags
	registry, repo, kind, name, since, binding string
	unbound, tree, table                       bool

	after time.Time // since, read
}

func findCommand() *cobra.Command {
	var f findFlags
	cmd := &cobra.Command{
		Use:   "find AGGREGATE|REF|DIR",
		Short: "List where a base is held, and what was made from it",
		Long: "List where a base is held, and what was made from it, in all repositories that may be seen and whatever\n" +
			"its files are called. A REF of a base, or a DIR that holds one, stands for its aggregate; a DIR with an adapter or\n" +
			"a checkpoint for the base that it was made from. A REF of an artifact lists that artifact and its base, as far as\n" +
			"they pass the filters; --tree shows what was made from it.\n\n" +
			"--table of an adapter's REF or DIR lists the runs on an adapter of its name: weak, unless the run records the\n" +
			"bytes of this one. --name and the other filters are about the evals. A run that took the best or the most of\n" +
			"several tries at an example says so under AGGREGATION: such an accuracy can't be compared with a single one.\n\n" +
			"EVIDENCE says what the link to the base rests on: document, asserted, aggregate-only or none. What lacks the\n" +
			"full manifest of its base is listed apart, as archives. A link by name only is marked as weak.",
		Example: "  kiln-pull find 127.0.0.1:5000/team/model:v1 --kind adapter --since 2026-01-01\n" +
			"  kiln-pull find ./model --tree\n  kiln-pull find ./model --table",
		Args: func(cmd *cobra.Command, args []string) error {
			if f.unbound && len(args) > 0 {
				return errors.New("--unbound takes no AGGREGATE, REF or DIR: it lists what is bound to no base")
			}
			if f.unbound {
				return nil
			}
			return cli.Args("AGGREGATE|REF|DIR")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.check(); err != nil {
				return err
			}
			return f.find(cmd.Context(), slices.Concat(args, []string{""})[0], cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f.Bind(cmd)
	cmd.Flags().StringVar(&f.registry, "registry", cli.Registry(), "the registry to ask, where a REF does not name it")
	cmd.Flags().StringVar(&f.repo, "repo", "", "only this repository")
	cmd.Flags().StringVar(&f.kind, "kind", "", "only this kind: base, adapter, checkpoint, eval, receipt or statement")
	cmd.Flags().StringVar(&f.name, "name", "", "only what calls itself so; with --table, the eval")
	cmd.Flags().StringVar(&f.since, "since", "", "only what was pushed since then, as 2026-01-31 or 2026-01-31T12:00:00Z")
	cmd.Flags().StringVar(&f.binding, "binding", "", "only this evidence: document, asserted, aggregate-only or none")
	cmd.Flags().BoolVar(&f.unbound, "unbound", false, "what names no base at all")
	cmd.Flags().BoolVar(&f.tree, "tree", false, "what was made from what, as a tree")
	cmd.Flags().BoolVar(&f.table, "table", false, "the evals of the base, or of the adapter, as a table to compare")
	return cmd
}

// check refuses flags that mean nothing.
func (f *findFlags) check() error {
	if f.kind != "" && !api.Kind(f.kind).Known() {
		return cli.Usagef("--kind %q: want base, adapter, checkpoint, eval, receipt or statement", f.kind)
	}
	switch e := api.Evidence(f.binding); e {
	case "", api.EvidenceDocument, api.EvidenceAsserted, api.EvidenceAggregateOnly, api.EvidenceNone:
	default:
		return cli.Usagef("--binding %q: want document, asserted, aggregate-only or none", f.binding)
	}
	if f.repo != "" {
		if err := api.CheckRepo(f.repo); err != nil {
			return cli.Usagef("--repo: %w", err)
		}
	}
	if f.since != "" {
		var err error
		if f.after, err = time.Parse(time.RFC3339, f.since); err != nil {
			f.after, err = time.Parse(time.DateOnly, f.since)
		}
		if err != nil {
			return cli.Usagef("--since %.40q: want a date as 2026-01-31, or a time as 2026-01-31T12:00:00Z", f.since)
		}
	}
	switch {
	case f.tree && f.table:
		return cli.Usagef("--tree and --table are two answers: give one")
	case f.unbound && (f.tree || f.table || f.binding != ""):
		return cli.Usagef("--unbound goes with --kind, --name, --repo and --since alone")
	case f.table && f.kind != "" && f.kind != string(api.KindEval):
		return cli.Usagef("--table is of evals alone")
	}
	return nil
}

// filters says whether there are any.
func (f *findFlags) filters() bool { return f.kind+f.name+f.since+f.binding+f.repo != "" }

// subject is what find is asked about.
type subject struct {
	registry  string
	aggregate identity.Aggregate // zero: not recorded
	made      *made.Artifact     // nil: it is a base
	plan      transfer.Plan      // zero: it was not given as a REF
}

// isMade says whether it was given as a REF of something that was made from a base.
func (s subject) isMade() bool { return !s.plan.Manifest.IsZero() && s.plan.Kind != api.KindBase }

func (f *findFlags) find(ctx context.Context, arg string, stdout, stderr io.Writer) error {
	s, err := f.subject(ctx, arg, stderr)
	if err != nil {
		return err
	}
	c, err := f.Client(s.registry, f.note(stderr))
	if err != nil {
		return err
	}
	defer c.Close()
	switch {
	case f.tree && s.isMade() && f.filters():
		err = cli.Hint(cli.Usagef("--tree of an artifact is its whole lineage, without filters"),
			"filters go with the tree of a base: name the base")
	case f.tree:
		err = f.writeTree(ctx, c, s, stdout)
	case f.table:
		err = f.writeTable(ctx, c, s, stdout)
	default:
		err = f.writeRows(ctx, c, s, stdout)
	}
	if err != nil {
		return err
	}
	return f.footer(stdout, stderr)
}

func (f *findFlags) note(stderr io.Writer) func(string) {
	return func(s string) {
		if !f.Quiet {
			fmt.Fprintln(stderr, client.Line(s))
		}
	}
}

// footer ends every answer with what it does not prove.
func (f *findFlags) footer(stdout, stderr io.Writer) error {
	if f.JSON {
		return json.NewEncoder(stdout).Encode(struct {
			Event     string   `json:"event"` // found
			NotProven []string `json:"not_proven"`
		}{"found", api.NotProven})
	}
	_, err := fmt.Fprintf(stderr, "not proven: %s\n", resume.NotProven)
	return err
}

// subject finds out what an argument stands for.
func (f *findFlags) subject(ctx context.Context, arg string, stderr io.Writer) (s subject, err error) {
	s.registry = f.registry
	if f.unbound {
		return s, nil
	}
	a, is, err := transfer.ParseAggregate(arg)
	if is {
		s.aggregate = a
		return s, err
	}
	fi, err := os.Stat(arg)
	if err == nil && fi.IsDir() {
		return s, f.folder(ctx, &s, arg, stderr)
	}
	if err == nil {
		err := cli.Usagef("%.200q is a file; find takes an aggregate, a reference or a folder", arg)
		return s, cli.Hint(err, "a reference says where it was pushed to; check-eval says whether an eval used a base")
	}
	ref, err := client.ParseReference(arg)
	if err != nil {
		err = cli.Usagef("%.200q is no aggregate, no folder and no reference", arg)
		return s, cli.Hint(err, "kiln-push identify DIR prints the aggregate of a folder")
	}
	s.registry = ref.Host
	return s, f.reference(ctx, &s, ref, stderr)
}

// folder finds out which base a folder holds, or was made from.
func (f *findFlags) folder(ctx context.Context, s *subject, dir string, stderr io.Writer) error {
	show := progress.New(cli.Flags{Quiet: f.Quiet || f.JSON}, io.Discard, stderr)
	defer show.Close()
	if kind := folder.KindOf(dir); kind != "" && kind != api.KindBase {
		a, err := made.OpenPath(ctx, kind, dir, show.Watch)
		if err == nil && a.Aggregate().IsZero() {
			err = cli.Exit(cli.CodeUsage, fmt.Errorf("%s: %w", dir, made.ErrNoBase))
			err = cli.Hint(err, "kiln-push stamp DIR --base DIR|REF records it")
		}
		s.made, s.aggregate = &a, a.Aggregate()
		return err
	}
	h, err := made.OpenHere(ctx, dir, dial(&f.Flags, show), show.Watch)
	s.aggregate = h.Aggregate()
	return err
}

// reference finds out what a reference names: a base, or what was made from one.
func (f *findFlags) reference(ctx context.Context, s *subject, ref client.Reference, stderr io.Writer) error {
	c, err := f.Client(ref.Host, f.note(stderr))
	if err != nil {
		return err
	}
	defer c.Close()
	if s.plan, err = transfer.Resolve(ctx, c, ref); err != nil {
		return err
	}
	switch s.plan.Kind {
	case api.KindAdapter, api.KindCheckpoint, api.KindEval, api.KindReceipt:
		a, err := made.Read(ctx, c, s.plan)
		s.made, s.aggregate = &a, a.Aggregate()
		return err
	case api.KindStatement:
		return nil
	case "":
		err := cli.Usagef("%s is of no kind that is known: neither its artifact type nor its annotation %s says what it is, and "+
			"no base shows in its files: %v", s.plan.Reference(), api.AnnotationKind, s.plan.NoBase)
		return cli.Hint(err, "an eval is pushed with kiln-push eval, or with --artifact-type "+api.ArtifactTypeEval)
	}
	if s.aggregate = s.plan.Aggregate; s.aggregate.IsZero() {
		err = fmt.Errorf("%s: %w: %w", s.plan.Reference(), transfer.ErrNoIdentity, s.plan.NoBase)
	}
	return err
}

// wants says whether a row passes the filters. The registry was asked for such rows alone; a filter that it does not
// know is applied here.
func (f *findFlags) wants(x api.Artifact) bool {
	return (f.kind == "" || string(x.Kind) == f.kind) && (f.name == "" || x.Name == f.name) &&
		(f.binding == "" || string(x.Binding.Evidence) == f.binding) && (f.repo == "" || x.Repository == f.repo) &&
		!x.Created.Before(f.after)
}

// ofBases says whether the filters let bases through: those have neither a name nor an evidence.
func (f *findFlags) ofBases() bool {
	return (f.kind == "" || f.kind == string(api.KindBase)) && f.name == "" && f.binding == "" && !f.unbound
}

func (f *findFlags) writeRows(ctx context.Context, c *client.Client, s subject, stdout io.Writer) error {
	out := show.NewRows(stdout, s.registry, f.JSON)
	elsewhere := &transfer.ElsewhereError{Aggregate: s.aggregate, Repo: f.repo}
	archive := func() {}
	if s.isMade() {
		it, err := f.itself(ctx, c, &s)
		switch {
		case err != nil:
			return err
		case !f.wants(it):
		case show.Archive(it): // those come last
			archive = func() { out.Archives(); out.Artifact(it) }
		default:
			out.Artifact(it)
		}
	}
	if f.ofBases() && !s.aggregate.IsZero() {
		if err := f.packagings(ctx, c, s.aggregate, out, elsewhere); err != nil && !errors.Is(err, api.ErrAggregateUnknown) {
			return err
		}
	}
	if f.kind != string(api.KindBase) && !s.isMade() {
		if err := f.artifacts(ctx, c, s.aggregate, out); err != nil && !errors.Is(err, api.ErrAggregateUnknown) {
			return err
		}
	}
	archive()
	if out.Count == 0 && len(elsewhere.Repositories) > 0 {
		return elsewhere
	}
	if out.Count == 0 {
		return f.nothing(s)
	}
	return out.Flush()
}

// nothing is the error where no row passes.
func (f *findFlags) nothing(s subject) error {
	if f.unbound {
		return cli.Exit(cli.CodeNotFound, fmt.Errorf("%s: nothing without a base that may be pulled", s.registry))
	}
	if s.isMade() {
		err := cli.Exit(cli.CodeNotFound, fmt.Errorf("%s: neither it nor its base passes the filters", s.plan.Reference()))
		return cli.Hint(err, "--tree shows what was made from it; the filters go with its base too: name that")
	}
	err := cli.Exit(cli.CodeNotFound, fmt.Errorf("%s: nothing of %s that may be pulled", s.registry, s.aggregate))
	if f.filters() {
		return cli.Hint(err, "nothing passes the filters; without them there may be more")
	}
	return cli.Hint(err, unknownBase)
}

func (f *findFlags) packagings(ctx context.Context, c *client.Client, a identity.Aggregate, out *show.Rows,
	elsewhere *transfer.ElsewhereError,
) error {
	for page, err := range c.BasePages(ctx, a) {
		if err != nil {
			return err
		}
		out.Unavailable = page.UnavailableShards
		for _, p := range page.Packagings {
			for _, h := range p.Manifests {
				switch {
				case f.repo != "" && f.repo != h.Repository:
					note(elsewhere, h.Repository)
				case !h.Created.Before(f.after):
					out.Base(page.Identity, p.ID, h)
				}
			}
		}
		if err := out.Page(); err != nil {
			return err
		}
	}
	return nil
}

// note adds a repository that was not asked for and holds the base; a few of them are kept.
func note(e *transfer.ElsewhereError, repo string) {
	if !slices.Contains(e.Repositories, repo) && len(e.Repositories) <= transfer.MaxElsewhere {
		e.Repositories = append(e.Repositories, repo)
	}
}

// artifacts lists what was made from the base. Archives come last: the listing is read again for them, as it has no
// bound and is not kept.
func (f *findFlags) artifacts(ctx context.Context, c *client.Client, a identity.Aggregate, out *show.Rows) error {
	archives := 0
	for _, archive := range []bool{false, true} {
		if archive && archives == 0 {
			return nil
		}
		if archive {
			out.Archives()
		}
		for page, err := range f.pages(ctx, c, a) {
			if err != nil {
				return err
			}
			out.Unavailable = page.UnavailableShards
			for _, x := range page.Artifacts {
				switch {
				case x.Kind == api.KindBase || !f.wants(x):
				case show.Archive(x) != archive:
					archives++
				default:
					out.Artifact(x)
				}
			}
			if err := out.Page(); err != nil {
				return err
			}
		}
	}
	return nil
}

// pages yields the artifacts of a base, or those without one, that pass the filters as far as the registry knows them.
func (f *findFlags) pages(
	ctx context.Context, c *client.Client, a identity.Aggregate,
) iter.Seq2[api.ArtifactList, error] {
	return c.ArtifactPages(ctx, a, client.Filter{
		Kind: api.Kind(f.kind), Name: f.name, Since: f.after, Binding: api.Evidence(f.binding), Repo: f.repo,
	}, findPage)
}

// itself describes the artifact that a REF names, and learns its base where only the registry knows it.
func (f *findFlags) itself(ctx context.Context, c *client.Client, s *subject) (api.Artifact, error) {
	l, err := c.Lineage(ctx, s.plan.Manifest, s.plan.Repository, "", 1)
	if err == nil && s.aggregate.IsZero() && made.Disputed(l.Artifact) == "" {
		s.aggregate = l.Artifact.Binding.Aggregate
	}
	return l.Artifact, err
}

// lineage asks for what an artifact names and what names it, of that at most maxLinks.
func lineage(ctx context.Context, c *client.Client, d identity.Digest, repo string) (all api.Lineage, err error) {
	for page, err := range c.LineagePages(ctx, d, repo) {
		if err != nil {
			return all, err
		}
		if all.Artifact.Digest.IsZero() {
			all = page
		} else {
			all.Parents, all.Children = append(all.Parents, page.Parents...), append(all.Children, page.Children...)
		}
		if len(all.Children) >= maxLinks || len(all.Parents) >= maxLinks {
			break
		}
	}
	return all, nil
}

const (
	maxLinks  = 500 // to one artifact, in a tree
	maxInTree = 500 // artifacts of a base, in a tree
)

func (f *findFlags) writeTree(ctx context.Context, c *client.Client, s subject, stdout io.Writer) (err error) {
	var t show.Tree
	links := func(ctx context.Context, repo string, d identity.Digest) (api.Lineage, error) {
		return lineage(ctx, c, d, repo)
	}
	if s.isMade() {
		t, err = show.OfArtifact(ctx, s.plan.Repository, s.plan.Manifest, links)
	} else {
		var all []api.Artifact
		var more bool
		if all, more, err = f.some(ctx, c, s.aggregate, maxInTree); err == nil {
			t, err = show.OfBase(ctx, s.aggregate, all, more, links)
		}
	}
	if err == nil && t.Artifact == nil && len(t.Uses) == 0 {
		err = f.nothing(s)
	}
	if err == nil {
		err = t.Ask(func(a identity.Aggregate) ([]identity.Digest, error) { return unavailable(ctx, c, a) })
	}
	if err != nil {
		return err
	}
	return t.Write(stdout, s.registry, f.JSON)
}

// unavailable are the shards of a base that the registry knows to be damaged or missing; none where it does not hold it.
func unavailable(ctx context.Context, c *client.Client, a identity.Aggregate) (shards []identity.Digest, err error) {
	err = c.Retry(ctx, a.String(), func() error {
		page, err := c.BasePage(ctx, a, "", 1)
		shards = page.UnavailableShards
		return err
	})
	if errors.Is(err, api.ErrAggregateUnknown) {
		return nil, nil
	}
	return shards, err
}

// some lists at most so many artifacts of a base that pass the filters; more says that there are others.
func (f *findFlags) some(ctx context.Context, c *client.Client, a identity.Aggregate, most int) (
	all []api.Artifact, more bool, err error,
) {
	for page, err := range f.pages(ctx, c, a) {
		if err != nil {
			return nil, false, err
		}
		for _, x := range page.Artifacts {
			switch {
			case !f.wants(x):
			case len(all) == most:
				return all, true, nil
			default:
				all = append(all, x)
			}
		}
	}
	return all, false, nil
}
