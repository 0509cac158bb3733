package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/cli/progress"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/artifact"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

// about says what a command pushes, for its help.
type about struct {
	kind                        api.Kind
	path, short, long, examples string
}

var artifacts = []about{
	{
		api.KindAdapter, "DIR", "Push an adapter",
		"Push a LoRA adapter: with the adapter_manifest.json that Kiln writes, or as PEFT saves it. Its base is the one\n" +
			"in its documents, or the one that --base names. A name in adapter_config.json binds nothing.",
		"kiln-push adapter out/sql 127.0.0.1:5000/team/sql:v1 --base 127.0.0.1:5000/team/model:v1",
	},
	{
		api.KindCheckpoint, "DIR", "Push a training checkpoint",
		"Push a training checkpoint: a folder NAME.kiln-checkpoint with exactly the files that its\n" +
			"checkpoint_manifest.json lists. Links, and files with a second name, are refused, as Kiln refuses them.",
		"kiln-push checkpoint out/sql-step-00000100.kiln-checkpoint 127.0.0.1:5000/team/sql:step-100",
	},
	{
		api.KindEval, "FILE", "Push an eval",
		"Push an eval: an archived job or a result (*.json), or exported outcome rows (*.jsonl).",
		"kiln-push eval jobs/eval-1.json 127.0.0.1:5000/team/evals:eval-1",
	},
	{
		api.KindReceipt, "FILE", "Push a training receipt",
		"Push a training receipt by itself. One that belongs to an adapter goes along with that.",
		"kiln-push receipt out/sql/train_receipt.json 127.0.0.1:5000/team/receipts:sql",
	},
}

const longChecks = "Every digest in the documents, and that all mean one base, is checked before a byte is sent."

func artifactCommand(is about) *cobra.Command {
	var flags cli.Flags
	var base string
	var legacy, follow bool
	cmd := &cobra.Command{
		Use: fmt.Sprintf("%s %s REF", is.kind, is.path), Short: is.short, Long: is.long + "\n" + longChecks,
		Example: "  " + is.examples, Args: cli.Args(is.path, "REF"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ref, err := target(args[1])
			if err != nil {
				return err
			}
			o := artifact.Options{Legacy: legacy, FollowLinks: follow}
			return pushing(cmd, &flags, ref.Host, func(show *progress.Show, c *client.Client) (artifact.Pushed, error) {
				a, err := readArtifact(cmd, &flags, c, is.kind, args[0], base, o, show)
				if err != nil {
					return artifact.Pushed{}, err
				}
				return a.Push(cmd.Context(), c, ref, show.Watch)
			})
		},
	}
	flags.Bind(cmd)
	cmd.Flags().StringVar(&base, "base", "", "the base that it was made from: REF or its aggregate")
	cmd.Flags().BoolVar(&legacy, "legacy", false, "push a Kiln record without the full manifest of its base, as archive")
	if is.kind != api.KindCheckpoint {
		cmd.Flags().BoolVar(&follow, "follow-links", false, "read the files behind links, as in a Hugging Face cache")
	}
	return cmd
}

// readArtifact reads what is at path, with the base that --base names, and shows its warnings.
func readArtifact(cmd *cobra.Command, flags *cli.Flags, c *client.Client, kind api.Kind, path, base string,
	o artifact.Options, show *progress.Show,
) (a *artifact.Artifact, err error) {
	if base != "" {
		if o.Base, err = artifact.FindBase(cmd.Context(), base, dialer(flags, show)); err == nil {
			err = o.Base.Check(cmd.Context(), c)
		}
		if err != nil {
			return nil, err
		}
	}
	o.Watch = show.Watch
	if a, err = artifact.Read(cmd.Context(), kind, path, o); err != nil {
		return nil, err
	}
	warnAll(cmd.ErrOrStderr(), a.Warnings)
	return a, nil
}

// warnAll shows the warnings about an artifact, one line each.
func warnAll(stderr io.Writer, warnings []artifact.Warning) {
	for _, w := range warnings {
		cli.Warn(stderr, "%s (%s)", w.Message, w.Code)
	}
}

// target reads the REF that something is pushed to.
func target(s string) (client.Reference, error) {
	ref, err := client.ParseReference(s)
	if err == nil && !ref.Digest.IsZero() {
		err = errors.New("a push can't choose its digest; leave out @sha256:…")
	}
	return ref, cli.Exit(cli.CodeUsage, err)
}

