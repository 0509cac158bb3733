package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/answer"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/identity/resume"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/cli/progress"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/made"
)

const longCheck = "Of a REF only the documents are fetched; files are compared by the digests that the registry\n" +
	"keeps. The base is a folder, a FILE with a shard manifest, a REF, an AGGREGATE, or the address of a server, of\n" +
	"which /health is read and, where that is enabled, /v1/debug/model-state.\n\n" +
	"Exit code 0: yes; 1: no; 2: it can't be told, since something is not recorded or was not given."

// checkFlags are those of the commands that answer a question about an artifact and a base.
type checkFlags struct {
	cli.Flags
	base, provenance string
	registry, repo   string // that hold the base, where that is an aggregate; no repo: it need not be held
}

func (f *checkFlags) bind(cmd *cobra.Command) {
	f.Bind(cmd)
	cmd.Flags().StringVar(&f.base, "base", "", "the base: DIR, FILE, REF, AGGREGATE or http://host:8420")
	cmd.Flags().StringVar(&f.registry, "registry", cli.Registry(), "where an AGGREGATE with --repo is asked for")
	cmd.Flags().StringVar(&f.repo, "repo", "",
		"the repository, or REPOSITORY:TAG or REPOSITORY@DIGEST, whose AGGREGATE is meant;\nits file names then count too")
	cmd.Flags().StringVar(&f.provenance, "provenance", "",
		"FILE with the execution provenance of the server (kiln.execution-provenance.v1)")
}

func checkAdapterCommand() *cobra.Command {
	return checkCommand(api.KindAdapter, "DIR", "Say whether an adapter was trained from the bytes of a base",
		"kiln-pull check-adapter 127.0.0.1:5000/team/sql:v1 --base http://127.0.0.1:8420")
}

func checkEvalCommand() *cobra.Command {
	return checkCommand(api.KindEval, "FILE", "Say whether an eval used the bytes of a base",
		"kiln-pull check-eval 127.0.0.1:5000/team/evals:eval-1 --base ./model")
}

