package documents

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

// reader reads one document and can hand out parts of its text.
type reader struct {
	*strictjson.Reader
	data []byte
}

type field = strictjson.Field

// fault is a broken rule at a value whose place in the text is not kept. Readers of outer values put their own step in
// front of the path.
func fault(path, rule, format string, args ...any) error {
	return &strictjson.Error{Rule: rule, Offset: -1, Path: path, Msg: fmt.Sprintf(format, args...)}
}

// optional says that a member may be absent or null.
func optional(f field) field {
	f.Optional = true
	return f
}

// seen sets to when the member is there and not null.
func seen(f field, to *bool) field {
	inner := f.Read
	f.Read = func() error { *to = true; return inner() }
	return f
}

// lenient reads an object that may have members beside the given ones. Those are checked as JSON and ignored. A name
// that differs from a known one in letter case only is refused: other readers would take it for that one.
func (r reader) lenient(fields ...field) error {
	start := r.Offset()
	var found uint64 // bit i: fields[i] was there
	err := r.Object(func(name string) error {
		for i, f := range fields {
			if f.Name == name {
				found |= 1 << i
				if f.Optional && r.Kind() == strictjson.Null {
					return r.Skip()
				}
				return f.Read()
			}
		}
		for _, f := range fields {
			if strings.EqualFold(f.Name, name) {
				return r.Fail(r.Offset(), strictjson.RuleExactName, "member %.80q must be spelled %q", name, f.Name)
			}
		}
		return r.Skip()
	})
	if err != nil {
		return err
	}
	for i, f := range fields {
		if found&(1<<i) == 0 && !f.Optional {
			return r.Fail(start, strictjson.RuleRequired, "member %q missing", f.Name)
		}
	}
	return nil
}

// in is a member whose value is a lenient object.
func (r reader) in(name string, fields ...field) field {
	return field{Name: name, Read: func() error { return r.lenient(fields...) }}
}

// exactly is a member whose value is an object without other members.
func (r reader) exactly(name string, fields ...field) field {
	return field{Name: name, Read: func() error { return r.Struct(fields...) }}
}

// span runs read and returns the text that it read, which is a part of the document.
func (r reader) span(read func() error) ([]byte, error) {
	start := r.Offset()
	if err := read(); err != nil {
		return nil, err
	}
	return bytes.TrimRight(r.data[start:r.Offset()], " \t\r\n"), nil
}

// skip is a member whose value can be anything.
func (r reader) skip(name string) field { return field{Name: name, Read: r.Skip} }

func (r reader) text(name string, to *string) field {
	return field{Name: name, Read: func() (err error) { *to, err = r.String(); return err }}
}

func (r reader) number(name string, to *uint64) field {
	return field{Name: name, Read: func() (err error) { *to, err = r.Uint64(); return err }}
}

func (r reader) boolean(name string, to *bool) field {
	return field{Name: name, Read: func() (err error) { *to, err = r.Bool(); return err }}
}

// float is a number of any spelling. One beyond the range of a float64 is refused.
func (r reader) float(name string, to *float64) field {
	return field{Name: name, Read: func() (err error) {
		at := r.Offset()
		s, err := r.Number()
		if err != nil {
			return err
		}
		if *to, err = strconv.ParseFloat(s, 64); err != nil {
			return r.Fail(at, strictjson.RuleF64, "number %.40s is out of range", s)
		}
		return nil
	}}
}

// decimal is a whole number that may also stand as a string of digits.
func (r reader) decimal(name string, to **uint64) field {
	return field{Name: name, Read: func() error {
		at := r.Offset()
		if r.Kind() != strictjson.String {
			v, err := r.Uint64()
			*to = &v
			return err
		}
		s, err := r.String()
		if err != nil {
			return err
		}
		v, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			return r.Fail(at, strictjson.RuleU64, "want an integer from 0 to 2^64-1 in decimal digits, got %.40q", s)
		}
		*to = &v
		return nil
	}}
}

// whole is an optional whole number; nil: not recorded.
func (r reader) whole(name string, to **uint64) field {
	return field{Name: name, Optional: true, Read: func() error {
		v, err := r.Uint64()
		*to = &v
		return err
	}}
}

// version is a schema_version, which must be want.
func (r reader) version(want uint32) field {
	return field{Name: "schema_version", Read: func() error {
		at := r.Offset()
		v, err := r.Uint32()
		if err == nil && v != want {
			err = r.Fail(at, RuleSchemaVersion, "is %d, only %d is read", v, want)
		}
		return err
	}}
}

// oneOf is a string that must be one of the given ones.
func (r reader) oneOf(name, rule string, to *string, allowed ...string) field {
	return field{Name: name, Read: func() (err error) {
		at := r.Offset()
		if *to, err = r.String(); err != nil {
			return err
		}
		for _, a := range allowed {
			if *to == a {
				return nil
			}
		}
		return r.Fail(at, rule, "is %.80q, must be %s", *to, quoted(allowed))
	}}
}

