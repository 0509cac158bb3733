// Package progress shows the events of a transfer: bars with rate and time left on a terminal, JSON lines where a program
// reads, and one line per phase elsewhere.
package progress

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/transfer"
)

// jsonEvery is how often progress within one phase becomes a JSON line.
const jsonEvery = time.Second

// Show shows the events of one command. It is safe for concurrent use.
type Show struct {
	mu     sync.Mutex
	stdout io.Writer
	stderr io.Writer
	json   *json.Encoder
	quiet  bool
	bars   *mpb.Progress
	phases []*phase
}

type phase struct {
	name         string
	began, wrote time.Time
	total, done  int64
	files        int
	at           map[string]int64 // by file: its bytes so far, while it is under way
	bar          *mpb.Bar
}

// New returns a Show that writes where f says. Close must be called before anything else is written.
func New(f cli.Flags, stdout, stderr io.Writer) *Show {
	s := &Show{stdout: stdout, stderr: stderr, quiet: f.Quiet}
	if f.JSON {
		s.json = json.NewEncoder(stdout)
		s.json.SetEscapeHTML(false)
		return s
	}
	if terminal := cli.Terminal(stderr); terminal != nil && !f.Quiet {
		s.bars = mpb.New(mpb.WithOutput(terminal), mpb.WithWidth(64), mpb.WithAutoRefresh())
	}
	return s
}

// Watch shows one event. It is a transfer.Watch.
func (s *Show) Watch(e transfer.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.Step == transfer.Noted {
		s.note(e)
		return
	}
	p := s.phase(e.Phase)
	switch e.Step {
	case transfer.Planned:
		p.total += e.Total
	case transfer.Moved:
		p.done += e.Bytes - p.at[e.File]
		p.at[e.File] = e.Bytes
	case transfer.Done:
		p.done += e.Total - p.at[e.File]
		p.files++
		delete(p.at, e.File)
	}
	if s.bars != nil {
		s.draw(p)
	}
	if s.json != nil && (e.Step != transfer.Moved || time.Since(p.wrote) >= jsonEvery) {
		p.wrote = time.Now()
		_ = s.json.Encode(e)
	}
}

// Note shows one line for people.
func (s *Show) Note(text string) { s.Watch(transfer.Event{Step: transfer.Noted, Note: text}) }

func (s *Show) note(e transfer.Event) {
	switch {
	case s.json != nil:
		_ = s.json.Encode(e)
	case s.quiet:
	case s.bars != nil:
		fmt.Fprintf(s.bars, "%s\n", client.Line(e.Note))
	default:
		fmt.Fprintf(s.stderr, "%s\n", client.Line(e.Note))
	}
}

func (s *Show) phase(name string) *phase {
	i := slices.IndexFunc(s.phases, func(p *phase) bool { return p.name == name })
	if i >= 0 {
		return s.phases[i]
	}
	p := &phase{name: name, began: time.Now(), at: map[string]int64{}}
	s.phases = append(s.phases, p)
	return p
}

func (s *Show) draw(p *phase) {
	if p.total == 0 {
		return
	}
	if p.bar == nil {
		p.bar = s.bars.AddBar(0,
			mpb.PrependDecorators(decor.Name(fmt.Sprintf("%-9s", p.name)),
				decor.Counters(decor.SizeB1000(0), "% .1f / % .1f")),
			mpb.AppendDecorators(decor.AverageSpeed(decor.SizeB1000(0), "% .0f"), decor.Name("  "),
				decor.AverageETA(decor.ET_STYLE_GO), decor.Name(" left")))
	}
	p.bar.SetTotal(p.total, false)
	p.bar.SetCurrent(p.done)
}

// Close ends the bars and, where there are none and no program reads, writes one line per phase.
func (s *Show) Close() { s.end(true) }

// Abandon ends the bars of a command that failed, and writes nothing more.
func (s *Show) Abandon() { s.end(false) }

func (s *Show) end(summary bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bars != nil {
		for _, p := range s.phases {
			if p.bar != nil {
				p.bar.SetTotal(p.done, true)
			}
		}
		s.bars.Wait()
		return
	}
	if !summary || s.json != nil || s.quiet {
		return
	}
	for _, p := range s.phases {
		if p.files > 0 {
			took := rate(p.done, time.Since(p.began))
			fmt.Fprintf(s.stderr, "%s: %s, %s, %s\n", p.name, files(p.files), cli.Bytes(p.done), took)
		}
	}
}

func files(n int) string {
	if n == 1 {
		return "1 file"
	}
	return fmt.Sprintf("%d files", n)
}

func rate(n int64, d time.Duration) string {
	if d <= 0 {
		return "0 s"
	}
	return fmt.Sprintf("%.1f s, %s/s", d.Seconds(), cli.Bytes(int64(float64(n)/d.Seconds())))
}
