package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-pull/internal/caching"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-pull/internal/sources"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/resume"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/cli/progress"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
	"github.com/kiln-registry/kiln-registry/transfer/made"
)

type pullFlags struct {
	cli.Flags
	registry, repo string
	options        transfer.PullOptions
	sources        sources.Flags
	cache          string   // a folder; empty: none
	only           []string // patterns of names; none: all files

	withBase, against string // of what was made from a base
	baseRepo          string // where the base of withBase is looked for; empty: anywhere
	allow             bool   // another base than that of against
	stderr            io.Writer
}

func pullCommand() *cobra.Command {
	var f pullFlags
	cmd := &cobra.Command{
		Use:   "pull REF|AGGREGATE DIR",
		Short: "Make DIR the folder of a model, or of what was made from one: whole and verified, or not at all",
		Long: "Make DIR the folder of a model, or of what was made from one: whole and verified, or not at all.\n\n" +
			"What an interrupted pull received is kept beside DIR, in .NAME.kiln, and the same command goes on from there.\n" +
			"A folder that is already that of the model is left as it is; one that was damaged since is repaired.\n\n" +
			"An adapter, checkpoint, eval or receipt is named by a REF. --with-base pulls the base that it was made from\n" +
			"too, under the file names that it recorded. --against refuses one that was made from another base,\n" +
			"with exit code 1, and one of which that can't be told, since it names no base or statements about it disagree,\n" +
			"with 2; that its base is the same by somebody's word alone is a warning. --allow-mismatch pulls all of them. A\n" +
			"checkpoint needs a DIR called *.kiln-checkpoint, and its files never share their bytes with other names.\n\n" +
			"With --cache, a file that is in the cache is linked and not received, and pulls at the same time receive it\n" +
			"once. --only pulls some files; a later pull adds to them, and one without --only completes the folder.",
		Example: "  kiln-pull pull 127.0.0.1:5000/team/model:v1 ./model\n" +
			"  kiln-pull pull 127.0.0.1:5000/team/sql:v1 ./sql --with-base ./model\n" +
			"  kiln-pull pull 127.0.0.1:5000/team/sql:v1 ./sql --against http://127.0.0.1:8420",
		Args: cli.Args("REF|AGGREGATE", "DIR"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, is, _ := transfer.ParseAggregate(args[0]); !is && f.withBase != "" {
				f.repo, f.baseRepo = "", f.repo // a REF names its own
			}
			if err := f.checkRepo(); err != nil {
				return err
			}
			s, err := parseSource(args[0], f.registry, f.repo)
			if err != nil {
				return err
			}
			return f.pull(cmd.Context(), s, args[1], cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f.Bind(cmd)
	cmd.Flags().StringVar(&f.registry, "registry", cli.Registry(), "where an AGGREGATE is asked for")
	cmd.Flags().StringVar(&f.repo, "repo", "", "the repository, or REPOSITORY:TAG or REPOSITORY@DIGEST, from which an\n"+
		"AGGREGATE, or the base of --with-base, is pulled")
	cmd.Flags().IntVar(&f.options.Jobs, "jobs", 8, "files, or parts of a file, received at a time, at most")
	f.sources.Bind(cmd)
	caching.Bind(cmd, &f.cache)
	cmd.Flags().StringArrayVar(&f.only, "only", nil,
		"PATTERN of file names, as '*.json', to pull only some files; may be repeated. What is pulled so is no base")
	cmd.Flags().BoolVar(&f.options.Replace, "replace", false,
		"replace the folder at DIR, whatever it is; its files are hashed, and those that match are used. A folder at\n"+
			"--with-base stays")
	cmd.Flags().BoolVar(&f.options.Repair, "repair", false,
		"hash the files of DIR, whatever its record says, or without one: keep those that match, replace the rest")
	cmd.Flags().StringVar(&f.withBase, "with-base", "", "DIR for the base that it was made from, which is pulled too")
	cmd.Flags().StringVar(&f.against, "against", "",
		"the base that it shall run on: DIR, FILE, REF, AGGREGATE or http://host:8420")
	cmd.Flags().BoolVar(&f.allow, "allow-mismatch", false,
		"pull it also if it was made from another base than --against, or that can't be told")
	return cmd
}

func (f *pullFlags) checkRepo() error {
	if f.baseRepo == "" {
		return nil
	}
	return cli.Exit(cli.CodeUsage, transfer.CheckPlace(f.baseRepo))
}

func (f *pullFlags) pull(ctx context.Context, s source, dir string, stdout, stderr io.Writer) error {
	if f.options.Jobs < 1 || f.options.Jobs > 64 {
		return cli.Usagef("--jobs %d: want 1 to 64", f.options.Jobs)
	}
	f.stderr = stderr
	show := progress.New(f.Flags, stdout, stderr)
	c, err := f.Client(s.host, show.Note)
	if err != nil {
		show.Close()
		return err
	}
	defer c.Close()
	closing, err := f.sources.Apply(&f.options, f.Flags, show.Note)
	defer closing()
	if err != nil {
		show.Close()
		return err
	}
	if f.options.Cache, err = caching.Open(f.cache, show.Note); err != nil {
		show.Close()
		return err
	}
	all, err := f.transfer(ctx, c, s, dir, show)
	show.Close()
	if err != nil {
		listPackagings(stderr, err)
		return err
	}
	for _, p := range all {
		if err := p.write(stdout, f.JSON); err != nil {
			return err
		}
	}
	return nil
}

// pulled is one folder that a pull has made.
type pulled struct {
	plan transfer.Plan
	done transfer.Pulled
	made *made.Artifact // what its documents say of its base; nil: it is a base, or they were not read
}

func (f *pullFlags) transfer(ctx context.Context, c *client.Client, s source, dir string, show *progress.Show) (
	all []pulled, err error,
) {
	plan, err := s.resolve(ctx, c, show.Note)
	if err != nil {
		return nil, err
	}
	from, base, err := f.prepare(ctx, c, plan, dir, show)
	if err != nil {
		return nil, err
	}
	if plan, err = f.some(plan); err != nil {
		return nil, err
	}
	done, err := f.fetch(ctx, c, plan, dir, f.options, show)
	if err == nil && plan.Kind == api.KindCheckpoint {
		err = made.CheckFolder(done.Target, done.Record)
	}
	if err != nil {
		return nil, err
	}
	all = append(all, pulled{plan, done, from})
	if base == nil {
		f.offer(ctx, c, from, dir, show)
		return all, nil
	}
	o := f.options
	o.Replace = false // which is said of DIR alone
	done, err = f.fetch(ctx, c, *base, f.withBase, o, show)
	if errors.Is(err, transfer.ErrOccupied) && f.holds(ctx, *from, show) {
		return all, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s is pulled; its base is not: %w", dir, err)
	}
	return append(all, pulled{*base, done, nil}), nil
}

// some returns the plan of the files that --only names.
func (f *pullFlags) some(plan transfer.Plan) (transfer.Plan, error) {
	switch {
	case len(f.only) == 0:
		return plan, nil
	case f.withBase != "":
		return plan, cli.Usagef("--only does not go with --with-base: pull the base by itself")
	case plan.Kind == api.KindCheckpoint:
		return plan, cli.Usagef("--only: %s is a checkpoint, which is pulled whole", plan.Reference())
	}
	part, err := plan.Only(f.only)
	if err != nil {
		err = cli.Exit(cli.CodeUsage, fmt.Errorf("--only: %w", err))
	}
	return part, err
}

func (f *pullFlags) fetch(ctx context.Context, c *client.Client, plan transfer.Plan, dir string, o transfer.PullOptions,
	show *progress.Show,
) (transfer.Pulled, error) {
	show.Note("pulling " + plan.Reference())
	o.Watch = show.Watch
	done, err := transfer.Pull(ctx, c, plan, dir, o)
	if errors.Is(err, transfer.ErrOccupied) {
		hint := "name another folder; --replace replaces what is there"
		if dir == f.withBase {
			hint = "name another folder; --replace is for " + plan.Reference() + " only where that is pulled by itself"
		}
		if !o.Repair && !errors.Is(err, transfer.ErrExtra) {
			hint += ", --repair keeps the files that match"
		}
		err = cli.Hint(err, hint)
	}
	return done, explainPlace(err)
}

// explainPlace says where a pull writes.
func explainPlace(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) && (errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS)) {
		return cli.Hint(err, "a pull stages its files beside the target, in .NAME.kiln: this user needs the right to write "+
			"in the folder that the target is in")
	}
	return err
}

// pulledJSON is the last line of pull --json.
type pulledJSON struct {
	Event     string             `json:"event"` // pulled
	Folder    string             `json:"folder"`
	Reference string             `json:"reference"`
	Kind      api.Kind           `json:"kind,omitempty"`
	Aggregate identity.Aggregate `json:"aggregate_sha256,omitzero"`
	MadeFrom  *madeFrom          `json:"made_from,omitempty"`
	Files     int                `json:"files"`
	Size      int64              `json:"size_bytes"`
	Already   bool               `json:"already_there"`
	Received  int64              `json:"received_bytes"`
	Resumed   int64              `json:"resumed_bytes"`
	Adopted   int64              `json:"adopted_bytes,omitzero"` // of files that were there and damaged
	Reused    int                `json:"reused_files"`
	Cached    int                `json:"cached_files"`
	FromCache int64              `json:"cached_bytes"`
	Copied    int64              `json:"copied_bytes"` // out of the cache; what is not copied is a link, or shares blocks
	PartOf    int                `json:"part_of_files,omitzero"`
	Verified  time.Time          `json:"verified_at"`
}

func (p pulled) write(w io.Writer, asJSON bool) error {
	plan, done := p.plan, p.done
	out := pulledJSON{
		Event: "pulled", Folder: done.Target, Reference: plan.Reference(), Kind: plan.Kind,
		Aggregate: done.Record.Aggregate, Files: len(done.Record.Files), Size: transfer.Plan{Record: done.Record}.Bytes(),
		PartOf: done.Record.PartOf, Cached: done.Cached, FromCache: done.CachedBytes, Copied: done.Copied,
		Already: done.Already, Received: done.Received, Resumed: done.Resumed,
		Adopted: done.Adopted, Reused: done.Reused, Verified: done.Record.Verified, MadeFrom: p.madeFrom(),
	}
	if asJSON {
		return json.NewEncoder(w).Encode(out)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "folder\t%s\n", client.Escape(out.Folder))
	fmt.Fprintf(t, "reference\t%s\n", out.Reference)
	switch {
	case out.MadeFrom != nil:
		fmt.Fprintf(t, "made from\t%s\n", client.Escape(out.MadeFrom.line()))
	case out.PartOf > 0:
		fmt.Fprintf(t, "aggregate\tnone: %s\n", folder.Part(done.Record))
	case out.Aggregate.IsZero():
		fmt.Fprintf(t, "aggregate\tnone: %v\n", plan.NoBase)
	default:
		fmt.Fprintf(t, "aggregate\t%s\n", out.Aggregate)
	}
	fmt.Fprintf(t, "files\t%d, %s\n", out.Files, cli.Bytes(out.Size))
	at := out.Verified.Format(time.RFC3339)
	switch {
	case out.Already:
		fmt.Fprintf(t, "state\talready there, verified at %s\n", at)
	default:
		fmt.Fprintf(t, "state\tpulled, verified at %s: %s received, %s resumed, %s reused%s\n", at,
			cli.Bytes(out.Received), cli.Bytes(out.Resumed), files(out.Reused), out.cached())
	}
	if out.MadeFrom != nil && !out.MadeFrom.Aggregate.IsZero() {
		fmt.Fprintf(t, "not proven\t%s\n", resume.NotProven)
	}
	return t.Flush()
}

// cached says what came from the cache, and how much of it, or of what came into it just now, is no link.
func (p pulledJSON) cached() string {
	if p.Cached == 0 && p.Copied == 0 {
		return ""
	}
	return fmt.Sprintf(", %s cached (%s), %s copied", files(p.Cached), cli.Bytes(p.FromCache), cli.Bytes(p.Copied))
}

// listPackagings lists the choice and what it is about, where an error asks for one.
func listPackagings(w io.Writer, err error) {
	var e *transfer.PackagingsError
	if !errors.As(err, &e) {
		return
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for i, p := range e.Plans {
		fmt.Fprintf(t, "%c\t%s\n", 'A'+i, p.Reference())
	}
	if e.More > 0 {
		fmt.Fprintf(t, "\tand %d more packagings\n", e.More)
	}
	for _, d := range e.Differences {
		fmt.Fprintf(t, "differs\t%q", d.Name)
		for i, digest := range d.Digests {
			text := "absent"
			if !digest.IsZero() {
				text = digest.Hex()[:12]
			}
			fmt.Fprintf(t, "\t%c: %s", 'A'+i, text)
		}
		fmt.Fprintln(t)
	}
	_ = t.Flush()
}