func quoted(words []string) string {
	var b strings.Builder
	for i, w := range words {
		if i > 0 {
			b.WriteString(" or ")
		}
		b.WriteString(strconv.Quote(w))
	}
	return b.String()
}

// constant is a string that must be want.
func (r reader) constant(name, want string) field {
	var s string
	return r.oneOf(name, RuleDocumentType, &s, want)
}

// checked is a string that must pass check, whose error says what is wrong.
func (r reader) checked(name, rule string, to *string, check func(string) error) field {
	return field{Name: name, Read: func() (err error) {
		at := r.Offset()
		if *to, err = r.String(); err != nil {
			return err
		}
		if err := check(*to); err != nil {
			return r.Fail(at, rule, "%v", err)
		}
		return nil
	}}
}

// digest is a digest in the form sha256:<hex>.
func (r reader) digest(name string, to *identity.Digest) field {
	return field{Name: name, Read: func() error {
		at := r.Offset()
		s, err := r.Text()
		if err != nil {
			return err
		}
		if *to, err = identity.DigestOfText(s); err != nil {
			return r.Fail(at, RuleDigestForm, "%v", err)
		}
		return nil
	}}
}

// named is a digest that names something, so it can't be all zeros.
func (r reader) named(name string, to *identity.Digest) field {
	f := r.digest(name, to)
	read := f.Read
	f.Read = func() error {
		at := r.Offset()
		err := read()
		if err == nil && to.IsZero() {
			err = r.Fail(at, RuleValue, "is all zeros, which names nothing")
		}
		return err
	}
	return f
}

// bareDigest reads 64 lowercase hex digits without a prefix.
func bareDigest(s string) (identity.Digest, error) {
	d, err := identity.ParseDigest("sha256:" + s)
	if err != nil {
		return d, fmt.Errorf("%.80q: want 64 lowercase hex digits without a prefix", s)
	}
	return d, nil
}

// object is a free-form object that is kept as it stands.
func (r reader) object(name string, to *[]byte) field {
	return field{Name: name, Read: func() (err error) {
		if r.Kind() != strictjson.Object {
			return r.Object(nil) // which says what is there instead
		}
		*to, err = r.Raw()
		return err
	}}
}

// list reads an array; element reads each of its values.
func (r reader) list(name string, element func(i int) error) field {
	return field{Name: name, Read: func() error { return r.Array(element) }}
}

// base is an optional full shard manifest.
func (r reader) base(to *identity.Manifest) field {
	return field{Name: baseMember, Optional: true, Read: func() error {
		at := r.Offset()
		var err error
		*to, err = identity.Read(r.Reader)
		return inner(at, err)
	}}
}

// baseText is base that also gives the text of the manifest, which is a part of the document.
func (r reader) baseText(to *identity.Manifest, text *[]byte) field {
	f := r.base(to)
	read := f.Read
	f.Read = func() (err error) { *text, err = r.span(read); return err }
	return f
}

// baseBeside is base in a document beside one that holds the known manifest as the given text: the same text is the
// same manifest.
func (r reader) baseBeside(to *identity.Manifest, known identity.Manifest, text []byte) field {
	f := r.base(to)
	read := f.Read
	f.Read = func() error {
		if len(text) == 0 || !bytes.HasPrefix(r.Ahead(), text) {
			return read()
		}
		r.Pass(len(text))
		*to = known
		return nil
	}
	return f
}

// baseMember is the name of the member that holds the full shard manifest, in every document.
const baseMember = "base_weight_shard_manifest"

// inner moves the error of a shard manifest that starts at the given offset into the outer document.
func inner(at int, err error) error {
	e, ok := errors.AsType[*identity.Error](err)
	if !ok {
		return err
	}
	if j, ok := errors.AsType[*strictjson.Error](e.Err); ok {
		return &strictjson.Error{Rule: j.Rule, Offset: at + j.Offset, Path: j.Path, Msg: j.Msg}
	}
	return &strictjson.Error{Rule: e.Rule, Offset: at, Msg: e.Msg}
}

// identifier checks Kiln's rule for identifiers in a checkpoint.
func identifier(s string) error {
	if s == "" || len(s) > maxIdentifier {
		return fmt.Errorf("%.60q has %d bytes, must have 1 to %d", s, len(s), maxIdentifier)
	}
	for _, c := range s {
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '.' || c == '_' || c == '-') {
			return fmt.Errorf("%.80q contains %q, only A-Z a-z 0-9 . _ - are allowed", s, c)
		}
	}
	return nil
}

