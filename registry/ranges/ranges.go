// Package ranges reads the headers with which clients ask for a part of a blob.
package ranges

import (
	"strconv"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
)

// Part is a range of a blob that is not empty: N bytes from Off.
type Part struct{ Off, N int64 }

// Parse reads a Range header for a blob of size bytes. One that is malformed, of another unit, or has several ranges is
// not followed: ok is false and the whole blob is the right answer. api.ErrRangeInvalid: it is well formed and nothing
// of the blob is in it, or its end comes before its start.
func Parse(spec string, size int64) (p Part, ok bool, err error) {
	unit, set, _ := strings.Cut(spec, "=")
	first, last, dash := strings.Cut(strings.TrimSpace(set), "-")
	if !strings.EqualFold(strings.TrimSpace(unit), "bytes") || !dash {
		return Part{}, false, nil
	}
	from, hasFrom, okFrom := Pos(first)
	to, hasTo, okTo := Pos(last)
	if !okFrom || !okTo || !hasFrom && !hasTo {
		return Part{}, false, nil
	}
	switch {
	case !hasFrom: // the last to bytes
		from, to = size-min(to, size), size-1
	case !hasTo:
		to = size - 1
	}
	if from >= size || to < from {
		return Part{}, false, api.Errorf(api.CodeRangeInvalid, "range %.80q of a blob of %d bytes", spec, size)
	}
	return Part{from, min(to, size-1) - from + 1}, true, nil
}

// Pos reads a position of a range: digits only, or has is false as there is nothing. One that is too large for an int64
// is the largest one.
func Pos(s string) (n int64, has, ok bool) {
	s = strings.TrimSpace(s)
	if s == "" {
		return 0, false, true
	}
	if strings.Trim(s, "0123456789") != "" {
		return 0, false, false
	}
	n, _ = strconv.ParseInt(s, 10, 64) // a range error gives the largest
	return n, true, true
}
