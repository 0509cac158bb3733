package cli

import (
	"fmt"
	"io"
	"os"
	"sync"
	"unicode/utf8"

	"golang.org/x/term"

	"github.com/kiln-registry/kiln-registry/api"
)

// Visible writes text so that a terminal shows all of it and acts on none of it. Newlines and tabs pass; any other
// api.Unseen rune comes out as JSON would escape it, which inside a JSON string means the same, and a byte that is not
// UTF-8 as \xNN. It is safe for concurrent use.
type Visible struct {
	to   io.Writer
	mu   sync.Mutex // guards rest
	rest []byte     // the start of a rune whose end has not been written yet
}

// Write implements io.Writer. The start of a rune at the end of p is kept until the next Write.
func (v *Visible) Write(p []byte) (int, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	text := append(v.rest, p...)
	end := whole(text)
	v.rest = append([]byte(nil), text[end:]...)
	return len(p), v.write(text[:end])
}

// flush writes the start of a rune that never ended.
func (v *Visible) flush() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	rest := v.rest
	v.rest = nil
	return v.write(rest)
}

func (v *Visible) write(text []byte) error {
	if len(text) == 0 {
		return nil
	}
	out := make([]byte, 0, len(text))
	for len(text) > 0 {
		r, n := utf8.DecodeRune(text)
		switch {
		case r == utf8.RuneError && n == 1:
			out = fmt.Appendf(out, `\x%02x`, text[0])
		case r != '\n' && r != '\t' && api.Unseen(r):
			out = api.AppendEscaped(out, r)
		default:
			out = append(out, text[:n]...)
		}
		text = text[n:]
	}
	_, err := v.to.Write(out)
	return err
}

// whole returns the length of b without the start of a rune that it may end in.
func whole(b []byte) int {
	for i := len(b) - 1; i >= max(0, len(b)-utf8.UTFMax); i-- {
		if utf8.RuneStart(b[i]) {
			if utf8.FullRune(b[i:]) {
				break
			}
			return i
		}
	}
	return len(b)
}

// Terminal returns the terminal that w writes to, directly or as a Visible; nil: it writes to none.
func Terminal(w io.Writer) *os.File {
	if v, ok := w.(*Visible); ok {
		w = v.to
	}
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return f
	}
	return nil
}
