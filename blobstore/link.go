package blobstore

import (
	"context"
	"fmt"
	"io"
	"time"
)

// Linker is implemented by stores whose blobs a client may fetch directly.
type Linker interface {
	// Link returns a link to the bytes of the copy that i, which Stat gave, names, and of no other: for ttl from now
	// on, a second to a week, or less where what signs it ends before. It is for reading only, and whoever follows it
	// chooses no more than a range.
	//
	// ErrNotFound if the bytes of that copy are not there, ErrQuarantined if it was set aside, ErrCut if it has not as
	// many bytes as were stored. The bytes are not read.
	Link(ctx context.Context, i Info, ttl time.Duration) (Link, error)
}

// Link is a URL that serves a copy, whole or in ranges, to whoever has it, and asks for nothing else. It belongs into no
// log, metric or error: printed or marshalled as a whole, a Link says only until when it serves.
type Link struct {
	URL   string
	Until time.Time
}

// String implements fmt.Stringer, without the URL.
func (l Link) String() string { return "a link until " + l.Until.UTC().Format(time.RFC3339) }

// Format implements fmt.Formatter: every verb prints String.
func (l Link) Format(s fmt.State, _ rune) { _, _ = io.WriteString(s, l.String()) } // a State takes everything

// MarshalText implements encoding.TextMarshaler as String.
func (l Link) MarshalText() ([]byte, error) { return []byte(l.String()), nil }
