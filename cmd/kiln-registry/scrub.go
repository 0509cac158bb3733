package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// scrubbing is what scrub was asked for.
type scrubbing struct {
	store
	upkeep.Order
	rate size
	list bool
	json bool
}

// maxNamed is how many digests one command takes: they travel in the head of a request.
const maxNamed = 500

func scrubCommand(stderr io.Writer) *cobra.Command {
	s := scrubbing{rate: upkeep.DefaultScrubRate}
	cmd := &cobra.Command{
		Use: "scrub [DIGEST...]", Short: "Read blobs again, and set aside those that are damaged",
		Long: `Read all blobs again, or those of the digests given, and set aside those that are no longer what their digests
say. What is set aside is not served any more; pushing the same bytes again heals it. A running server does this
itself, at --scrub-rate, once in --scrub-interval. A blob that can't be read is named, and is not taken for damaged.

--list only says what is in quarantine, and which repositories miss it.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := s.check(args); err != nil {
				return err
			}
			return s.run(cmd.Context(), cmd.OutOrStdout(), stderr)
		},
	}
	s.store.bind(cmd)
	f := cmd.Flags()
	f.Var(&s.rate, "rate", "bytes to read in a second, as 100MB or 32MiB; 0: as fast as it goes")
	f.BoolVar(&s.list, "list", false, "only list what is in quarantine")
	f.BoolVar(&s.json, "json", false, "print JSON, one object a line")
	return cmd
}

func (s *scrubbing) check(args []string) error {
	if len(args) > maxNamed {
		return cli.Usagef("%d digests: at most %d are taken", len(args), maxNamed)
	}
	if s.list && len(args) > 0 {
		return cli.Usagef("--list takes no digests")
	}
	for _, arg := range args {
		d, err := identity.ParseDigest(arg)
		if err != nil {
			return cli.Usagef("%w", err)
		}
		s.Digests = append(s.Digests, d)
	}
	s.Rate = int64(s.rate)
	return s.store.check()
}

// run has the server do it, or does it where none runs.
func (s *scrubbing) run(ctx context.Context, stdout, stderr io.Writer) error {
	show := scrubShow{json: s.json, named: len(s.Digests) > 0, out: stdout, notes: stderr}
	if s.list {
		return s.tell(ctx, http.MethodGet, "/aside", stderr, show.event, func(p *parts) error {
			return p.reg.Scrubber().TellAside(ctx, show.event)
		})
	}
	err := s.tell(ctx, http.MethodPost, "/scrub?"+s.Query().Encode(), stderr, show.event, func(p *parts) error {
		return p.reg.Scrubber().Tell(ctx, s.Order, show.event)
	})
	if err == nil && show.bad > 0 {
		return cli.Hint(cli.Exit(cli.CodeNo, fmt.Errorf("%s not as they should be", count(show.bad, "blob"))),
			"push those bytes again: that heals them; kiln-registry scrub --list says which repositories miss them")
	}
	return upkeepError(err)
}

// scrubShow writes what a scrub tells.
type scrubShow struct {
	json, named bool
	out, notes  io.Writer
	bad         int
}

func (s *scrubShow) event(e upkeep.Event) {
	if f := e.Finding; f != nil && f.Verdict != upkeep.Good && (f.Verdict != upkeep.Gone || s.named) {
		s.bad++
	}
	switch {
	case s.json:
		_ = json.NewEncoder(s.out).Encode(e) // as what is printed anywhere
	case e.Finding != nil:
		fmt.Fprintf(s.out, "%s\t%s\t%s\n", e.Finding.Digest, e.Finding.Verdict, e.Finding.Why)
	case e.Aside != nil:
		a := e.Aside
		fmt.Fprintf(s.out, "%s\t%s\t%s\t%s\t%s\n", a.Digest, a.Since.UTC().Format(time.RFC3339), cli.Bytes(a.Size),
			strings.Join(a.Repositories, ","), a.Why)
	case e.Scrub != nil:
		fmt.Fprintln(s.notes, scrubbed(e.Scrub))
	}
}

// scrubbed says in a line what a scrub found.
func scrubbed(s *upkeep.Scrubbing) string {
	text := fmt.Sprintf("%s read: %d damaged", amount(s.Read), s.Damaged)
	if s.Unsteady > 0 {
		text += fmt.Sprintf(", %d right only when read again", s.Unsteady)
	}
	if s.Unreadable > 0 {
		text += fmt.Sprintf(", %d could not be read", s.Unreadable)
	}
	return text
}

// size is the value of a flag that takes a number of bytes.
type size int64

var sizeUnits = []struct {
	name string
	n    int64
}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"B", 1}, {"", 1}}

func (s *size) Type() string { return "size" }

func (s *size) String() string {
	for _, u := range sizeUnits[:3] {
		if n := int64(*s); n%u.n == 0 && n/u.n > 0 && n/u.n < 1024 {
			return fmt.Sprintf("%d%s", n/u.n, u.name)
		}
	}
	return fmt.Sprint(int64(*s))
}

// Set reads a whole number with a unit.
func (s *size) Set(text string) error {
	for _, u := range sizeUnits {
		digits, ok := strings.CutSuffix(text, u.name)
		if !ok {
			continue
		}
		n, err := strconv.ParseUint(digits, 10, 63)
		if err != nil || n > math.MaxInt64/uint64(u.n) {
			break
		}
		*s = size(int64(n) * u.n)
		return nil
	}
	return fmt.Errorf("%.40q: want a number of bytes, as 32MiB or 100MB", text)
}
