package upkeep

import (
	"context"
	"fmt"
	"strings"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
)

// parts checks a blob part by part while it is read.
type parts struct {
	states *lanes.States
	stream *lanes.Stream
}

// segments returns the check of the parts of a blob; nil if the store has no midstates of it that can be used.
func (s *Scrubber) segments(ctx context.Context, i blobstore.Info) *parts {
	sg, ok := s.store.(blobstore.Segments)
	if !ok {
		return nil
	}
	form, err := sg.Segments(ctx, i)
	if err != nil {
		return nil
	}
	states, err := lanes.Parse(form)
	if err != nil || states.Digest != i.Digest {
		return nil
	}
	return &parts{states, states.Stream()}
}

// maxNamed is how many damaged ranges are named.
const maxNamed = 8

// damaged names the damaged parts of a blob of which n bytes were read in all.
func (p *parts) damaged(n int64) string {
	var ranges []string
	bad := p.stream.End()
	for first := 0; first < len(bad); {
		last := first
		for last+1 < len(bad) && bad[last+1] == bad[last]+1 {
			last++
		}
		from, _ := p.states.Range(bad[first])
		end, size := p.states.Range(bad[last])
		ranges = append(ranges, fmt.Sprintf("%d-%d", from, end+size-1))
		first = last + 1
	}
	more := ""
	if len(ranges) > maxNamed {
		more = fmt.Sprintf(" and %d more", len(ranges)-maxNamed)
		ranges = ranges[:maxNamed]
	}
	text := fmt.Sprintf("damaged in bytes %s%s of %d", strings.Join(ranges, ", "), more, p.states.Size)
	switch {
	case len(bad) == 0:
		return "its bytes do not hash to its digest, although each part matches"
	case n < p.states.Size:
		text += fmt.Sprintf("; it ends after %d", n)
	case n > p.states.Size:
		text += fmt.Sprintf("; it goes on to %d", n)
	}
	return text
}
