// Package saved has what an index held, as a file of lines: what kiln-registry index export writes.
package saved

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/registry"
)

// maxLine is more than the longest line of an export has: a manifest has at most 4 MiB, and JSON writes a byte of its
// annotations as six at most.
const maxLine = 32 << 20

// end is the last line.
type end struct {
	Type string `json:"type"` // endType
	Rows int    `json:"rows"`
	End  string `json:"Kiln-End"` // registry.EndWhole
}

const endType = "end"

// Writer passes on the lines of an export and counts them.
type Writer struct {
	W    io.Writer
	rows int
}

// Write implements io.Writer.
func (w *Writer) Write(p []byte) (int, error) {
	n, err := w.W.Write(p)
	w.rows += bytes.Count(p[:n], []byte("\n"))
	return n, err
}

// End writes the last line, which says that none is missing.
func (w *Writer) End() error {
	return json.NewEncoder(w.W).Encode(end{endType, w.rows, registry.EndWhole})
}

// File is a file of lines that is read again and again. Nobody may write to it meanwhile.
type File struct {
	name string
	f    *os.File

	lines *bufio.Scanner
	line  int // number of the line that was read last
	row   index.Row
	text  []byte // of row
	ended bool   // there is no row
}

// Open opens a file. Its errors carry an exit code.
func Open(name string) (*File, error) {
	info, err := os.Stat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, cli.Exit(cli.CodeNotFound, err)
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, cli.Hint(cli.Usagef("%s is no regular file, and is read twice", name), "write it to a file first")
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	return &File{name: name, f: f}, nil
}

// Close closes the file.
func (f *File) Close() error { return f.f.Close() }

// Check reads the file through. The error says in which line it is not what index export writes.
func (f *File) Check() error {
	if err := f.rewind(); err != nil {
		return err
	}
	for !f.ended {
		if err := f.next(); err != nil {
			return err
		}
	}
	return nil
}

// rewind goes to the first row.
func (f *File) rewind() error {
	if _, err := f.f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	f.lines = bufio.NewScanner(f.f)
	f.lines.Buffer(make([]byte, 64<<10), maxLine)
	f.line, f.row, f.ended = 0, index.Row{}, false
	return f.next()
}

// next reads the next row. The rows are in order, and as an index export writes them to the byte; the end is there and
// nothing behind it.
func (f *File) next() error {
	if !f.lines.Scan() {
		return f.stopped()
	}
	f.line++
	f.text = append(f.text[:0], f.lines.Bytes()...)
	var e end
	if json.Unmarshal(f.text, &e) == nil && e.Type == endType {
		return f.atEnd(e)
	}
	var r index.Row
	if err := json.Unmarshal(f.text, &r); err != nil {
		return f.refuse("it is no row: %v", err)
	}
	switch again, err := json.Marshal(r); {
	case err != nil || !bytes.Equal(again, f.text):
		return f.refuse("it is not as index export writes a row")
	case r.Type != manifest && r.Type != tag, (r.Type == tag) != (r.Tag != ""), r.Repository == "", r.Digest.IsZero():
		return f.refuse("it is neither a manifest nor a tag")
	case f.line > 1 && order(f.row, r) >= 0:
		return f.refuse("it does not come after the line before it")
	}
	f.row = r
	return nil
}

const (
	manifest = "manifest"
	tag      = "tag"
)

// stopped is why there is no further line.
func (f *File) stopped() error {
	switch err := f.lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		f.line++
		return f.refuse("it has more than %d bytes", maxLine)
	case err != nil:
		return err
	}
	return cli.Hint(
		cli.Exit(cli.CodeBadInput, fmt.Errorf("%s has no end after line %d: lines are missing", f.name, f.line)),
		"write it again by kiln-registry index export, which ends it by a line; kiln-registry export does not",
	)
}

func (f *File) atEnd(e end) error {
	want := end{endType, f.line - 1, registry.EndWhole}
	if again, err := json.Marshal(want); err != nil || e != want || !bytes.Equal(again, f.text) {
		return f.refuse("the end of %d rows is not %s", f.line-1, again)
	}
	if f.lines.Scan() {
		f.line++
		return f.refuse("it comes after the end")
	}
	f.ended = true
	return f.lines.Err()
}

func (f *File) refuse(format string, args ...any) error {
	return cli.Hint(
		cli.Exit(cli.CodeBadInput, fmt.Errorf("%s:%d: "+format, append([]any{f.name, f.line}, args...)...)),
		"write it again by kiln-registry index export",
	)
}

// order compares the names of two rows: manifests come before tags.
func order(a, b index.Row) int {
	return cmp.Or(
		cmp.Compare(a.Type, b.Type), cmp.Compare(a.Repository, b.Repository), cmp.Compare(a.Tag, b.Tag),
		compareDigests(a, b),
	)
}

func compareDigests(a, b index.Row) int {
	if a.Type == tag { // it has one name, whatever it points to
		return 0
	}
	return a.Digest.Compare(b.Digest)
}