// pushing runs what sends an artifact to the registry at host, and prints what it has made.
func pushing(cmd *cobra.Command, flags *cli.Flags, host string,
	push func(show *progress.Show, c *client.Client) (artifact.Pushed, error),
) error {
	show := progress.New(*flags, cmd.OutOrStdout(), cmd.ErrOrStderr())
	c, err := flags.Client(host, show.Note)
	if err != nil {
		return err
	}
	defer c.Close()
	p, err := push(show, c)
	if err != nil {
		show.Abandon()
		return explainPush(explainArtifact(err))
	}
	show.Close()
	return printArtifact(cmd.OutOrStdout(), p, flags.JSON)
}

// dialer opens clients of the registries that a command names.
func dialer(flags *cli.Flags, show *progress.Show) transfer.Dial {
	return func(host string, named bool) (*client.Client, error) {
		if named {
			return flags.Client(host, show.Note)
		}
		return flags.Stranger(host, show.Note)
	}
}

// explainArtifact gives the errors of artifacts their exit codes and hints.
func explainArtifact(err error) error {
	var refused *artifact.Error
	var odd *transfer.AggregateError
	var path *fs.PathError
	var rule *safetensors.Error
	var manifest *identity.Error
	switch {
	case errors.As(err, &refused):
		code := cli.CodeBadInput
		switch refused.Code {
		case artifact.CodePath, artifact.CodeManifest, artifact.CodeOtherName:
			code = cli.CodeUsage
		}
		err = cli.Exit(code, err)
		if refused.Hint != "" {
			err = cli.Hint(err, refused.Hint)
		}
		return err
	case errors.As(err, &odd):
		return cli.Hint(cli.Exit(cli.CodeUsage, err), odd.Hint())
	case errors.Is(err, folder.ErrChanged):
		return cli.Hint(cli.Exit(cli.CodeBadInput, err), "let whatever writes there finish, then run it again")
	case errors.As(err, &rule) && rule.Code == safetensors.CodeNoShards:
		return cli.Hint(err, noShards)
	case errors.As(err, &rule) && rule.Code == safetensors.CodeSymlink:
		return cli.Hint(err, followLinks)
	case errors.As(err, &manifest):
		return cli.Hint(err, manifestFile)
	case errors.Is(err, transfer.ErrNoTag):
		return cli.Hint(cli.Exit(cli.CodeUsage, err), "write it as host/repository:tag or host/repository@sha256:…")
	case errors.Is(err, api.ErrAggregateUnknown):
		return cli.Hint(err, "name the folder or the reference of the base; --registry says where an aggregate is known")
	case !errors.As(err, &path):
	case errors.Is(err, syscall.ELOOP):
		return cli.Hint(cli.Exit(cli.CodeBadInput, err), "name the file itself, not a link to it")
	case errors.Is(err, syscall.EISDIR):
		return cli.Hint(err, "name the file, not the folder that it is in")
	case errors.Is(err, syscall.ENOTDIR):
		return cli.Hint(err, "name the folder that the file is in")
	}
	return explainPath(err)
}

// printArtifact prints what a push has made.
func printArtifact(stdout io.Writer, p artifact.Pushed, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(stdout).Encode(struct {
			Event string `json:"event"`
			artifact.Pushed
		}{"pushed", p})
	}
	counts := ""
	if p.Counts != "" {
		counts = "counts    " + client.Escape(p.Counts) + "\n"
	}
	_, err := fmt.Fprintf(stdout, "base      %s\n%sdigest    %s\nreference %s\n", claimed(p), counts, p.Digest, p.Reference)
	return err
}

// claimed says what an artifact is bound to, by what, and whether the registry holds that.
func claimed(p artifact.Pushed) string {
	archive := ""
	if p.Legacy {
		archive = "; kept as an archive"
	}
	switch {
	case p.Base.Evidence == documents.EvidenceNone && p.Base.Note != "":
		return "not recorded (" + p.Base.Note + archive + ")"
	case p.Base.Evidence == documents.EvidenceNone:
		return "not recorded" + archive
	}
	if p.Base.Note != "" {
		archive += "; " + p.Base.Note
	}
	held := ""
	switch h := p.Base.Held; {
	case h != nil && *h:
		held = "; held"
	case h != nil:
		held = "; not held there"
	}
	return fmt.Sprintf("%s (%s: %s%s%s)", p.Base.Aggregate, p.Base.Evidence, p.Base.Source, archive, held)
}
