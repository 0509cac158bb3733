package admin

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// scrubbing is what scrub was asked for.
type scrubbing struct {
	home.Flags
	upkeep.Order
	rate cli.Size
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
say. What is set aside is not served any more; pushing the same bytes again heals it, and until then it is named each
time if manifests refer to it. A running server does this itself, at --scrub-rate, once in --scrub-interval. A blob that
can't be read is named, and is not taken for damaged; one that manifests refer to and that is gone is named as missing.

--list only says what is in quarantine, missing or can't be read, and which repositories miss it.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := s.check(args); err != nil {
				return err
			}
			return s.run(cmd.Context(), cmd.OutOrStdout(), stderr)
		},
	}
	s.Flags.Bind(cmd)
	f := cmd.Flags()
	f.Var(&s.rate, "rate", "bytes to read in a second, as 100MB or 32MiB; 0: as fast as it goes")
	f.BoolVar(&s.list, "list", false, "only list what is in quarantine, missing or can't be read")
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
	return s.Flags.Check()
}

// run has the server do it, or does it where none runs.
func (s *scrubbing) run(ctx context.Context, stdout, stderr io.Writer) error {
	show := scrubShow{json: s.json, named: len(s.Digests) > 0, out: stdout, notes: stderr}
	if s.list {
		return upkeepOrder(http.MethodGet, "/aside", show.event).give(ctx, s.Home, stderr, func(p *home.Parts) error {
			return p.Registry.Scrubber().TellAside(ctx, show.event)
		})
	}
	o := upkeepOrder(http.MethodPost, "/scrub?"+s.Query().Encode(), show.event)
	err := o.give(ctx, s.Home, stderr, func(p *home.Parts) error {
		return p.Registry.Scrubber().Tell(ctx, s.Order, show.event)
	})
	switch {
	case err == nil && show.records != "":
		return cli.Hint(cli.Exit(cli.CodeNo, fmt.Errorf("the store's records of manifests and tags: %s", show.records)),
			"what the server serves comes from its index: copy the artifacts to another registry before a reindex --accept-loss")
	case err == nil && show.lacking != "":
		return cli.Hint(cli.Exit(cli.CodeNo, fmt.Errorf("the index is damaged, it lacks %s", show.lacking)),
			"nothing is lost: kiln-registry reindex makes it anew")
	case err == nil && show.bad > 0:
		return cli.Hint(cli.Exit(cli.CodeNo, fmt.Errorf("%s not as they should be", cli.Count(show.bad, "blob"))),
			show.hint())
	case err == nil && show.absent > 0:
		return cli.Hint(
			cli.Exit(cli.CodeNotFound, fmt.Errorf("%d of %d digests: no such blob is stored here", show.absent, len(s.Digests))),
			"check the digests; kiln-registry export lists the manifests that name blobs",
		)
	}
	return upkeepError(err)
}

// scrubShow writes what a scrub tells.
type scrubShow struct {
	json, named bool
	out, notes  io.Writer
	bad         int
	left        int    // damaged, and not set aside
	denied      int    // the system forbids to read them
	unread      int    // could not be read for other reasons
	unsteady    int    // right when read again
	absent      int    // that were named
	records     string // what is wrong with the refs
	lacking     string // what the index lacks of them
}

// count counts a blob that is not good, and says what is the matter with one that is not there. One that goes while all
// are read is no matter.
func (s *scrubShow) count(f *upkeep.Finding) {
	switch {
	case f.Verdict == upkeep.Good:
	case f.Verdict != upkeep.Gone:
		s.bad++
		s.sort(f)
	case f.Aside && s.named:
		s.bad++
		f.Why = "it is damaged, and was set aside before"
	case s.named:
		s.absent++
		f.Why = "it is not stored here"
	}
}

// sort counts a blob that is bad by what can be done about it.
func (s *scrubShow) sort(f *upkeep.Finding) {
	switch {
	case f.Verdict == upkeep.Damaged && !f.Aside:
		s.left++
	case f.Verdict == upkeep.Unsteady:
		s.unsteady++
	case f.Verdict != upkeep.Unreadable:
	case strings.Contains(f.Why, syscall.EACCES.Error()), strings.Contains(f.Why, syscall.EPERM.Error()):
		s.denied++
	default:
		s.unread++
	}
}

// hint says what can be done about what was found.
func (s *scrubShow) hint() string {
	var all []string
	if s.bad > s.left+s.denied+s.unread+s.unsteady {
		all = append(all, "push those bytes again: that heals them")
	}
	if s.left > 0 {
		all = append(all, "what is damaged was left where it is, as the registry is read-only or the log says why: without "+
			"--read-only a scrub sets it aside, and a push heals it")
	}
	if s.denied > 0 {
		all = append(all, "the user that runs the registry may not read some: see to owner and mode of the files, and scrub "+
			"those blobs again")
	}
	if s.unread > 0 {
		all = append(all, "the disk fails to read some: look into the log of the kernel; a push of those bytes stores them anew")
	}
	if s.unsteady > 0 {
		all = append(all, "what was right when read again is served: look at the memory and the disk of the machine")
	}
	return strings.Join(append(all, "kiln-registry scrub --list says which repositories miss them"), "; ")
}

func (s *scrubShow) event(e upkeep.Event) {
	if e.Finding != nil {
		s.count(e.Finding)
	}
	if e.Scrub != nil {
		s.records, s.lacking = e.Scrub.Records, e.Scrub.Lacking
	}
	switch {
	case s.json:
		_ = json.NewEncoder(s.out).Encode(e) // as what is printed anywhere
	case e.Finding != nil:
		why := e.Finding.Why
		for _, m := range e.Finding.Manifests {
			why += fmt.Sprintf("; %s@%s refers to it", m.Repository, m.Digest)
		}
		fmt.Fprintf(s.out, "%s\t%s\t%s\n", e.Finding.Digest, e.Finding.Verdict, why)
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
	if s.Missing > 0 {
		text += fmt.Sprintf(", and %d missing", s.Missing)
	}
	if s.Midstates > 0 {
		text += fmt.Sprintf("; %d had no midstates, or wrong ones, and have them now", s.Midstates)
	}
	return text
}
