// Package cli is what the three binaries share: the way a command begins and ends, its exit codes, and its flags for
// reaching a registry.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
)

// The exit codes of the three binaries.
const (
	CodeOK          = 0
	CodeNo          = 1  // the answer is no: compare differs, verify fails, a digest does not match
	CodeUsage       = 2  // wrong usage, or could not tell
	CodeDenied      = 3  // not logged in, not allowed, or a registry that is read-only
	CodeNotFound    = 4  // no such reference, aggregate or file
	CodeBadInput    = 5  // the data is refused by a rule of selection or format
	CodeUnreachable = 6  // the server can't be reached, or failed after all tries
	CodeDisk        = 7  // the local disk is full, or forbids it
	CodeDevice      = 8  // no such device in this build, it has too little memory, or it failed
	CodeTryAgain    = 75 // interrupted or busy: the same command resumes. EX_TEMPFAIL of sysexits.h
)

// Main runs a command to its end and exits the process with its code. An interrupt or a termination ends run's context;
// a second one ends the process. An error becomes one "error:" line on stderr and, where there is something to be done
// about it, one "hint:" line. Both writers that run is given are Visible: what files and servers say can't act on the
// terminal.
func Main(run func(ctx context.Context, args []string, stdout, stderr io.Writer) error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	os.Exit(visibly(ctx, run, os.Args[1:], os.Stdout, os.Stderr))
}

type command func(ctx context.Context, args []string, stdout, stderr io.Writer) error

// visibly runs a command between two Visible writers and returns its exit code.
func visibly(ctx context.Context, run command, args []string, stdout, stderr io.Writer) int {
	out, errs := &Visible{to: stdout}, &Visible{to: stderr}
	err := useLanes(os.Getenv("KILN_LANES"))
	if err == nil {
		err = run(ctx, args, out, errs)
	}
	if e := errors.Join(out.flush(), errs.flush()); err == nil {
		err = e
	}
	if err != nil && ctx.Err() != nil {
		err = interrupted(err)
	}
	return Report(errs, err)
}

// useLanes sets the code that several streams are hashed with at once. No name is the fastest of this processor.
func useLanes(name string) error {
	err := lanes.Use(name)
	if err == nil {
		return nil
	}
	return Hint(Usagef("KILN_LANES: %w", err),
		"this processor takes "+strings.Join(lanes.Kernels(), ", ")+"; unset KILN_LANES to use the fastest")
}

// interrupted keeps an error that says what is wrong, and replaces one that only says that the context ended.
func interrupted(err error) error {
	var x *exit
	if errors.As(err, &x) {
		return err
	}
	return Hint(Exit(CodeTryAgain, errors.New("interrupted")), "the same command goes on from where this one stopped")
}

// Report writes err for people and returns the exit code that belongs to it. A silent error writes nothing.
func Report(stderr io.Writer, err error) int {
	code := Code(err)
	var s *silent
	if err == nil || errors.As(err, &s) {
		return code
	}
	fmt.Fprintf(stderr, "error: %s\n", client.Line(err.Error()))
	if text := hintOf(err); text != "" {
		fmt.Fprintf(stderr, "hint: %s\n", client.Line(text))
	}
	return code
}

type exit struct {
	code int
	err  error
}

func (e *exit) Error() string { return e.err.Error() }
func (e *exit) Unwrap() error { return e.err }

// Exit gives err an exit code. A nil error stays nil.
func Exit(code int, err error) error {
	if err == nil {
		return nil
	}
	return &exit{code, err}
}

type silent struct{ code int }

func (s *silent) Error() string { return fmt.Sprintf("exit code %d", s.code) }

// Silent is an error that ends the command with a code and says nothing more: the answer is already on stdout.
func Silent(code int) error { return Exit(code, &silent{code}) }

type hint struct {
	text string
	err  error
}

func (h *hint) Error() string { return h.err.Error() }
func (h *hint) Unwrap() error { return h.err }

// Hint adds to err what can be done about it. A nil error stays nil.
func Hint(err error, text string) error {
	if err == nil {
		return nil
	}
	return &hint{text, err}
}

// Usagef is an error of wrong usage.
func Usagef(format string, args ...any) error { return Exit(CodeUsage, fmt.Errorf(format, args...)) }

// Execute runs the command tree of root. What fails before a command of the tree begins, an unknown flag or command or
// a missing argument, is an error of usage. A command with --json also writes its error as a line of JSON.
func Execute(ctx context.Context, root *cobra.Command, args []string, stdout, stderr io.Writer) error {
	root.SilenceErrors, root.SilenceUsage = true, true
	root.CompletionOptions.HiddenDefaultCmd = true
	if root.HasSubCommands() && !root.Runnable() {
		root.Args = nil // cobra's own rule is the one that knows an unknown command
	}
	root.SetFlagErrorFunc(flagError)
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	began := false
	each(root, func(c *cobra.Command) {
		if run := c.RunE; run != nil {
			c.RunE = func(c *cobra.Command, args []string) error {
				began = true
				return run(c, args)
			}
		}
	})
	cmd, err := root.ExecuteContextC(ctx)
	var said *hint
	if err != nil && !began && !errors.As(err, &said) {
		err = Hint(err, fmt.Sprintf("%s --help shows how it is used", cmd.CommandPath()))
	}
	if err != nil && !began {
		err = Exit(CodeUsage, err)
	}
	if err != nil && ctx.Err() != nil {
		err = interrupted(err)
	}
	return errors.Join(err, reportJSON(cmd, err))
}

// reportJSON writes an error as an event for the program that reads stdout, if it asked for JSON.
func reportJSON(cmd *cobra.Command, err error) error {
	var s *silent
	asked := cmd.Flags().Lookup("json")
	if err == nil || errors.As(err, &s) || asked == nil || asked.Value.String() != "true" {
		return nil
	}
	e := json.NewEncoder(cmd.OutOrStdout())
	e.SetEscapeHTML(false)
	return e.Encode(struct {
		Event string `json:"event"`
		Code  int    `json:"exit_code"`
		Error string `json:"error"`
		Hint  string `json:"hint,omitempty"`
	}{"error", Code(err), client.Line(err.Error()), client.Line(hintOf(err))})
}

// VersionCommand prints the version alone.
func VersionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), Version())
			return err
		},
	}
}

// Args wants exactly the arguments of these names.
func Args(names ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != len(names) {
			arguments := "arguments"
			if len(args) == 1 {
				arguments = "argument"
			}
			return fmt.Errorf("got %d %s, want %s", len(args), arguments, strings.Join(names, " "))
		}
		return nil
	}
}

func each(c *cobra.Command, f func(*cobra.Command)) {
	f(c)
	for _, sub := range c.Commands() {
		each(sub, f)
	}
}
