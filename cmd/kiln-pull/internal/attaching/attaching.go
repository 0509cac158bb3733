// Package attaching is the side of kiln-pull that uses what another process holds in memory: attach, audit, release.
package attaching

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/localsock"
	"github.com/kiln-registry/kiln-registry/transfer"
)

// Commands returns the commands.
func Commands() []*cobra.Command {
	return []*cobra.Command{attachCommand(), auditCommand(), releaseCommand(), adapterCommands()}
}

// flags are those of every command here.
type flags struct {
	socket      string
	holder      int           // user ID of the holder; 0: this user's or root
	timeout     time.Duration // of an attach, or of any other command as a whole; 0: none
	json, quiet bool
	adapter     string // digest of the manifest of what is attached; empty: the base
}

func (f *flags) bind(cmd *cobra.Command) {
	p := cmd.Flags()
	p.StringVar(&f.socket, "socket", "",
		"unix socket of the holder (default: named by the aggregate, in "+attach.Folder()+")")
	p.IntVar(&f.holder, "holder-uid", 0, "user ID that may hold the model, besides this one and root's")
	p.DurationVar(&f.timeout, "timeout", f.timeout, "how long it may take; 0: as long as it takes")
	p.BoolVar(&f.json, "json", false, "print JSON on stdout")
	p.BoolVarP(&f.quiet, "quiet", "q", false, "say nothing on stderr but errors")
}

// bounded is a context that ends when the time is up.
func (f *flags) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if f.timeout <= 0 {
		return context.WithCancel(ctx)
	}
	slow := cli.Exit(cli.CodeUnreachable, fmt.Errorf("no answer within %s", f.timeout))
	return context.WithTimeoutCause(ctx, f.timeout, slow)
}

func (f *flags) client() attach.Client { return attach.Client{Socket: f.socket, HolderUID: f.holder} }

// command makes a command that takes an AGGREGATE.
func (f *flags) command(use, short, long string,
	run func(ctx context.Context, a identity.Aggregate, stdout, stderr io.Writer) error,
) *cobra.Command {
	cmd := &cobra.Command{
		Use: use + " AGGREGATE", Short: short, Long: short + ".\n\n" + long,
		Args: cli.Args("AGGREGATE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			a, err := aggregate(args[0])
			if err != nil {
				return err
			}
			return explain(run(cmd.Context(), a, cmd.OutOrStdout(), cmd.ErrOrStderr()))
		},
	}
	f.bind(cmd)
	return cmd
}

// aggregate reads the first argument.
func aggregate(text string) (identity.Aggregate, error) {
	a, is, err := transfer.ParseAggregate(text)
	if err == nil && !is {
		err = fmt.Errorf("%.200q is no aggregate: want sha256: and 64 hex digits", text)
	}
	if err != nil {
		return a, cli.Exit(cli.CodeUsage, err)
	}
	return a, nil
}

func attachCommand() *cobra.Command {
	f := flags{timeout: 30 * time.Second}
	var check bool
	cmd := f.command("attach", "Use a model that kiln-pull resident holds, without a copy of it",
		"The memory that is there is mapped, and stays until this command is ended by a signal, or the holder says that it\n"+
			"is about to end. --json prints the document that says where each tensor is. With --check every byte of the\n"+
			"mapped memory is hashed here, with the headers that the holder gives, and the command ends: 0 if every shard\n"+
			"has its digest and every tensor is where its header says, 1 if not.\n\n"+
			"Exit codes besides: 1 another base is held, or an audit found damage; 3 the holder is another user's; 4 nobody\n"+
			"holds it; 5 memory that is not sealed, or an answer that breaks the format; 6 the holder has died or does not\n"+
			"answer; 8 a device can't be opened; 75 it is about to end, or busy.",
		func(ctx context.Context, a identity.Aggregate, stdout, stderr io.Writer) error {
			if check {
				return f.check(ctx, a, stdout)
			}
			return f.hold(ctx, a, stdout, stderr)
		})
	cmd.Flag("timeout").Usage = "how long an attach may take; 0: as long as it takes"
	cmd.Flags().StringVar(&f.adapter, "adapter", "", "digest of the manifest of an adapter: attach to it, not to the base")
	cmd.Flags().BoolVar(&check, "check", false, "hash every byte of the mapped memory, and end")
	return cmd
}