func checkCommand(kind api.Kind, path, short, example string) *cobra.Command {
	var f checkFlags
	name := path + "|REF"
	cmd := &cobra.Command{
		Use: fmt.Sprintf("check-%s %s --base BASE", kind, name), Short: short,
		Long: short + ".\n\nOther identities, as of tokenizer and templates, are compared where both sides record them. " +
			"They do not\nchange the answer, which is about the bytes of the weights. " +
			"Of this side the provenance is known, with --provenance\nor from a server; " +
			"POST /v1/compatibility takes the others, and the number of one run of an eval.\n\n" + longCheck,
		Example: "  " + example, Args: cli.Args(name),
		RunE: func(cmd *cobra.Command, args []string) error {
			if f.base == "" {
				return cli.Usagef("check-%s needs --base", kind)
			}
			return f.check(cmd.Context(), kind, args[0], cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f.bind(cmd)
	return cmd
}

func (f *checkFlags) check(ctx context.Context, kind api.Kind, name string, stdout, stderr io.Writer) error {
	show := f.show(stderr)
	a, h, err := f.read(ctx, kind, name, show)
	if err != nil {
		show.Close()
		return err
	}
	given := made.Compare(a, h)
	derived := f.derived(ctx, a, h, given.Verdict, show)
	show.Close()
	return writeAnswer(stdout, f.JSON, a, h, given, derived)
}

// derived asks for statements that explain why two bases differ: the registries that were named or, where none was, the
// one of this user.
func (f *checkFlags) derived(ctx context.Context, a made.Artifact, h made.Here, v resume.Verdict, show *progress.Show) (
	d transfer.Derived,
) {
	if v != resume.No {
		return d
	}
	hosts := []string{a.Registry, h.Registry}
	if a.Registry == "" && h.Registry == "" {
		hosts = []string{cli.Registry()}
	}
	return transfer.DerivedFrom(ctx, hosts, dial(&f.Flags, show), a.Aggregate(), h.Aggregate())
}

// writeDerived writes the rows of statements that explain a difference.
func writeDerived(w io.Writer, d transfer.Derived) {
	for _, line := range d.Lines() {
		fmt.Fprintf(w, "derived\tdiffers; %s\n", client.Escape(line))
	}
}

// show shows the progress of reading; stdout is for the answer alone.
func (f *checkFlags) show(stderr io.Writer) *progress.Show {
	return progress.New(cli.Flags{Quiet: f.Quiet || f.JSON}, io.Discard, stderr)
}

// dial opens clients of what a command names. A server that is no registry gets no token.
func dial(f *cli.Flags, show *progress.Show) transfer.Dial {
	return func(host string, registry bool) (*client.Client, error) {
		if registry {
			return f.Client(host, show.Note)
		}
		return f.Stranger(host, show.Note)
	}
}

// read reads the artifact, the base at hand and the provenance.
func (f *checkFlags) read(ctx context.Context, kind api.Kind, name string, show *progress.Show) (
	a made.Artifact, h made.Here, err error,
) {
	var provenance []byte
	if f.provenance != "" {
		if provenance, err = readDocument(f.provenance); err != nil {
			return a, h, fmt.Errorf("--provenance: %w", err)
		}
	}
	if a, err = made.Open(ctx, kind, name, dial(&f.Flags, show), show.Watch); err != nil {
		return a, h, err
	}
	if f.base != "" {
		if h, err = f.here(ctx, kind, show); err != nil {
			return a, h, err
		}
	}
	if err = h.Run(provenance); err != nil {
		err = fmt.Errorf("%s: %w", f.provenance, err)
	}
	return a, h, err
}

// here is the base at hand, for a question about an artifact of a kind: of a checkpoint the names of shards matter.
func (f *checkFlags) here(ctx context.Context, kind api.Kind, show *progress.Show) (made.Here, error) {
	if f.repo == "" {
		return made.OpenHere(ctx, f.base, dial(&f.Flags, show), show.Watch)
	}
	a, is, err := transfer.ParseAggregate(f.base)
	if !is {
		return made.Here{}, cli.Usagef("--repo goes with a --base that is an AGGREGATE; %.200q says itself what is meant", f.base)
	}
	if err == nil {
		err = transfer.CheckPlace(f.repo)
	}
	if err != nil {
		return made.Here{}, cli.Exit(cli.CodeUsage, err)
	}
	return made.OpenHeld(ctx, a, f.registry, f.repo, kind == api.KindCheckpoint, dial(&f.Flags, show))
}

// readDocument reads a file that a flag names.
func readDocument(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, documents.MaxDocument+1)) // one byte too many is for the reader to refuse
}

// side is the artifact or the base that an answer is about.
type side struct {
	Name      string             `json:"name"`
	Aggregate string             `json:"aggregate_sha256,omitempty"` // empty: not known
	Evidence  documents.Evidence `json:"evidence,omitempty"`
	Source    string             `json:"source,omitempty"`  // where the aggregate stands
	Checked   string             `json:"checked,omitempty"` // how files were compared with documents
	Legacy    bool               `json:"legacy,omitempty"`
	Absent    bool               `json:"no_base_identity,omitempty"` // the server says so
	Conflict  string             `json:"conflict,omitempty"`         // that its subject or a statement names another base
	Disputed  string             `json:"disputed,omitempty"`         // why statements about its base decide nothing
}

func sides(a made.Artifact, h made.Here) (artifact, base side) {
	artifact = side{Name: a.Reference, Checked: a.Checked, Legacy: a.Legacy, Evidence: a.Binding().Evidence,
		Disputed: a.Disputed, Conflict: a.Conflict}
	if is := a.Aggregate(); !is.IsZero() {
		artifact.Aggregate, artifact.Source = is.String(), a.Binding().Where()
	}
	base.Name, base.Absent = h.Name, h.Base.Absent
	if is := h.Aggregate(); !is.IsZero() {
		base.Aggregate = is.String()
	}
	return artifact, base
}

func (s side) line() string {
	switch {
	case s.Disputed != "":
		return "can't be told: " + s.Disputed
	case s.Aggregate == "" && s.Evidence != "":
		return "not recorded"
	case s.Absent:
		return "the server says that it has no base identity"
	case s.Aggregate == "":
		return "not known"
	case s.Evidence != "":
		return fmt.Sprintf("%s (%s: %s)", s.Aggregate, s.Evidence, s.Source)
	}
	return s.Aggregate
}

// head writes what an answer is about.
func head(w io.Writer, kind api.Kind, artifact, base side) {
	fmt.Fprintf(w, "%s\t%s\nmade from\t%s\n", kind, client.Escape(artifact.Name), client.Escape(artifact.line()))
	if artifact.Conflict != "" {
		fmt.Fprintf(w, "conflict\t%s\n", client.Escape(artifact.Conflict))
	}
	if base.Name != "" {
		fmt.Fprintf(w, "base\t%s: %s\n", client.Escape(base.Name), base.line())
	}
	fmt.Fprintf(w, "files\t%s\n", artifact.Checked)
}

func writeAnswer(w io.Writer, asJSON bool, a made.Artifact, h made.Here, given resume.Answer,
	derived transfer.Derived,
) error {
	artifact, base := sides(a, h)
	if asJSON {
		out := answer.Of(given)
		out.Derived, out.MoreDerived = derived.From, derived.More
		if out.Question = api.QuestionAdapter; a.Kind == api.KindEval {
			out.Question = api.QuestionEval
		}
		return ends(encode(w, out, artifact, base), given.Verdict)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "question\t%s?\nanswer\t%s\nreason\t%s\n", given.Question, spoken(given.Verdict),
		client.Escape(given.Reason))
	head(t, a.Kind, artifact, base)
	writeDerived(t, derived)
	for _, o := range given.Others {
		title := map[resume.Verdict]string{resume.Yes: "also equal", resume.No: "but differs"}[o.Verdict]
		if title == "" {
			title = "not recorded"
		}
		fmt.Fprintf(t, "%s\t%s: %s\n", title, o.Name, client.Escape(o.Reason))
	}
	fmt.Fprintf(t, "not proven\t%s\n", given.NotProven)
	return ends(t.Flush(), given.Verdict)
}

// encode writes an answer in the form in which the registry gives it, with the sides as they are known here.
func encode(w io.Writer, out api.Compatibility, artifact, base side) error {
	out.NotProven = api.NotProven
	return json.NewEncoder(w).Encode(struct {
		Event string `json:"event"` // checked
		api.Compatibility
		Artifact side `json:"artifact"`
		Base     side `json:"base"`
	}{"checked", out, artifact, base})
}

// spoken is a verdict for people.
func spoken(v resume.Verdict) string {
	if v == resume.CannotTell {
		return "cannot tell"
	}
	return string(v)
}

// ends turns a verdict into an exit code.
func ends(err error, v resume.Verdict) error {
	switch {
	case err != nil || v == resume.Yes:
		return err
	case v == resume.No:
		return cli.Silent(cli.CodeNo)
	}
	return cli.Silent(cli.CodeUsage)
}

func checkResumeCommand() *cobra.Command {
	var f checkFlags
	var request string
	cmd := &cobra.Command{
		Use:   "check-resume DIR|REF --base BASE --request FILE",
		Short: "Say whether a run can continue exactly from a checkpoint",
		Long: "Say whether a run can continue exactly from a checkpoint: the steps of Kiln's own decision in its order,\n" +
			"with the reason of each. The steps after the first failure are reported as well. Nothing of a GPU is read.\n\n" +
			"The request (kiln.resume-request.v1) says what the run wants: training kind, adapter name, effective config,\n" +
			"precision, data, optimizer, scheduler, random number streams, state files, execution provenance, auxiliary\n" +
			"state. What it leaves out can't be told. doc/api.md has all members, with an example.\n\n" + longCheck,
		Example: "  kiln-pull check-resume 127.0.0.1:5000/team/sql:step-100 --base ./model --request request.json",
		Args:    cli.Args("DIR|REF"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.resume(cmd.Context(), args[0], request, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f.bind(cmd)
	cmd.Flags().StringVar(&request, "request", "", "FILE with what the run wants (kiln.resume-request.v1)")
	return cmd
}

func (f *checkFlags) resume(ctx context.Context, name, request string, stdout, stderr io.Writer) error {
	q, err := readRequest(request)
	if err != nil {
		return err
	}
	show := f.show(stderr)
	a, h, err := f.read(ctx, api.KindCheckpoint, name, show)
	if err != nil {
		show.Close()
		listPackagings(stderr, err)
		return err
	}
	if _, is, _ := transfer.ParseAggregate(f.base); is && f.repo == "" {
		show.Note("of that base only the aggregate is known: --repo, or a REF, says whose file names are meant")
	}
	r := resume.Decide(*a.Checkpoint, q, resume.Current{
		Base: h.Base, Provenance: h.Provenance, ProvenanceDigest: h.Identities.Provenance, FilesChecked: true,
	})
	derived := f.derived(ctx, a, h, r.Verdict, show)
	show.Close()
	return writeReport(stdout, f.JSON, a, h, r, derived)
}

func readRequest(path string) (q resume.Request, err error) {
	if path == "" {
		return q, nil
	}
	b, err := readDocument(path)
	if err != nil {
		return q, fmt.Errorf("--request: %w", err)
	}
	if q, err = resume.ParseRequest(b); err != nil {
		err = fmt.Errorf("%s: %w", path, err)
	}
	return q, err
}

func writeReport(w io.Writer, asJSON bool, a made.Artifact, h made.Here, r resume.Report, derived transfer.Derived) error {
	artifact, base := sides(a, h)
	if asJSON {
		out := answer.OfReport(r)
		out.Derived, out.MoreDerived = derived.From, derived.More
		out.Evidence = api.Evidence(artifact.Evidence)
		return ends(encode(w, out, artifact, base), r.Verdict)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "question\tcan a run continue exactly from this checkpoint?\nanswer\t%s\n", spoken(r.Verdict))
	if r.FirstFailure != "" {
		fmt.Fprintf(t, "fails at\t%s\n", r.FirstFailure)
	}
	head(t, a.Kind, artifact, base)
	writeDerived(t, derived)
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(t, "\nSTEP\tCOMPARES\tANSWER\tREASON")
	for _, s := range r.Steps {
		fmt.Fprintf(t, "%d\t%s\t%s\t%s\n", s.Number, s.Name, spoken(s.Verdict), client.Escape(s.Reason))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	for _, note := range []struct{ title, text string }{
		{"archive", r.Archival}, {"renamed", r.Renamed}, {"not proven", r.NotProven},
	} {
		if note.text != "" {
			fmt.Fprintf(t, "%s\t%s\n", note.title, client.Escape(note.text))
		}
	}
	return ends(t.Flush(), r.Verdict)
}