// relativePath checks that a file of a checkpoint has a plain path below its folder.
func relativePath(s string) error {
	switch {
	case s == "" || len(s) > maxPath:
		return fmt.Errorf("the path has %d bytes, must have 1 to %d", len(s), maxPath)
	case strings.ContainsAny(s, "\\\x00"):
		return fmt.Errorf("%.80q contains a backslash or a NUL", s)
	}
	if top, _, _ := strings.Cut(s, "/"); top == CheckpointFile || top == incompleteFile {
		return fmt.Errorf("%.80q: the name %s is reserved at the top of the folder", s, top)
	}
	for part := range strings.SplitSeq(s, "/") {
		if part == "" || part == "." || part == ".." {
			return fmt.Errorf("%.80q is not a plain path below the folder", s)
		}
	}
	return nil
}

// notBlank checks that a text is more than white space.
func notBlank(s string) error {
	if strings.TrimSpace(s) == "" {
		return fmt.Errorf("is %.80q, must not be blank", s)
	}
	return nil
}

// maxText is how long a checked text may be, in bytes.
const maxText = 512

// plainText checks Kiln's rule for texts that enter a digest: 1 to 512 bytes, no white space around, no controls.
func plainText(s string) error {
	switch {
	case s == "":
		return errors.New("is empty")
	case len(s) > maxText:
		return fmt.Errorf("%.60q... has %d bytes, at most %d are allowed", s, len(s), maxText)
	case strings.TrimSpace(s) != s:
		return fmt.Errorf("%.80q has white space at its start or end", s)
	case strings.ContainsFunc(s, unicode.IsControl):
		return fmt.Errorf("%.80q has a control character", s)
	}
	return nil
}

// timestamp checks that a text is a date and time of RFC 3339.
func timestamp(s string) error {
	if !isRFC3339(s) {
		return fmt.Errorf("%.80q is no time like 2026-01-02T03:04:05Z", s)
	}
	return nil
}

func isRFC3339(s string) bool {
	const form = "0000-00-00T00:00:00"
	if len(s) <= len(form) {
		return false
	}
	for i, c := range []byte(form) {
		switch {
		case c == '0' && isDigit(s[i]), c == s[i], c == 'T' && (s[i] == 't' || s[i] == ' '):
		default:
			return false
		}
	}
	n := func(from, to int) int { v, _ := strconv.Atoi(s[from:to]); return v }
	year, month, day := n(0, 4), n(5, 7), n(8, 10)
	hour, minute, second := n(11, 13), n(14, 16), n(17, 19)
	if month < 1 || month > 12 || day < 1 || day > daysIn(year, month) || hour > 23 || minute > 59 || second > 60 {
		return false
	}
	return isZone(fraction(s[len(form):]))
}

// fraction takes a fraction of a second off the front of s. Without digits after the point nothing is taken.
func fraction(s string) string {
	if s == "" || s[0] != '.' {
		return s
	}
	rest := strings.TrimLeft(s[1:], "0123456789")
	if len(rest) == len(s)-1 {
		return s
	}
	return rest
}

func isZone(s string) bool {
	if s == "Z" || s == "z" {
		return true
	}
	if len(s) != 6 || s[0] != '+' && s[0] != '-' || s[3] != ':' {
		return false
	}
	for _, i := range []int{1, 2, 4, 5} {
		if !isDigit(s[i]) {
			return false
		}
	}
	return s[1:3] <= "23" && s[4:6] <= "59"
}

func daysIn(year, month int) int {
	switch month {
	case 4, 6, 9, 11:
		return 30
	case 2:
		if year%4 == 0 && (year%100 != 0 || year%400 == 0) {
			return 29
		}
		return 28
	}
	return 31
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

// appendString appends s as a JSON string the way serde_json writes it: only quotes, backslashes and the controls below
// 0x20 are escaped.
func appendString(b []byte, s string) []byte {
	b = append(b, '"')
	for _, c := range []byte(s) {
		switch i := strings.IndexByte("\"\\\b\f\n\r\t", c); {
		case i >= 0:
			b = append(b, '\\', `"\bfnrt`[i])
		case c < ' ':
			b = fmt.Appendf(b, `\u%04x`, c)
		default:
			b = append(b, c)
		}
	}
	return append(b, '"')
}

// appendMember appends a comma, a name and a colon.
func appendMember(b []byte, name string) []byte {
	return append(append(append(b, `,"`...), name...), `":`...)
}

// appendText appends a member with a string.
func appendText(b []byte, name, value string) []byte {
	return appendString(appendMember(b, name), value)
}

// appendNullable appends a member with a string, null for the empty one.
func appendNullable(b []byte, name, value string) []byte {
	if value == "" {
		return append(appendMember(b, name), "null"...)
	}
	return appendText(b, name, value)
}

// digestText is the text of d, empty for the zero one.
func digestText(d identity.Digest) string {
	if d.IsZero() {
		return ""
	}
	return d.String()
}
