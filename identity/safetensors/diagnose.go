package safetensors

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

// diagnoseLen is how many bytes of a file Read shows to Diagnose.
const diagnoseLen = 512

// Diagnose recognises, by the first bytes of a file, text that is often found in place of weights: a git-lfs pointer or
// an HTML or XML page. It returns an *Error for these and nil for all else. With fewer than 8 bytes it can't tell; with
// 512 it can quote what the user needs.
func Diagnose(first []byte) error {
	if len(first) < 8 {
		return nil
	}
	if startsLike(first, "version https://git-lfs") {
		return refuse(CodeLFSPointer, "a git-lfs pointer%s, not the file itself; fetch the content with: git lfs pull",
			pointerOf(first))
	}
	page := bytes.TrimLeft(first, " \t\r\n\f")
	for _, start := range []string{"<!doctype html", "<html", "<?xml"} {
		if startsLike(page, start) {
			line, _, _ := strings.Cut(string(page), "\n")
			return refuse(CodeHTMLPage, "a web page, not the file itself; it starts: %+.200q", strings.TrimSpace(line))
		}
	}
	return nil
}

// startsLike reports whether b starts with the lower-case text start in any letter case, or is a beginning of it that
// is long enough to tell.
func startsLike(b []byte, start string) bool {
	const enough = 5
	n := min(len(b), len(start))
	return n >= min(enough, len(start)) && strings.EqualFold(string(b[:n]), start[:n])
}

// pointerOf quotes the object and the size that a git-lfs pointer names.
func pointerOf(first []byte) string {
	var oid string
	var size uint64
	for line := range strings.Lines(string(first)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch key {
		case "oid":
			oid = value
		case "size":
			size, _ = strconv.ParseUint(value, 10, 64) // 0 says enough about what is no number
		}
	}
	if oid == "" {
		return ""
	}
	return fmt.Sprintf(" to %+.100q of %d bytes", oid, size)
}

// otherFormat gives a better reason than e for a file that starts like one of another known format. A safetensors file
// can start with the same bytes by chance, so this is asked only about a file that is refused anyway.
func otherFormat(prefix [8]byte, e *Error) *Error {
	for _, f := range []struct{ magic, name string }{
		{"PK\x03\x04", "a zip archive, as torch writes its .bin and .pt files"},
		{"GGUF", "a GGUF file"},
		{"\x80\x02", "a Python pickle, as torch writes its old .bin files"},
		{"\x89HDF", "an HDF5 file"},
		{"\x1f\x8b", "a gzip file"},
	} {
		if strings.HasPrefix(string(prefix[:]), f.magic) {
			return refuse(CodeNotSafetensors, "not a safetensors file, it looks like %s", f.name)
		}
	}
	return e
}

// shapeText gives a shape on one line, shortened when it is long.
func shapeText(shape []uint64) string {
	const most = 16
	if len(shape) > most {
		return fmt.Sprintf("%v of %d dimensions", shape[:most], len(shape))
	}
	return fmt.Sprint(shape)
}
