// Command kiln-pull brings models from a registry to a serving node, verified, and says what is there.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-pull/internal/attaching"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-pull/internal/caching"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/artifact"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
	"github.com/kiln-registry/kiln-registry/transfer/made"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

func main() {
	// The buffers of a pull are nearly all that is live, and by default the collector would let as much garbage grow
	// beside them, the more bytes the longer a pull is.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(25)
	}
	cli.Main(run)
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	root := &cobra.Command{
		Use:   "kiln-pull",
		Short: "Bring models to a serving node, verified byte for byte",
		Long: "Bring models to a serving node, verified byte for byte.\n\n" +
			"A REF is host[:port]/repository[:tag][@sha256:…]. An AGGREGATE is sha256:… alone: the name of a base model by\n" +
			"its bytes; it is asked of --registry, $KILN_REGISTRY or " + cli.DefaultRegistry + ".\n\n" + cli.ExitCodes,
		Version: cli.Version(),
		Args:    cobra.NoArgs,

		PersistentPreRunE: cli.NoEmpty("cache"),
	}
	for _, cmd := range commands() {
		for _, c := range append(cmd.Commands(), cmd) {
			run := c.RunE
			c.RunE = func(cmd *cobra.Command, args []string) error { return explain(run(cmd, args)) }
		}
		root.AddCommand(cmd)
	}
	root.AddCommand(cli.VersionCommand())
	cli.WithExitCodes(root)
	return cli.Execute(ctx, root, args, stdout, stderr)
}

// source is what a command is to read from a registry: an aggregate, or else a reference.
type source struct {
	aggregate identity.Aggregate
	ref       client.Reference
	host      string
	repo      string // where an aggregate is looked for; empty: anywhere
}

// parseSource reads REF|AGGREGATE.
func parseSource(arg, registry, repo string) (s source, err error) {
	a, is, err := transfer.ParseAggregate(arg)
	if is {
		s = source{host: registry, repo: repo, aggregate: a}
		if err == nil && repo != "" {
			err = transfer.CheckPlace(repo)
		}
	} else {
		s.ref, err = client.ParseReference(arg)
		s.host = s.ref.Host
		if err == nil && repo != "" {
			err = errors.New("--repo goes with an aggregate; a reference names its repository itself")
		}
	}
	if err != nil {
		return s, cli.Exit(cli.CodeUsage, err)
	}
	return s, nil
}

// resolve asks the registry, once. Where a reference has a tag and a digest, the digest decides; note is told if the
// tag stands for something else, and the plan then goes without it.
func (s source) resolve(ctx context.Context, c *client.Client, note func(string)) (transfer.Plan, error) {
	if !s.aggregate.IsZero() {
		plan, err := transfer.ResolveAggregate(ctx, c, s.aggregate, s.repo)
		notePassed(plan, note)
		return plan, err
	}
	plan, err := transfer.Resolve(ctx, c, s.ref)
	if err != nil || s.ref.Tag == "" || s.ref.Digest.IsZero() {
		return plan, err
	}
	now, err := c.Manifest(ctx, s.ref.Repo, s.ref.Tag)
	switch {
	case err == nil && now.Digest == s.ref.Digest:
		return plan, nil
	case err == nil:
		note(fmt.Sprintf("tag %s now stands for %s; the digest that was given decides", s.ref.Tag, now.Digest))
	default:
		note(fmt.Sprintf("what tag %s stands for is not known (%v); the digest that was given decides", s.ref.Tag, err))
	}
	plan.Tag = ""
	return plan, nil
}

// notePassed says where artifacts of the same base were passed over.
func notePassed(plan transfer.Plan, note func(string)) {
	if plan.Passed != nil {
		note(fmt.Sprintf("%s is taken: another artifact of that base was passed over (%v)", plan.Reference(), plan.Passed))
	}
}

// choose names what there is to choose from.
func choose(e *transfer.PackagingsError) string {
	var repos []string
	for _, p := range e.Plans {
		if !slices.Contains(repos, p.Repository) {
			repos = append(repos, p.Repository)
		}
	}
	one := fmt.Sprintf("--repo %s@%s", e.Plans[0].Repository, e.Plans[0].Manifest)
	if len(repos) == 1 {
		return fmt.Sprintf("all are in one repository: choose one as %s, or by a tag, --repo %s:TAG; each is listed above", one,
			repos[0])
	}
	return "choose one with --repo (" + strings.Join(repos, ", ") + "), or as " + one + "; each is listed above"
}

const unknownBase = "check the aggregate (kiln-push identify DIR prints that of a folder) and which registry is " +
	"asked (--registry, $KILN_REGISTRY); only what the token may pull is seen"

