package main

import (
	"context"
	"errors"
	"fmt"
	"os/user"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/cli/progress"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/artifact"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

// words are the flags of a statement.
type words struct{ by, reason string }

func (w *words) bind(cmd *cobra.Command, reason string) {
	cmd.Flags().StringVar(&w.by, "by", "", "who says so (the user that runs the command)")
	cmd.Flags().StringVar(&w.reason, "reason", "", reason)
}

// said completes the words of a statement: made now, by the user that runs the command where nobody else was named.
func (w words) said() (artifact.Words, error) {
	if w.by == "" {
		u, err := user.Current()
		if err != nil || u.Username == "" {
			return artifact.Words{}, cli.Usagef("who says so is not known: give --by NAME")
		}
		w.by = u.Username
	}
	return artifact.Words{By: w.by, Reason: w.reason, At: time.Now().UTC().Format(time.RFC3339)}, nil
}

func bindCommand() *cobra.Command {
	var flags cli.Flags
	var w words
	var base, registry, repo string
	cmd := &cobra.Command{
		Use:   "bind DIGEST|REF --base AGGREGATE|REF --reason TEXT",
		Short: "Say which base an artifact was made from",
		Long: "Say which base an artifact was made from, after it was pushed. The artifact stays as it is: a statement\n" +
			"is put beside it, with who says so, when and why.",
		Example: "  kiln-push bind 127.0.0.1:5000/team/sql:v1 --base 127.0.0.1:5000/team/model:v1 --reason 'see run 42'",
		Args:    cli.Args("DIGEST|REF"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if base == "" || w.reason == "" {
				return cli.Usagef("bind needs --base AGGREGATE|REF and --reason TEXT")
			}
			ref, err := bound(args[0], registry, repo)
			if err != nil {
				return cli.Exit(cli.CodeUsage, err)
			}
			said, err := w.said()
			if err != nil {
				return err
			}
			return pushing(cmd, &flags, ref.Host, func(show *progress.Show, c *client.Client) (artifact.Pushed, error) {
				a, err := binding(cmd.Context(), c, ref, base, dialer(&flags, show), said)
				if err != nil {
					return artifact.Pushed{}, err
				}
				return a.Push(cmd.Context(), c, client.Reference{Host: ref.Host, Repo: ref.Repo}, show.Watch)
			})
		},
	}
	flags.Bind(cmd)
	w.bind(cmd, "why: a run, a log, a person")
	cmd.Flags().StringVar(&base, "base", "", "the base: REF or its aggregate")
	cmd.Flags().StringVar(&registry, "registry", cli.Registry(), "where a DIGEST is")
	cmd.Flags().StringVar(&repo, "repo", "", "repository that a DIGEST is in")
	return cmd
}

// binding makes the statement that what ref names was made from base.
func binding(ctx context.Context, c *client.Client, ref client.Reference, base string, dial transfer.Dial,
	said artifact.Words,
) (*artifact.Artifact, error) {
	b, err := artifact.FindBase(ctx, base, dial)
	if err != nil {
		return nil, err
	}
	f, err := artifact.FindManifest(ctx, c, ref)
	if err != nil {
		return nil, err
	}
	return artifact.Bind(f, b, said)
}

// bound is the reference of the artifact that a statement is about.
func bound(s, registry, repo string) (ref client.Reference, err error) {
	d, err := identity.ParseDigest(s)
	if _, is, _ := transfer.ParseAggregate(s); is && err != nil {
		return ref, fmt.Errorf("%.200q is no digest, which is sha256: and 64 lowercase hex digits", s)
	}
	if err != nil {
		if ref, err = client.ParseReference(s); err == nil && ref.Name() == "" {
			err = fmt.Errorf("reference %s names neither a tag nor a digest", ref)
		}
		return ref, err
	}
	if repo == "" {
		err := errors.New("a digest alone does not say where the artifact is")
		return ref, cli.Hint(err, "add --repo REPOSITORY, or write it as host/repository@"+d.String())
	}
	return client.ParseReference(registry + "/" + repo + "@" + d.String())
}

func deriveCommand() *cobra.Command {
	var flags cli.Flags
	var w words
	var from []string
	var how, tool, to string
	var follow bool
	cmd := &cobra.Command{
		Use:   "derive TARGET --from SOURCE --how quantize|merge|finetune",
		Short: "Say that a model was made from another",
		Long: "Say that a model was made from another: each is a directory, a file with a shard manifest, a REF or an\n" +
			"aggregate. A merge has several --from. The statement explains why the bytes differ, and excuses nothing.",
		Example: "  kiln-push derive 127.0.0.1:5000/team/model-int4:v1 --from 127.0.0.1:5000/team/model:v1 --how quantize",
		Args:    cli.Args("TARGET"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(from) == 0 || how == "" {
				return cli.Usagef("derive needs --from SOURCE and --how quantize|merge|finetune")
			}
			said, err := w.said()
			if err != nil {
				return err
			}
			if said.Reason == "" {
				said.Reason = how
			}
			found, err := models(cmd, &flags, append([]string{args[0]}, from...), folder.Options{FollowLinks: follow})
			if err != nil {
				return explainArtifact(err)
			}
			ref, err := home(to, found[0])
			if err != nil {
				return err
			}
			a, err := artifact.Derive(found[0], found[1:], documents.How(how), tool, ref, said)
			if err != nil {
				return explainArtifact(err)
			}
			return pushing(cmd, &flags, ref.Host, func(show *progress.Show, c *client.Client) (artifact.Pushed, error) {
				return a.Push(cmd.Context(), c, ref, show.Watch)
			})
		},
	}
	flags.Bind(cmd)
	w.bind(cmd, "why, or with what parameters")
	cmd.Flags().StringArrayVar(&from, "from", nil, "what it was made from; of a merge several")
	cmd.Flags().StringVar(&how, "how", "", "quantize, merge or finetune")
	cmd.Flags().StringVar(&tool, "tool", "", "what it was made with")
	cmd.Flags().StringVar(&to, "to", "", "REF to push the statement to (the repository of TARGET, if that is a REF)")
	cmd.Flags().BoolVar(&follow, "follow-links", false, "read the files behind links, as in a Hugging Face cache")
	return cmd
}

// models finds the models that are named.
func models(cmd *cobra.Command, flags *cli.Flags, names []string, o folder.Options) (all []artifact.Base, err error) {
	show := progress.New(*flags, cmd.OutOrStdout(), cmd.ErrOrStderr())
	for _, name := range names {
		b, err := artifact.FindModel(cmd.Context(), name, dialer(flags, show), o, show.Watch)
		if err != nil {
			show.Abandon()
			return nil, err
		}
		all = append(all, b)
	}
	show.Close()
	return all, nil
}

// home is where a derived-from statement goes.
func home(to string, of artifact.Base) (client.Reference, error) {
	own := client.Reference{Host: of.Ref.Host, Repo: of.Ref.Repo}
	if to == "" && own.Repo == "" {
		err := cli.Usagef("%s is in no repository, so the statement has none to go to", of.Name)
		return own, cli.Hint(err, "--to REF says where it goes, as 127.0.0.1:5000/team/statements")
	}
	if to == "" {
		return own, nil
	}
	return target(to)
}
