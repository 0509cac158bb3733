package report

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
)

// A block of a page that tables fill lies between these two lines; what is there is replaced.
const (
	opening = "<!-- bench: " // then the names of the tables, and closed
	closed  = " -->\n"
	closing = "<!-- /bench -->\n"
)

// Rewrite puts the tables in dir into their blocks of the page at path, and returns the names of those that it put
// there, and of those that it left out: a block stays as it is unless dir has all its tables in full form.
func Rewrite(path, dir string) (put, left []string, err error) {
	old, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, err
	}
	var page strings.Builder
	for rest := string(old); ; {
		before, after, found := strings.Cut(rest, opening)
		page.WriteString(before)
		if !found {
			break
		}
		line, body, ok := strings.Cut(after, closed)
		body, after, ends := strings.Cut(body, closing)
		if !ok || !ends || strings.Contains(body, opening) {
			return nil, nil, fmt.Errorf("%s: the block of table %.20q does not end", path, line)
		}
		names := strings.Fields(line)
		text, err := block(dir, names)
		if err != nil {
			return nil, nil, err
		}
		if text != "" {
			body = text
			put = append(put, names...)
		} else {
			left = append(left, names...)
		}
		page.WriteString(opening + line + closed + body + closing)
		rest = after
	}
	return put, left, os.WriteFile(path, []byte(page.String()), 0o666)
}

// block is the text of tables, or empty if one is not there in full form.
func block(dir string, names []string) (string, error) {
	texts := make([]string, len(names))
	for i, name := range names {
		t, err := Open(dir, name)
		if errors.Is(err, fs.ErrNotExist) || err == nil && !t.Full {
			return "", nil
		} else if err != nil {
			return "", err
		}
		texts[i] = t.markdown()
	}
	return strings.Join(texts, "\n"), nil
}
