package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
)

func TestCode(t *testing.T) {
	_, none := os.Open("/no/such/file")
	refused := &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	status := func(n int) error { return &client.StatusError{Status: n} }
	for _, test := range []struct {
		err  error
		want int
		hint string // part of it; empty: there is none
	}{
		{nil, CodeOK, ""},
		{errors.New("odd"), CodeUsage, ""},
		{Usagef("no"), CodeUsage, ""},
		{Exit(CodeNo, errors.New("no")), CodeNo, ""},
		{fmt.Errorf("a: %w", Exit(CodeTryAgain, none)), CodeTryAgain, ""},
		{none, CodeNotFound, ""},
		{&fs.PathError{Err: syscall.ENOSPC}, CodeDisk, "free some space"},
		{&fs.PathError{Err: syscall.EDQUOT}, CodeDisk, "free some space"},
		{&fs.PathError{Err: syscall.EACCES}, CodeDisk, ""},
		{&fs.PathError{Err: syscall.EROFS}, CodeDisk, ""},
		{&fs.PathError{Err: syscall.EISDIR}, CodeUsage, ""},
		{fmt.Errorf("a: %w", refused), CodeUnreachable, "kiln-registry serve"},
		{fmt.Errorf("seal block 0: %w", syscall.EBUSY), CodeUsage, ""},
		{os.NewSyscallError("memfd_create", syscall.ENOSYS), CodeUsage, ""},
		{fmt.Errorf("a: %w", http.ErrSchemeMismatch), CodeUnreachable, "--plain-http"},
		{client.ErrIdle, CodeUnreachable, "check the address"},
		{client.ErrNotBlob, CodeUnreachable, "check the address"},
		{client.ErrMismatch, CodeNo, ""},
		{io.ErrUnexpectedEOF, CodeUnreachable, "check the address"},
		{status(http.StatusUnauthorized), CodeDenied, "KILN_TOKEN"},
		{status(http.StatusForbidden), CodeDenied, "KILN_TOKEN"},
		{status(http.StatusMethodNotAllowed), CodeDenied, "may be read-only"},
		{api.ErrUnsupported.With(api.Refusal{Reason: api.CodeReadOnly}), CodeDenied, "is read-only"},
		{status(http.StatusNotFound), CodeNotFound, ""},
		{status(http.StatusBadRequest), CodeBadInput, ""},
		{status(http.StatusTooManyRequests), CodeUnreachable, "check the address"},
		{status(http.StatusBadGateway), CodeUnreachable, "check the address"},
		{status(http.StatusOK), CodeUnreachable, "check the address"},
		{api.ErrManifestUnknown, CodeNotFound, "kiln-pull find"},
		{api.ErrStoreFull, CodeUnreachable, "registry's own disk"},
		{&safetensors.Error{Code: "no_shards"}, CodeBadInput, ""},
		{&identity.Error{Rule: "total"}, CodeBadInput, ""},
		{&documents.Error{Kind: documents.KindReceipt, Rule: documents.RuleText, Path: "$"}, CodeBadInput, ""},
		{context.Canceled, CodeTryAgain, ""},
		{Hint(errors.New("x"), "do y"), CodeUsage, "do y"},
		{Exit(CodeUsage, refused), CodeUsage, "kiln-registry serve"},
	} {
		var stderr bytes.Buffer
		code := Report(&stderr, test.err)
		_, hint, has := strings.Cut(stderr.String(), "\nhint: ")
		if code != test.want || has != (test.hint != "") || !strings.Contains(hint, test.hint) {
			t.Errorf("%v: code %d, want %d; wrote %q", test.err, code, test.want, stderr.String())
		}
		if test.err != nil && !strings.HasPrefix(stderr.String(), "error: ") {
			t.Errorf("%v: wrote %q", test.err, stderr.String())
		}
	}
}

func TestReportIsOneLine(t *testing.T) {
	var stderr bytes.Buffer
	Report(&stderr, Hint(errors.New("a\nerror: b\x1b[2J"), "c\nd"))
	if got := stderr.String(); strings.Count(got, "\n") != 2 || strings.Contains(got, "\x1b") {
		t.Errorf("wrote %q", got)
	}
	stderr.Reset()
	if code := Report(&stderr, Silent(CodeNo)); code != CodeNo || stderr.Len() > 0 {
		t.Errorf("silent: code %d, wrote %q", code, stderr.String())
	}
}

