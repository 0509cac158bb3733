// Package sources has the flags that say where the bytes of a pull come from besides the registry, and how fast.
package sources

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/transfer"
)

// maxMirrors bounds the mirrors of one pull.
const maxMirrors = 16

// Flags are those of a command that pulls. The zero value is ready for Bind.
type Flags struct {
	addresses []string
	rate      rate
}

// Bind adds the flags to a command.
func (f *Flags) Bind(cmd *cobra.Command) {
	cmd.Flags().StringArrayVar(&f.addresses, "mirror", nil,
		"another registry, host[:port][/repository] or URL, that bytes may come from too; may be given several times")
	cmd.Flags().Var(&f.rate, "limit-rate", "bytes a second that are received at most: 500K, 20M, 1.5G")
}

// Apply sets the options of a pull. closing ends what was opened, whether or not there is an error.
func (f *Flags) Apply(o *transfer.PullOptions, common cli.Flags, note func(string)) (closing func(), err error) {
	o.Rate = int64(f.rate)
	var opened []*client.Client
	closing = func() {
		for _, c := range opened {
			c.Close()
		}
	}
	if len(f.addresses) > maxMirrors {
		return closing, cli.Usagef("--mirror: %d of them, want at most %d", len(f.addresses), maxMirrors)
	}
	o.Mirrors = nil
	for _, a := range f.addresses {
		c, repo, err := client.NewMirror(a, client.Options{
			PlainHTTP: common.PlainHTTP, CAFile: common.CAFile, UserAgent: "kiln/" + cli.Version(), Notify: note,
		})
		if path := (*os.PathError)(nil); err != nil && !errors.As(err, &path) {
			err = cli.Exit(cli.CodeUsage, err)
		}
		if err != nil {
			return closing, err
		}
		opened = append(opened, c)
		o.Mirrors = append(o.Mirrors, transfer.Mirror{Client: c, Repo: repo})
	}
	return closing, nil
}

// rate is a number of bytes a second, as a flag.
type rate int64

// String is empty where there is no limit.
func (r *rate) String() string {
	if *r == 0 {
		return ""
	}
	return strconv.FormatInt(int64(*r), 10)
}

// Type names the value in the help.
func (r *rate) Type() string { return "RATE" }

// Set reads a number with an optional suffix.
func (r *rate) Set(s string) error {
	digits, unit := s, float64(1)
	if i := strings.IndexByte("KMG", byte(upper(s))); i >= 0 {
		digits, unit = s[:len(s)-1], math.Pow(1000, float64(i+1))
	}
	n, err := strconv.ParseFloat(digits, 64)
	if err != nil || n != n || n*unit < 1000 || n*unit > 1e15 || strings.ContainsAny(digits, "eExXpP_+-") {
		return fmt.Errorf("want bytes a second, 1K at least, as 500K, 20M or 1.5G")
	}
	*r = rate(n * unit)
	return nil
}

// upper returns the last letter of s as a capital one, or zero.
func upper(s string) rune {
	if s == "" {
		return 0
	}
	return rune(strings.ToUpper(s[len(s)-1:])[0])
}
