package api

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/kiln-registry/kiln-registry/identity"
)

// LayerName returns the file name that a layer's annotations give its blob, or nothing if they give none. It is an error
// if they give two, or one that CheckFilePath refuses.
func LayerName(annotations map[string]string) (string, error) {
	path, title := annotations[AnnotationFilepath], annotations[v1.AnnotationTitle]
	if path != "" && title != "" && path != title {
		return "", fmt.Errorf("it has two names, %.80q and %.80q", path, title)
	}
	name := cmp.Or(path, title, annotations[AnnotationCNAIPath])
	if name == "" {
		return "", nil
	}
	if err := CheckFilePath(name); err != nil {
		return "", err
	}
	return name, nil
}

// MaxFilePath is the longest name of an artifact's file, in bytes, folders included: that of a file of a checkpoint. Each
// component has at most identity.MaxFilename.
const MaxFilePath = 1024

// CheckFilePath refuses the name of an artifact's file that could leave the folder it is put into, or mean another file
// on some system. Components are separated by slashes.
func CheckFilePath(name string) error {
	bad := ""
	switch {
	case len(name) > MaxFilePath:
		bad = fmt.Sprintf("is longer than %d bytes", MaxFilePath)
	case !utf8.ValidString(name):
		bad = "is no UTF-8"
	case strings.HasPrefix(name, "/"):
		bad = "is absolute"
	case strings.Contains(name, `\`):
		bad = "has a backslash"
	case strings.ContainsFunc(name, Control):
		bad = "has a control character"
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == "" || part == "." || part == ".." {
			bad = cmp.Or(bad, fmt.Sprintf("has %q as a component", part))
		}
		if len(part) > identity.MaxFilename {
			bad = cmp.Or(bad, fmt.Sprintf("has a component of more than %d bytes", identity.MaxFilename))
		}
	}
	if bad != "" {
		return fmt.Errorf("file name %.300q %s", name, bad)
	}
	return nil
}

// encodings are the words of a media type that say that something is packed, and not there byte for byte.
var encodings = []string{
	"gzip", "zstd", "zip", "xz", "tar", "gtar", "bzip", "bzip2", "bz2", "lz4", "lzma", "lzip", "brotli", "compress",
	"compressed", "7z", "rar", "encrypted",
}

// Encoded says whether a media type has a word for an encoding, in any case and also in its parameters:
// application/x-gzip, application/json+gzip, application/json;+gzip. Such a layer is never read as a document.
func Encoded(mediaType string) bool {
	between := func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) }
	for word := range strings.FieldsFuncSeq(strings.ToLower(mediaType), between) {
		if slices.Contains(encodings, word) {
			return true
		}
	}
	return false
}

// Control says whether a rune could make a terminal or a listing show something else than what is there: a control
// character, newline and tab included, or one that turns the direction of text.
func Control(r rune) bool { return unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) }

// Unseen says whether a rune is not to be shown as it is: one of Control, one that has no look of its own, as the space of
// no width, or one that ends a line or a paragraph. Names may have those of the second kind.
func Unseen(r rune) bool { return Control(r) || unicode.In(r, unicode.Cf, unicode.Zl, unicode.Zp) }

// AppendEscaped appends a rune as JSON would escape it: as \u001b, and beyond U+FFFF as two of those.
func AppendEscaped(b []byte, r rune) []byte {
	if high, low := utf16.EncodeRune(r); high != utf8.RuneError {
		return fmt.Appendf(b, `\u%04x\u%04x`, high, low)
	}
	return fmt.Appendf(b, `\u%04x`, r)
}