func auditCommand() *cobra.Command {
	var f flags
	return f.command("audit", "Have the holder of a model read its memory back and hash it again",
		"Memory of a device can be changed by every process that has it mapped. On damage the exit code is 1, and from\n"+
			"then on nobody can attach: the holder's /health and /readyz answer 503. Leases stay, and their clients are told.\n"+
			"An audit that could not be made, or did not end within --timeout, says nothing of the bytes: exit code 6.",
		f.audit)
}

func releaseCommand() *cobra.Command {
	var f flags
	return f.command("release", "Have the holder of a model free the memory and end",
		"As with a signal, those who are attached are told and have the holder's --drain-timeout to go. The command ends\n"+
			"when the holder has freed the memory and ended: with 0, also where leases were cut off, which it says. The\n"+
			"holder itself ends with 1 then. If it dies before, the exit code is 6, as it is after --timeout; a holder that\n"+
			"was asked goes on to end.", f.release)
}

// summary says what is attached, for people.
func summary(d attach.Document) string {
	on := ""
	for i, v := range d.Devices {
		if i > 0 {
			on += ", "
		}
		on += v.Backend
		if v.UUID != "" {
			on += " " + v.UUID
		}
	}
	what := d.Aggregate.String()
	if d.Adapter != nil {
		what = fmt.Sprintf("adapter %s of %s", d.Adapter.Digest, what)
	}
	return fmt.Sprintf("%s, %s in %s, %s, on %s", what, cli.Bytes(d.Verification.Bytes),
		cli.Count(len(d.Shards), "shard"), cli.Count(len(d.Tensors), "tensor"), on)
}

// attach attaches in the time that it may take.
func (f *flags) attach(ctx context.Context, a identity.Aggregate) (*attach.Attachment, error) {
	ctx, cancel := f.bounded(ctx)
	defer cancel()
	if f.adapter == "" {
		return f.client().Attach(ctx, a)
	}
	d, err := identity.ParseDigest(f.adapter)
	if err != nil {
		return nil, cli.Usagef("--adapter: %w", err)
	}
	return f.client().AttachAdapter(ctx, a, d)
}

// hold keeps a lease until ctx ends or the holder drains.
func (f *flags) hold(ctx context.Context, a identity.Aggregate, stdout, stderr io.Writer) (err error) {
	at, err := f.attach(ctx, a)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, at.Close()) }()
	if f.json {
		err = json.NewEncoder(stdout).Encode(at.Document)
	} else {
		_, err = fmt.Fprintf(stdout, "attached: %s, lease %s\n", summary(at.Document), at.Document.Lease.ID)
	}
	for err == nil {
		select {
		case <-ctx.Done():
			return nil
		case e, open := <-at.Events():
			switch {
			case !open:
				return cli.Exit(cli.CodeUnreachable, errors.New("the holder has gone"))
			case e.Kind == attach.EventDraining:
				f.note(stderr, "the holder is about to end: the lease is given back")
				return nil
			case e.Kind == attach.EventGeneration:
				f.note(stderr, fmt.Sprintf("generation %d", e.Generation))
			case e.Kind == attach.EventDamaged:
				cli.Warn(stderr, "an audit found other bytes than were published")
			}
		}
	}
	return err
}

func (f *flags) note(stderr io.Writer, text string) {
	if !f.quiet {
		fmt.Fprintln(stderr, text)
	}
}

func (f *flags) audit(ctx context.Context, a identity.Aggregate, stdout, _ io.Writer) error {
	ctx, cancel := f.bounded(ctx)
	defer cancel()
	found, err := f.client().Audit(ctx, a)
	if err != nil {
		return err
	}
	if f.json {
		return json.NewEncoder(stdout).Encode(found)
	}
	_, err = fmt.Fprintf(stdout, "intact: %s, %s read back and hashed in %.3f s\n", found.Aggregate,
		cli.Bytes(found.Bytes), found.Seconds)
	return err
}

// Limits on waiting for a holder to end that has freed the memory.
const (
	pause   = 50 * time.Millisecond // between looks
	goodbye = 10 * time.Second
)

