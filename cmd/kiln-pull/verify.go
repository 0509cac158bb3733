package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/cli/progress"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

type verifyFlags struct {
	cli.Flags
	registry, against string
	jobs              int
	client            *client.Client // of the registry that is compared with; nil: none is asked
}

func verifyCommand() *cobra.Command {
	var f verifyFlags
	cmd := &cobra.Command{
		Use:   "verify DIR",
		Short: "Hash every file of a pulled folder and say what does not match",
		Long: "Hash every file of a pulled folder and say what does not match.\n\n" +
			"Without --against the folder is compared with the record that pull left beside it, and no network is used.\n" +
			"Damage is noted in that record, so that the next pull repairs the folder, however its files look.\n" +
			"Against an AGGREGATE only the base weights are compared, whatever the files are called; no network is used\n" +
			"unless they differ. Against a REF, every file is. Against a FILE that holds a shard manifest, every shard is.",
		Args: cli.Args("DIR"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.verify(cmd.Context(), args[0], cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f.Bind(cmd)
	cmd.Flags().StringVar(&f.against, "against", "", "REF, AGGREGATE or FILE to compare with")
	cmd.Flags().StringVar(&f.registry, "registry", cli.Registry(), "where an AGGREGATE is asked for")
	cmd.Flags().IntVar(&f.jobs, "jobs", 0, "cores that hash at a time; 0: all")
	return cmd
}

// verdict is the answer, and the last line of verify --json.
type verdict struct {
	Event     string             `json:"event"` // verified
	Folder    string             `json:"folder"`
	Against   string             `json:"against"` // empty: there was nothing to compare with
	Match     bool               `json:"match"`
	Aggregate identity.Aggregate `json:"aggregate_sha256,omitzero"` // of the folder, where it was computed or matched
	Note      string             `json:"note,omitempty"`
	PartOf    int                `json:"part_of_files,omitzero"` // the folder is a partial pull; zero: it is none
	transfer.Verified
	unknown bool // which files differ
}

func (f *verifyFlags) verify(ctx context.Context, dir string, stdout, stderr io.Writer) error {
	if f.jobs < 0 || f.jobs > 64 {
		return cli.Usagef("--jobs %d: want 0 to 64", f.jobs)
	}
	target, err := staging.Target(dir)
	if err != nil {
		return err
	}
	known, err := staging.Known(target)
	if err != nil {
		return err
	}
	if _, err := os.Lstat(target); errors.Is(err, fs.ErrNotExist) {
		return absent(dir, known)
	}
	show := progress.New(f.Flags, stdout, stderr)
	v := verdict{Event: "verified", Folder: target}
	if err = f.compare(ctx, known, &v, show); err == nil {
		doubt(ctx, v, show)
	}
	show.Close()
	if err != nil {
		return err
	}
	v.partial()
	if err := v.write(stdout, f.JSON); err != nil {
		return err
	}
	switch {
	case v.Against == "":
		return cli.Hint(cli.Exit(cli.CodeNotFound, fmt.Errorf("%s: no record of a pull to compare with", dir)),
			"--against REF, AGGREGATE or FILE says what it should be")
	case !v.Match:
		return cli.Silent(cli.CodeNo)
	}
	return nil
}

// doubt has the next pull hash a folder in which damage was found, also where it looks as it did when it was pulled.
func doubt(ctx context.Context, v verdict, show *progress.Show) {
	names, err := transfer.Doubt(ctx, v.Folder, v.Findings)
	switch {
	case err != nil:
		show.Note(fmt.Sprintf("not noted in the record beside the folder: %v; pull --repair hashes it all the same", err))
	case len(names) > 0:
		show.Note("noted in the record beside the folder, so that the next pull repairs it: " +
			plural(len(names), "damaged file", "damaged files"))
	}
}

// absent is the answer for a folder that is not there.
func absent(dir string, known staging.Records) error {
	if known.Started == nil {
		return cli.Exit(cli.CodeNotFound, fmt.Errorf("%s: no such folder", dir))
	}
	var size int64
	for _, x := range known.Started.Files {
		size += x.Size
	}
	return cli.Hint(
		cli.Exit(cli.CodeNo, fmt.Errorf("%s: incomplete: a pull began and did not end; %d of %d bytes are here", dir,
			known.Received, size)),
		"run the pull again; it goes on from there")
}

// compare fills in the verdict.
func (f *verifyFlags) compare(ctx context.Context, known staging.Records, v *verdict, show *progress.Show) error {
	switch {
	case f.against == "" && known.Complete != nil:
		return f.record(ctx, *known.Complete, "record", v, show)
	case f.against == "" && known.Started != nil:
		v.Note = "a pull began and did not end"
		return f.record(ctx, *known.Started, "record of a pull that did not end", v, show)
	case f.against == "":
		v.Note = "nothing to compare with"
		return f.sum(ctx, v, show)
	}
	if m, err := manifestFile(f.against); err != nil || m != nil {
		if err != nil {
			return cli.Exit(cli.CodeBadInput, err)
		}
		return f.manifest(ctx, *m, v, show)
	}
	s, err := parseSource(f.against, f.registry, "")
	if err != nil {
		return err
	}
	if !s.aggregate.IsZero() {
		return f.aggregate(ctx, s, known, v, show)
	}
	c, err := f.Client(s.host, show.Note)
	if err != nil {
		return err
	}
	defer c.Close()
	plan, err := s.resolve(ctx, c, show.Note)
	if err != nil {
		return err
	}
	f.client = c
	return f.record(ctx, plan.Record, "", v, show)
}

// record compares every file.
func (f *verifyFlags) record(ctx context.Context, r staging.Record, kind string, v *verdict, show *progress.Show) (
	err error,
) {
	plan := transfer.Plan{Record: r}
	v.Against = strings.TrimSpace(kind + " " + plan.Reference())
	v.Verified, err = transfer.Verify(ctx, v.Folder, r.Files, f.options(ctx, v, true, show))
	if v.Match = len(v.Findings) == 0; v.Match {
		v.Aggregate = r.Aggregate
	}
	return err
}

func (f *verifyFlags) options(ctx context.Context, v *verdict, extra bool, show *progress.Show) transfer.VerifyOptions {
	return transfer.VerifyOptions{Jobs: f.jobs, Extra: extra, Watch: show.Watch, Midstates: func(x staging.File) *lanes.States {
		if s := staging.Midstates(v.Folder, x); s != nil || f.client == nil {
			return s
		}
		return transfer.Midstates(ctx, f.client, x)
	}}
}

// manifest compares every shard.
func (f *verifyFlags) manifest(ctx context.Context, m identity.Manifest, v *verdict, show *progress.Show) (err error) {
	v.Against = "shard manifest " + f.against
	v.Note = "only the shards were compared"
	v.Verified, err = transfer.Verify(ctx, v.Folder, filesOf(m), f.options(ctx, v, false, show))
	if v.Match = len(v.Findings) == 0; v.Match {
		v.Aggregate = m.Aggregate
	}
	return err
}

func filesOf(m identity.Manifest) (files []staging.File) {
	for _, s := range m.Shards {
		files = append(files, staging.File{Name: s.Filename, Size: int64(s.Size), Digest: s.Digest})
	}
	return files
}

// manifestFile reads a shard manifest, if the argument names a file.
func manifestFile(path string) (*identity.Manifest, error) {
	if fi, err := os.Stat(path); err != nil || !fi.Mode().IsRegular() {
		return nil, nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	m, err := identity.Parse(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return &m, nil
}

// sum finds out what base the folder is, whatever its files are called.
func (f *verifyFlags) sum(ctx context.Context, v *verdict, show *progress.Show) error {
	m, err := sum(ctx, v.Folder, show)
	if err != nil {
		return err
	}
	v.Aggregate, v.Files, v.Bytes = m.Aggregate, len(m.Shards), int64(m.TotalSize)
	return nil
}

func sum(ctx context.Context, dir string, show *progress.Show) (identity.Manifest, error) {
	in, err := folder.Open(dir, folder.Options{AnyDType: true})
	if err != nil {
		return identity.Manifest{}, err
	}
	for _, s := range in.Shards {
		show.Watch(transfer.Event{Step: transfer.Planned, Phase: transfer.PhaseVerify, File: s.Name, Total: s.Size})
	}
	got, err := in.Sum(ctx, func(s folder.File, done int64) {
		show.Watch(transfer.Event{Step: transfer.Moved, Phase: transfer.PhaseVerify, File: s.Name, Bytes: done, Total: s.Size})
	})
	return got.Manifest, err
}

// aggregate compares the base weights as a whole and, where they differ, says in what if that can be had. A folder
// whose shards are refused is not that base either.
func (f *verifyFlags) aggregate(ctx context.Context, s source, known staging.Records, v *verdict, show *progress.Show) error {
	v.Against = "base " + s.aggregate.String()
	m, err := sum(ctx, v.Folder, show)
	var rule *safetensors.Error
	if err != nil && !errors.As(err, &rule) {
		return err
	}
	v.Aggregate = m.Aggregate
	if v.Match = rule == nil && m.Aggregate == s.aggregate; v.Match {
		v.Files, v.Bytes = len(m.Shards), int64(m.TotalSize)
		v.Note = "the base weights are the same; other files were not compared"
		return nil
	}
	want, err := f.shardsOf(ctx, s, known)
	switch {
	case err != nil:
		v.unknown = true
		v.Note = "which files differ is not known: " + err.Error()
	case rule == nil:
		v.Verified = between(m, want)
	default:
		if v.Verified, err = transfer.Verify(ctx, v.Folder, filesOf(want), f.options(ctx, v, false, show)); err != nil {
			return err
		}
	}
	if rule != nil && len(v.Findings) == 0 {
		v.refused(rule)
	}
	return nil
}

// partial refuses a folder that is a part of what was pulled, whatever it was compared with.
func (v *verdict) partial() {
	var part *folder.PartialError
	if !errors.As(folder.CheckPartial(v.Folder), &part) {
		return
	}
	v.PartOf, v.Match, v.Aggregate = part.Record.PartOf, false, identity.Aggregate{}
	v.Note = folder.Part(part.Record) + "; it is no base, whatever matches"
}

// refused adds what a rule says of the folder.
func (v *verdict) refused(rule *safetensors.Error) {
	if rule.File != "" {
		v.Findings = append(v.Findings, transfer.Finding{Name: rule.File, Code: transfer.FindingCode(rule.Code)})
	}
	v.Note = strings.TrimPrefix(v.Note+"; "+rule.Error(), "; ")
}

// shardsOf returns the shards of the base that is wanted: from the record of the pull, else from the registry.
func (f *verifyFlags) shardsOf(ctx context.Context, s source, known staging.Records) (identity.Manifest, error) {
	for _, r := range []*staging.Record{known.Complete, known.Started} {
		if r == nil || r.Aggregate != s.aggregate {
			continue
		}
		var shards []identity.Shard
		for _, x := range r.Files {
			if strings.HasSuffix(x.Name, identity.Extension) && !strings.Contains(x.Name, "/") {
				shards = append(shards, identity.Shard{Filename: x.Name, Size: uint64(x.Size), Digest: x.Digest})
			}
		}
		if m, err := identity.New(shards); err == nil && m.Aggregate == s.aggregate {
			return m, nil
		}
	}
	c, err := f.Client(s.host, nil)
	if err != nil {
		return identity.Manifest{}, err
	}
	defer c.Close()
	return c.BaseManifest(ctx, s.aggregate)
}

// between names the shards in which a folder with the shards got differs from want, whatever they are called.
func between(got, want identity.Manifest) (v transfer.Verified) {
	d := identity.Compare(got, want)
	v.Files, v.Bytes = len(got.Shards)-len(d.OnlyA), int64(got.TotalSize)
	extra := map[string]identity.Shard{}
	for _, s := range d.OnlyA {
		extra[s.Filename] = s
		v.Bytes -= int64(s.Size)
	}
	for _, w := range d.OnlyB {
		s, there := extra[w.Filename]
		delete(extra, w.Filename)
		x := transfer.Finding{Name: w.Filename, Code: transfer.FileMismatch, WantSize: int64(w.Size), GotSize: int64(s.Size),
			Want: w.Digest, Got: s.Digest}
		switch {
		case !there:
			x.Code = transfer.FileMissing
		case s.Size < w.Size:
			x.Code = transfer.FileShort
		case s.Size > w.Size:
			x.Code = transfer.FileLong
		}
		v.Findings = append(v.Findings, x)
	}
	for _, s := range extra {
		v.Findings = append(v.Findings, transfer.Finding{Name: s.Filename, Code: transfer.FileExtra, GotSize: int64(s.Size)})
	}
	slices.SortFunc(v.Findings, func(a, b transfer.Finding) int { return cmp.Compare(a.Name, b.Name) })
	return v
}

func (v verdict) write(w io.Writer, asJSON bool) error {
	if asJSON {
		if v.Findings == nil {
			v.Findings = []transfer.Finding{}
		}
		return json.NewEncoder(w).Encode(v)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "folder\t%s\n", v.Folder)
	if v.Against != "" {
		fmt.Fprintf(t, "against\t%s\n", v.Against)
	}
	if !v.Aggregate.IsZero() {
		fmt.Fprintf(t, "aggregate\t%s\n", v.Aggregate)
	}
	switch {
	case v.Against == "":
		fmt.Fprintf(t, "shards\t%d, %s\n", v.Files, cli.Bytes(v.Bytes))
	case v.Match:
		fmt.Fprintf(t, "state\tverified at %s: %s, %s\n", time.Now().UTC().Format(time.RFC3339), files(v.Files), cli.Bytes(v.Bytes))
	case v.unknown:
		fmt.Fprintf(t, "state\tdiffers\n")
	case v.PartOf > 0 && len(v.Findings) == 0:
		fmt.Fprintf(t, "state\tpartial: %s, %s\n", plural(v.Files, "file matches", "files match"), cli.Bytes(v.Bytes))
	default:
		fmt.Fprintf(t, "state\tdiffers: %s, %s\n", plural(v.Files, "file matches", "files match"),
			plural(len(v.Findings), "does not", "do not"))
	}
	if v.Note != "" {
		fmt.Fprintf(t, "note\t%s\n", v.Note)
	}
	for _, x := range v.Findings {
		fmt.Fprintf(t, "differs\t%s\n", x)
	}
	return t.Flush()
}

func files(n int) string { return plural(n, "file", "files") }

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
