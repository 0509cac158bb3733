package progress

import (
	"bytes"
	"encoding/json"
	"strings"
	"sync"
	"testing"

	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/transfer"
)

func feed(s *Show) {
	var wg sync.WaitGroup
	for _, file := range []string{"a", "b"} {
		wg.Go(func() {
			s.Watch(transfer.Event{Step: transfer.Planned, Phase: transfer.PhaseHash, File: file, Total: 1000})
			for n := range int64(1000) {
				s.Watch(transfer.Event{Step: transfer.Moved, Phase: transfer.PhaseHash, File: file, Bytes: n, Total: 1000})
			}
			s.Watch(transfer.Event{Step: transfer.Done, Phase: transfer.PhaseHash, File: file, Bytes: 1000, Total: 1000})
		})
	}
	wg.Wait()
	s.Watch(transfer.Event{Step: transfer.Skipped, Phase: transfer.PhaseUpload, File: "a", Total: 1000, Note: "there"})
	s.Note("waiting")
}

func TestPlain(t *testing.T) {
	var stdout, stderr bytes.Buffer
	s := New(cli.Flags{}, &stdout, &stderr)
	feed(s)
	s.Close()
	got := stderr.String()
	if !strings.HasPrefix(got, "waiting\nhash: 2 files, 2 kB, ") || strings.Contains(got, "upload") || stdout.Len() > 0 {
		t.Errorf("stderr %q, stdout %q", got, stdout.String())
	}
	stderr.Reset()
	s = New(cli.Flags{Quiet: true}, &stdout, &stderr)
	feed(s)
	s.Close()
	if stderr.Len()+stdout.Len() > 0 {
		t.Errorf("quiet: stderr %q, stdout %q", stderr.String(), stdout.String())
	}
	s = New(cli.Flags{}, &stdout, &stderr)
	feed(s)
	s.Note("a\x1b[2J\nb\u202e")
	s.Abandon()
	if stderr.String() != "waiting\n"+`a\u001b[2J b\u202e`+"\n" {
		t.Errorf("abandoned: stderr %q", stderr.String())
	}
}

func TestJSON(t *testing.T) {
	var stdout, stderr bytes.Buffer
	s := New(cli.Flags{JSON: true}, &stdout, &stderr)
	feed(s)
	s.Close()
	steps := map[transfer.Step]int{}
	for line := range strings.Lines(stdout.String()) {
		var e transfer.Event
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		steps[e.Step]++
	}
	if steps[transfer.Planned] != 2 || steps[transfer.Done] != 2 || steps[transfer.Skipped] != 1 || steps[transfer.Noted] != 1 ||
		steps[transfer.Moved] > 10 || stderr.Len() > 0 {
		t.Errorf("steps %v, stderr %q", steps, stderr.String())
	}
}
