package cli

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kiln-registry/kiln-registry/api/client"
)

// DefaultRegistry is where the registry listens and the clients look when nothing else is said.
const DefaultRegistry = "127.0.0.1:5000"

// Registry returns the registry that is asked where a command names none: $KILN_REGISTRY, else DefaultRegistry.
func Registry() string { return cmp.Or(os.Getenv("KILN_REGISTRY"), DefaultRegistry) }

// Flags are those that every command which may speak to a registry has.
type Flags struct {
	PlainHTTP bool
	TokenFile string
	CAFile    string
	JSON      bool
	Quiet     bool
}

// Bind adds the flags to cmd and the commands below it.
func (f *Flags) Bind(cmd *cobra.Command) {
	p := cmd.PersistentFlags()
	p.BoolVar(&f.PlainHTTP, "plain-http", false, "speak plain HTTP also to hosts other than this machine")
	p.StringVar(&f.TokenFile, "token-file", "", "file with the bearer token (else $KILN_TOKEN, else the Docker config)")
	p.StringVar(&f.CAFile, "ca-file", "", "PEM certificates to trust besides those of the system")
	p.BoolVar(&f.JSON, "json", false, "print JSON on stdout")
	p.BoolVarP(&f.Quiet, "quiet", "q", false, "no progress on stderr")
	p.Var(refusedToken{}, "token", "")
	_ = p.MarkHidden("token")
}

// Client returns a client of the registry at host. notes, which may be nil, is told of waits and fallbacks.
func (f *Flags) Client(host string, notes func(string)) (*client.Client, error) {
	return open(host, client.Options{PlainHTTP: f.PlainHTTP, TokenFile: f.TokenFile, CAFile: f.CAFile, Notify: notes})
}

// Stranger is Client for a host that is no registry the token was meant for: it gets neither the token nor a login.
func (f *Flags) Stranger(host string, notes func(string)) (*client.Client, error) {
	return open(host, client.Options{PlainHTTP: f.PlainHTTP, Anonymous: true, CAFile: f.CAFile, Notify: notes})
}

func open(host string, o client.Options) (*client.Client, error) {
	o.UserAgent = "kiln/" + Version()
	c, err := client.New(host, o)
	var path *os.PathError
	if err != nil && !errors.As(err, &path) {
		return nil, Exit(CodeUsage, err)
	}
	return c, err
}

// refusedToken is the value of a flag that exists to say why it does not.
type refusedToken struct{}

func (refusedToken) String() string   { return "" }
func (refusedToken) Type() string     { return "string" }
func (refusedToken) Set(string) error { return errToken }

var errToken = errors.New("a token on the command line can be read by everybody on this machine; " +
	"use --token-file or KILN_TOKEN")

// flagError keeps the value of a flag that was refused out of the message, where it is a token.
func flagError(_ *cobra.Command, err error) error {
	if errors.Is(err, errToken) {
		return errToken
	}
	return err
}

// NoEmpty returns a check, for the PersistentPreRunE of a root command, that refuses a flag which was given an empty
// text: most often that is a shell variable that is not set, and it must not switch off what the flag asks for. Flags
// with the names in except may be empty.
func NoEmpty(except ...string) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, _ []string) (err error) {
		cmd.Flags().Visit(func(f *pflag.Flag) {
			texts := []string{"some"}
			if list, is := f.Value.(pflag.SliceValue); is {
				texts = list.GetSlice()
			} else if f.Value.Type() == "string" {
				texts = []string{f.Value.String()}
			}
			if err == nil && slices.Contains(texts, "") && !slices.Contains(except, f.Name) {
				err = Hint(Usagef("--%s is empty", f.Name), "leave it out, or give it a value: is a shell variable not set?")
			}
		})
		return err
	}
}

// Version returns the version that the binary was built from.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "unknown"
	}
	return info.Main.Version
}

// Bytes writes a size for people, in powers of ten.
func Bytes(n int64) string {
	const units = "kMGTPE"
	if n < 1000 {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n)/1000, 0
	for v >= 999.5 && i < len(units)-1 {
		v, i = v/1000, i+1
	}
	return fmt.Sprintf("%.3g %cB", v, units[i])
}

// Count writes a number of things of a kind, as 1 blob or 3 blobs.
func Count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// Warn writes one "warning:" line.
func Warn(stderr io.Writer, format string, args ...any) {
	fmt.Fprintf(stderr, "warning: %s\n", client.Line(fmt.Sprintf(format, args...)))
}
