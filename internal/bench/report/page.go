package report

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
)

// A block of a page that a table fills lies between these two lines; what is there is replaced.
const (
	opening = "<!-- bench: " // then the name of the table, and closed
	closed  = " -->\n"
	closing = "<!-- /bench -->\n"
)

// Rewrite puts the tables in dir into their blocks of the page at path, and returns the names of those that it put
// there. A block whose table is not in dir stays as it is.
func Rewrite(path, dir string) (names []string, err error) {
	old, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var page strings.Builder
	for rest := string(old); ; {
		before, after, found := strings.Cut(rest, opening)
		page.WriteString(before)
		if !found {
			break
		}
		name, body, ok := strings.Cut(after, closed)
		body, after, ends := strings.Cut(body, closing)
		if !ok || !ends || strings.Contains(body, opening) {
			return nil, fmt.Errorf("%s: the block of table %.20q does not end", path, name)
		}
		t, err := Open(dir, name)
		switch {
		case err == nil:
			body = t.markdown()
			names = append(names, name)
		case !errors.Is(err, fs.ErrNotExist):
			return nil, err
		}
		page.WriteString(opening + name + closed + body + closing)
		rest = after
	}
	return names, os.WriteFile(path, []byte(page.String()), 0o666)
}
