package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os/user"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/cli/progress"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/artifact"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
	"github.com/kiln-registry/kiln-registry/transfer/made"
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
	return artifact.Words{By: w.by, Reason: w.reason, At: time.Now().UTC().Format(time.RFC3339Nano)}, nil
}

func bindCommand() *cobra.Command {
	var flags cli.Flags
	var w words
	var base, registry, repo string
	cmd := &cobra.Command{
		Use:   "bind DIGEST|REF --base AGGREGATE|REF --reason TEXT",
		Short: "Say which base an artifact was made from",
		Long: "Say which base an artifact was made from, after it was pushed. The artifact stays as it is: a statement\n" +
			"is put beside it, with who says so, when and why. The 16 newest statements about an artifact count, and decide\n" +
			"if they agree. Where one of these is by the same person and says the same for the same reason, nothing is pushed.\n" +
			"Where what counts is something else than what was said, as they disagree, the answer has a line that says so.\n\n" +
			"A statement is withdrawn by deleting its manifest, with the right to delete in that repository and any OCI\n" +
			"client: oras manifest delete HOST/REPOSITORY@DIGEST, with the DIGEST that bind printed.",
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
				a, about, err := binding(cmd.Context(), c, ref, base, dialer(&flags, show), said)
				if err != nil {
					return artifact.Pushed{}, explainStatement(err)
				}
				p, err := say(cmd.Context(), c, a, about, client.Reference{Host: ref.Host, Repo: ref.Repo}, show)
				if err == nil {
					p.Counts = counts(cmd.Context(), c, about, ref.Repo, p.Base.Aggregate)
				}
				return p, err
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
) (a *artifact.Artifact, about identity.Digest, err error) {
	b, err := artifact.FindBase(ctx, base, dial)
	if err == nil {
		err = b.Check(ctx, c)
	}
	if err != nil {
		return nil, about, err
	}
	f, err := artifact.FindManifest(ctx, c, ref)
	if err != nil {
		return nil, about, err
	}
	a, err = artifact.Bind(f, b, said)
	return a, f.Digest, err
}

// say pushes a statement about a manifest, unless it was made before.
func say(ctx context.Context, c *client.Client, a *artifact.Artifact, about identity.Digest, ref client.Reference,
	show *progress.Show,
) (artifact.Pushed, error) {
	if ref.Tag == "" {
		before, err := a.Said(ctx, c, ref.Repo, about)
		if err != nil {
			return artifact.Pushed{}, err
		}
		if !before.IsZero() {
			show.Note("the same was said before, for the same reason: nothing is pushed")
			return a.Before(ctx, c, client.Reference{Host: ref.Host, Repo: ref.Repo, Digest: before}), nil
		}
	}
	return a.Push(ctx, c, ref, show.Watch)
}

// counts is what the registry makes of the statements about a manifest of a repository, where that is not what was said.
// Empty: it is, or the registry does not say it.
func counts(ctx context.Context, c *client.Client, about identity.Digest, repo string, said identity.Aggregate) string {
	var l api.Lineage
	err := c.Retry(ctx, about.String(), func() (err error) {
		l, err = c.Lineage(ctx, about, repo, "", 1)
		return err
	})
	x := l.Artifact
	switch disputed, is := made.Disputed(x), x.Binding; {
	case err != nil:
		return ""
	case disputed != "":
		return disputed
	case !is.Aggregate.IsZero() && is.Aggregate != said && x.Bases < 2:
		return fmt.Sprintf("it was made from %s: %s", is.Aggregate, cmp.Or(is.Source, "it says so itself"))
	}
	return made.Conflict(x)
}

// members are the flags that the members of a statement come from.
var members = map[string]string{
	"$.reason": "--reason", "$.made_by": "--by", "$.derived_from.tool": "--tool", "$.derived_from.how": "--how",
	"$.derived_from.sources": "--from",
}

// explainStatement says of a rule of statements which flag breaks it: nobody wrote that document.
func explainStatement(err error) error {
	var broken *documents.Error
	if !errors.As(err, &broken) || broken.Kind != documents.KindStatement {
		return err
	}
	at, _, _ := strings.Cut(broken.Path, "[")
	name, ok := members[at]
	if !ok {
		name = strings.TrimPrefix(broken.Path, "$.")
	}
	hint := "kiln-push bind --help and derive --help say what they take"
	if broken.Rule == documents.RuleText {
		hint = "give it one line of 1 to 512 bytes, without white space around it"
	}
	msg, _, _ := strings.Cut(broken.Msg, ", at line ") // of the statement, which nobody has seen
	return cli.Hint(cli.Usagef("%s: %s", name, msg), hint)
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
	if d.IsZero() {
		return ref, fmt.Errorf("%s is the digest of nothing", d)
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
	var how, tool, to, registry string
	var follow bool
	cmd := &cobra.Command{
		Use:   "derive TARGET --from SOURCE --how quantize|merge|finetune",
		Short: "Say that a model was made from another",
		Long: "Say that a model was made from another: each is a directory, a file with a shard manifest, a REF or an\n" +
			"aggregate, which is asked of --registry. A merge has several --from, and adapters may be among them, each by\n" +
			"its REF. The statement explains why the bytes differ, and excuses nothing. Where the same person has said the\n" +
			"same before, nothing is pushed. It is withdrawn as the statements of bind are: see kiln-push bind --help.",
		Example: "  kiln-push derive 127.0.0.1:5000/team/model-int4:v1 --from 127.0.0.1:5000/team/model:v1 --how quantize",
		Args:    cli.Args("TARGET"),
		RunE: func(cmd *cobra.Command, args []string) error {
			said, err := w.derived(from, documents.How(how))
			if err != nil {
				return err
			}
			found, err := models(cmd, &flags, append([]string{args[0]}, from...), folder.Options{FollowLinks: follow})
			var other *folder.KindError
			if errors.As(err, &other) && how == string(documents.Merge) {
				err = cli.Hint(err, "a statement names an adapter by its manifest: push it, and give its REF")
			}
			if err != nil {
				return explainArtifact(err)
			}
			ref, err := home(cmd.Context(), to, &found[0], registry, &flags)
			if err != nil {
				return explainArtifact(err)
			}
			a, err := artifact.Derive(found[0], found[1:], documents.How(how), tool, ref, said)
			if err != nil {
				return explainArtifact(explainStatement(err))
			}
			return pushing(cmd, &flags, ref.Host, func(show *progress.Show, c *client.Client) (artifact.Pushed, error) {
				for _, b := range found {
					if err := b.Check(cmd.Context(), c); err != nil {
						return artifact.Pushed{}, err
					}
				}
				return say(cmd.Context(), c, a, found[0].Subject.Digest, ref, show)
			})
		},
	}
	flags.Bind(cmd)
	w.bind(cmd, "why, or with what parameters (the word of --how)")
	cmd.Flags().StringArrayVar(&from, "from", nil, "what it was made from; of a merge several")
	cmd.Flags().StringVar(&how, "how", "", "quantize, merge or finetune")
	cmd.Flags().StringVar(&tool, "tool", "", "what it was made with")
	cmd.Flags().StringVar(&to, "to", "", "REF to push the statement to (the repository that TARGET is in)")
	cmd.Flags().StringVar(&registry, "registry", cli.Registry(), "where a TARGET that is no REF is looked for")
	cmd.Flags().BoolVar(&follow, "follow-links", false, "read the files behind links, as in a Hugging Face cache")
	return cmd
}

// derived checks what is said of how a model was made, and returns the words that go with it.
func (w words) derived(from []string, how documents.How) (artifact.Words, error) {
	if len(from) == 0 || how == "" {
		return artifact.Words{}, cli.Usagef("derive needs --from SOURCE and --how quantize|merge|finetune")
	}
	switch how {
	case documents.Quantize, documents.Merge, documents.Finetune:
	default:
		return artifact.Words{}, cli.Usagef("--how %.40q: want quantize, merge or finetune", string(how))
	}
	said, err := w.said()
	if said.Reason == "" {
		said.Reason = string(how)
	}
	return said, err
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

// home is where a derived-from statement goes: to, else the repository that what it is about is in. A target that was
// not given as a REF is looked for in a registry, and then is what that holds.
func home(ctx context.Context, to string, of *artifact.Base, registry string, flags *cli.Flags) (client.Reference, error) {
	if to != "" {
		return target(to)
	}
	if of.Ref.Repo == "" {
		c, err := flags.Client(registry, nil)
		if err != nil {
			return client.Reference{}, err
		}
		defer c.Close()
		repos, err := of.Locate(ctx, c)
		var why string
		switch {
		case err != nil:
			return client.Reference{}, fmt.Errorf("the repository of %s: %w", of.Name, err)
		case len(repos) == 0:
			why = fmt.Sprintf("%s is in no repository of %s", of.Name, registry)
		case len(repos) > 1:
			why = fmt.Sprintf("%s is in several repositories of %s: %s", of.Name, registry, strings.Join(repos, ", "))
		}
		if why != "" {
			return client.Reference{}, cli.Hint(cli.Usagef("%s: where shall the statement go?", why),
				"--to REF says where it goes, as 127.0.0.1:5000/team/statements; --registry asks another registry")
		}
	}
	return client.Reference{Host: of.Ref.Host, Repo: of.Ref.Repo}, nil
}