// explain gives the errors of a transfer their exit codes and hints.
func explain(err error) error {
	var space *transfer.SpaceError
	var fetch *transfer.FetchError
	var packagings *transfer.PackagingsError
	var unavailable *transfer.UnavailableError
	var elsewhere *transfer.ElsewhereError
	var odd *transfer.AggregateError
	var rule *safetensors.Error
	var part *folder.PartialError
	code, hint := 0, ""
	switch {
	case errors.Is(err, staging.ErrBusy):
		code, hint = cli.CodeTryAgain, "wait for it, or stop it; the next pull goes on from where it is"
	case errors.Is(err, staging.ErrLost):
		code, hint = cli.CodeTryAgain, "this process was stopped for long; the other pull goes on"
	case errors.Is(err, staging.ErrChanged):
		code, hint = cli.CodeTryAgain, "the next pull hashes the folder anew; end what writes to it"
	case errors.Is(err, staging.ErrForeign):
		code, hint = cli.CodeUsage, "name another folder, or remove what is there if nobody needs it"
	case errors.Is(err, transfer.ErrOccupied):
		code = cli.CodeUsage
	case errors.Is(err, transfer.ErrTarget):
		code, hint = cli.CodeUsage, "name a folder that is not there yet"
	case errors.Is(err, transfer.ErrNoTag):
		code, hint = cli.CodeUsage, "add :TAG or @sha256:…"
	case errors.Is(err, client.ErrListing):
		code, hint = cli.CodeUnreachable, "the registry is at fault; a REF names one artifact of it"
	case errors.Is(err, transfer.ErrArtifact), errors.Is(err, staging.ErrCollides):
		code = cli.CodeBadInput
	case errors.As(err, &packagings):
		code, hint = cli.CodeUsage, choose(packagings)
	case errors.As(err, &space):
		code = cli.CodeDisk
		hint = fmt.Sprintf("needs %s, %s free", cli.Bytes(space.Need), cli.Bytes(space.Free))
	case errors.Is(err, syscall.EFBIG):
		code, hint = cli.CodeDisk, "files may not grow that large here: ulimit -f"
	case errors.As(err, &fetch):
		code = cli.Code(err)
		hint = fmt.Sprintf("what was received is kept; the same command fetches only the rest (%d of %d files)",
			len(fetch.Failed), fetch.Total)
	case errors.As(err, &unavailable):
		code, hint = cli.CodeNotFound, "pull it from another registry, or have somebody who has those files push the base there "+
			"again, which heals it"
	case errors.As(err, &odd):
		code, hint = cli.CodeUsage, odd.Hint()
	case errors.As(err, &elsewhere):
		code, hint = cli.CodeNotFound, "name one of them with --repo, or none"
	case errors.Is(err, api.ErrAggregateUnknown):
		code, hint = cli.CodeNotFound, unknownBase
	case errors.As(err, &part):
		code, hint = cli.CodeBadInput, part.Hint()
	case errors.As(err, &rule) && rule.Code == safetensors.CodeNoShards:
		code, hint = cli.CodeBadInput, "name the folder that holds the model's *.safetensors files"
	case errors.As(err, &rule) && rule.Code == safetensors.CodeSymlink:
		code, hint = cli.CodeBadInput, copyLinks
	default:
		return explainMade(err)
	}
	return explained(err, code, hint)
}

// explainMade is explain for the errors of what was made from a base.
func explainMade(err error) error {
	var refused *artifact.Error
	var health *transfer.HealthError
	var manifest *identity.Error
	var other *folder.KindError
	var path *fs.PathError
	switch {
	case errors.As(err, &refused) && refused.Code == artifact.CodeNotRegular:
		return explained(err, cli.CodeBadInput, copyLinks)
	case errors.As(err, &refused):
		return explained(err, cli.CodeBadInput, refused.Hint)
	case errors.As(err, &health) && cli.Code(err) == cli.CodeUnreachable:
		return explained(err, cli.CodeUnreachable,
			"check the address, and that the model is resident there (kiln-pull resident)")
	case errors.As(err, &health) && cli.Code(err) <= cli.CodeUsage:
		return explained(err, cli.CodeUsage, "")
	case errors.As(err, &health) && cli.Code(err) == cli.CodeNotFound:
		return explained(err, cli.CodeNotFound, "check the address: that of the server alone, or its /health")
	case errors.Is(err, made.ErrDocuments):
		return explained(err, cli.CodeBadInput, "kiln-pull pull fetches its files; push the document alone, as it is")
	case errors.Is(err, made.ErrNotMade), errors.As(err, &other) && other.Want != api.KindBase:
		return explained(err, cli.CodeUsage,
			"check-adapter is asked about an adapter, check-eval about an eval, check-resume about a checkpoint")
	case errors.Is(err, transfer.ErrNoIdentity):
		return explained(err, cli.CodeUsage, "name a base; kiln-pull find REF says from which one an artifact was made")
	case errors.As(err, &manifest):
		return explained(err, cli.CodeBadInput,
			"a file that stands for a base is a shard manifest: kiln-push identify --manifest DIR prints one")
	case errors.Is(err, folder.ErrChanged):
		return explained(err, cli.CodeBadInput, "let whatever writes there finish, then run it again")
	case !errors.As(err, &path):
	case errors.Is(err, syscall.EISDIR):
		return cli.Hint(err, "name the file, not the folder that it is in")
	case errors.Is(err, syscall.ENOTDIR):
		return cli.Hint(err, "name the folder that the file is in")
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENAMETOOLONG):
		return cli.Hint(err, "check the path, and from which folder the command is run")
	}
	return err
}

const copyLinks = "files behind links are not read here; cp -rL FOLDER COPY makes a folder of regular files"

func explained(err error, code int, hint string) error {
	if hint != "" {
		err = cli.Hint(err, hint)
	}
	return cli.Exit(code, err)
}

// commands lists the commands; each is in the file that its name begins with.
func commands() []*cobra.Command {
	return append([]*cobra.Command{
		pullCommand(), findCommand(), verifyCommand(), residentCommand(), checkAdapterCommand(), checkEvalCommand(),
		checkResumeCommand(), caching.Command(),
	}, attaching.Commands()...)
}