func (f *flags) release(ctx context.Context, a identity.Aggregate, stdout, stderr io.Writer) error {
	ctx, cancel := f.bounded(ctx)
	defer cancel()
	f.note(stderr, "asking the holder to end; leases have its --drain-timeout")
	found, err := f.client().Free(ctx, a)
	if err == nil {
		err = gone(ctx, f.client().Of(a))
	}
	if err != nil {
		return err
	}
	if f.json {
		return json.NewEncoder(stdout).Encode(struct {
			Aggregate identity.Aggregate `json:"aggregate_sha256"`
			attach.Released
		}{a, found})
	}
	cut := ""
	if found.CutOff == 1 {
		cut = "; 1 lease was cut off"
	} else if found.CutOff > 1 {
		cut = fmt.Sprintf("; %d leases were cut off", found.CutOff)
	}
	_, err = fmt.Fprintf(stdout, "released%s: %s\n", cut, a)
	return err
}

// gone waits until nobody listens on the socket, or another holder does.
func gone(ctx context.Context, c attach.Client) error {
	slow := cli.Exit(cli.CodeUnreachable, errors.New("the memory is free, but its holder has not ended"))
	ctx, cancel := context.WithTimeoutCause(ctx, goodbye, slow)
	defer cancel()
	for {
		s, err := c.Status(ctx)
		if errors.Is(err, attach.ErrNone) || errors.Is(err, attach.ErrOtherUser) || s.State == gpuload.Published {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}

// codes are the exit codes of what a holder refuses.
var codes = map[string]int{
	attach.CodeOtherBase: cli.CodeNo, attach.CodeDamaged: cli.CodeNo, attach.CodeOtherUser: cli.CodeDenied,
	attach.CodeDraining: cli.CodeTryAgain, attach.CodeBusy: cli.CodeTryAgain, attach.CodeFailed: cli.CodeUnreachable,
	attach.CodeAdapterUnknown: cli.CodeNotFound, attach.CodeAdapterOtherBase: cli.CodeNo,
	attach.CodeAdapterInUse: cli.CodeTryAgain, attach.CodeAdapterRefused: cli.CodeBadInput,
	attach.CodeAdapterRegistry: cli.CodeUnreachable, attach.CodeNoMemory: cli.CodeDevice,
}

// hints say what can be done about what a holder refuses.
var hints = map[string]string{
	attach.CodeOtherBase: "name the socket of that one's holder with --socket, or hold it (kiln-pull resident)",
	attach.CodeDraining:  "hold it again (kiln-pull resident), then attach",
	attach.CodeBusy:      "wait until others have attached or gone",
	attach.CodeFailed:    "the holder says more on its stderr",
	attach.CodeDamaged:   "release it (kiln-pull release), and hold it again",
}

// explain gives errors their exit codes and hints.
func explain(err error) error {
	var e *attach.Error
	switch {
	case errors.As(err, &e):
		code, ok := codes[e.Code]
		if !ok {
			code = cli.CodeUsage
		}
		return cli.Hint(cli.Exit(code, err), hints[e.Code])
	case errors.Is(err, attach.ErrNone):
		return cli.Hint(cli.Exit(cli.CodeNotFound, err),
			"kiln-pull resident holds a model, and prints its socket when that is published")
	case errors.Is(err, attach.ErrOtherUser):
		return cli.Hint(cli.Exit(cli.CodeDenied, err),
			"run it as the user who holds the model, or trust that one with --holder-uid")
	case errors.Is(err, localsock.ErrFolder):
		return cli.Hint(cli.Exit(cli.CodeDenied, err), "others can put sockets there: name the holder's with --socket")
	case errors.Is(err, fs.ErrPermission):
		return cli.Hint(cli.Exit(cli.CodeDenied, err), "run it as the user who holds the model, or as root")
	case errors.Is(err, localsock.ErrPath):
		return cli.Hint(cli.Exit(cli.CodeUsage, err), "--socket names the file that kiln-pull resident says it answers on")
	case errors.Is(err, attach.ErrDocument), errors.Is(err, attach.ErrSeal):
		return cli.Hint(cli.Exit(cli.CodeBadInput, err), "nothing was taken from that holder; see what runs there")
	case cli.Code(err) == cli.CodeUnreachable:
		return cli.Hint(err, "the holder may have ended, or is stopped; kiln-pull resident holds the model again")
	}
	return err
}