func TestInterrupted(t *testing.T) {
	err := interrupted(fmt.Errorf("upload: %w", context.Canceled))
	if Code(err) != CodeTryAgain || !strings.Contains(hintOf(err), "goes on") {
		t.Errorf("code %d, hint %q", Code(err), hintOf(err))
	}
	if err := interrupted(Exit(CodeBadInput, errors.New("x"))); Code(err) != CodeBadInput {
		t.Errorf("a real error became code %d", Code(err))
	}
}

func TestExecute(t *testing.T) {
	run := func(args ...string) (string, error) {
		var flags Flags
		root := &cobra.Command{Use: "tool", Args: cobra.NoArgs}
		root.AddCommand(&cobra.Command{
			Use: "do A", Args: Args("A"), RunE: func(*cobra.Command, []string) error { return errors.New("did") },
		})
		flags.Bind(root)
		var out bytes.Buffer
		return out.String(), Execute(t.Context(), root, args, &out, &out)
	}
	for args, want := range map[string]string{
		"do": "got 0 arguments, want A", "do a b": "got 2 arguments", "undo": "unknown command", "do --x a": "unknown flag",
		"do --token secret a": "--token-file",
	} {
		_, err := run(strings.Fields(args)...)
		said := fmt.Sprint(err)
		if Code(err) != CodeUsage || !strings.Contains(said, want) || strings.Contains(said, "secret") ||
			!strings.Contains(hintOf(err), "--help") {
			t.Errorf("%s: code %d, %v, hint %q", args, Code(err), err, hintOf(err))
		}
	}
	if _, err := run("do", "a"); err == nil || err.Error() != "did" {
		t.Errorf("do a: %v", err)
	}
	if out, err := run("--help"); err != nil {
		t.Errorf("--help: %v, %q", err, out)
	}
}

func TestBytes(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0 B", 999: "999 B", 1000: "1 kB", 999_600: "1 MB", 1_234_567: "1.23 MB", 5_329_398_688: "5.33 GB",
	} {
		if got := Bytes(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}

func TestKilnLanes(t *testing.T) {
	ran := false
	run := func(context.Context, []string, io.Writer, io.Writer) error { ran = true; return nil }
	var out, said bytes.Buffer
	t.Setenv("KILN_LANES", "x5")
	code := visibly(t.Context(), run, nil, &out, &said)
	want := "error: KILN_LANES: no kernel is named \"x5\": want x1, x4 or x16\nhint: "
	if code != CodeUsage || ran || out.Len() > 0 || !strings.HasPrefix(said.String(), want) {
		t.Errorf("x5: code %d, ran %t, stderr %q", code, ran, said.String())
	}
	t.Setenv("KILN_LANES", "x1")
	if code := visibly(t.Context(), run, nil, &out, &said); code != CodeOK || !ran {
		t.Errorf("x1: code %d, ran %t", code, ran)
	}
	if err := useLanes(""); err != nil {
		t.Error(err)
	}
}

// An empty text is what a shell variable that is not set makes of a flag.
func TestNoEmpty(t *testing.T) {
	for args, want := range map[string]string{
		"x --to= ": "--to is empty", "x --to=a": "", "x": "", "x --may=": "", "x --all=": "--all is empty",
		"x --all=a --all=b": "",
	} {
		var to, may string
		var all []string
		root := &cobra.Command{Use: "root", PersistentPreRunE: NoEmpty("may")}
		cmd := &cobra.Command{Use: "x", RunE: func(*cobra.Command, []string) error { return nil }}
		cmd.Flags().StringVar(&to, "to", "default", "")
		cmd.Flags().StringVar(&may, "may", "", "")
		cmd.Flags().StringArrayVar(&all, "all", nil, "")
		root.AddCommand(cmd)
		var out, errs bytes.Buffer
		code := visibly(t.Context(), func(ctx context.Context, args []string, stdout, stderr io.Writer) error {
			return Execute(ctx, root, args, stdout, stderr)
		}, strings.Fields(args), &out, &errs)
		if wrong := want != ""; wrong != (code == CodeUsage) || wrong != (code != 0) || !strings.Contains(errs.String(), want) ||
			wrong && !strings.Contains(errs.String(), "hint: leave it out") {
			t.Errorf("%s: %d %s", args, code, &errs)
		}
	}
}
