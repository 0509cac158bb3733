// Package strictjson reads JSON token by token and refuses what encoding/json lets pass: duplicate member names at any
// depth, names in another case, data after the document, a byte order mark, bytes that are not UTF-8, lone surrogate
// escapes. Numbers never go through a float.
//
// A document in memory is read in one pass, in time linear in its length. Values are checked as they are reached, so
// the first fault in the text is the one reported. Nothing returned refers to the caller's bytes, except what Raw
// returns.
package strictjson

import (
	"fmt"
	"math"
	"unicode/utf8"
)

// MaxDepth is how deep objects and arrays may nest: as deep as serde_json takes them, which refuses the 128th level.
const MaxDepth = 127

// The rules that an Error names.
const (
	RuleSyntax       = "json-syntax"       // not JSON
	RuleUTF8         = "utf-8"             // bytes that are not UTF-8, or a lone surrogate escape
	RuleDuplicate    = "no-duplicate-keys" // a member name twice in one object
	RuleTrailing     = "no-trailing-data"  // something other than white space after the document
	RuleDepth        = "depth"             // nested deeper than MaxDepth
	RuleMembers      = "members"           // more members than Limit allows
	RuleType         = "type"              // a value of another JSON type than wanted
	RuleNotNull      = "not-null"          // null where a value is wanted
	RuleRequired     = "required"          // a member is missing
	RuleUnknownField = "no-unknown-fields" // a member that the format does not have
	RuleExactName    = "exact-field-names" // a member of the format, in other letter case
	RuleInteger      = "integer-only"      // a fraction or exponent where an integer is wanted
	RuleU64          = "u64-range"         // negative, -0, or over 2^64-1
	RuleU32          = "u32-range"         // over 2^32-1
	RuleF64          = "f64-range"         // a number beyond the range of a float64, where Finite asks for that
)

// Error says which rule a document breaks, and where.
type Error struct {
	Rule   string
	Offset int    // in bytes from the start of the document
	Path   string // of the value, such as shards[3].size_bytes; empty for the document itself
	Msg    string
}

// Error gives one line: place, fault and rule.
func (e *Error) Error() string { return e.Where() + " (" + e.Rule + ")" }

// Where gives the fault and its place without the rule.
func (e *Error) Where() string {
	path := e.Path
	if path != "" {
		path += ": "
	}
	return fmt.Sprintf("%s%s at byte %d", path, e.Msg, e.Offset)
}

// Kind is the type of a JSON value.
type Kind byte

// The kinds of values.
const (
	Invalid Kind = iota // no value starts here
	Object
	Array
	String
	Number
	Bool
	Null
)

// String returns the kind with its article, as messages name it.
func (k Kind) String() string {
	return [...]string{"no JSON value", "an object", "an array", "a string", "a number", "a boolean", "null"}[k]
}

// Reader is a position in a document. Each method reads exactly one value, or fails with an *Error; after a failure the
// position means nothing. A Reader is not safe for concurrent use.
type Reader struct {
	data   []byte
	pos    int
	depth  int
	most   int              // members of all objects; 0: any number
	count  int              // of members so far
	finite bool             // see Finite
	short  [ownCount]string // short strings handed out before, so that repeated ones are not allocated again
}

// Read checks that data is UTF-8, has document read its one value, and checks that nothing follows it.
func Read(data []byte, document func(*Reader) error) error {
	r := &Reader{data: data}
	if len(data) > math.MaxInt32 {
		return r.fail(0, RuleSyntax, "more than %d bytes", math.MaxInt32)
	}
	if !utf8.Valid(data) {
		return r.fail(invalidUTF8(data), RuleUTF8, "not UTF-8")
	}
	if err := document(r); err != nil {
		return err
	}
	r.space()
	if r.pos < len(data) {
		return r.fail(r.pos, RuleTrailing, "data after the end of the document")
	}
	return nil
}

// Limit bounds how many members all objects of the document may have together, those that are read already included.
// It bounds the memory that a document of a given length takes, since names are kept to tell that none occurs twice.
func (r *Reader) Limit(members int) { r.most = members }

// Finite refuses numbers beyond the range of a float64 from here on, wherever they stand: serde_json reads none into a
// value of any form. One that is too small to be told from 0 is 0.
func (r *Reader) Finite() { r.finite = true }

// Valid reports the first fault of a document whose members are not known here.
func Valid(data []byte) error { return Read(data, (*Reader).Skip) }

// invalidUTF8 returns the offset of the first byte that is not part of a rune.
func invalidUTF8(data []byte) int {
	at := 0
	for at < len(data) {
		r, n := utf8.DecodeRune(data[at:])
		if r == utf8.RuneError && n == 1 {
			break
		}
		at += n
	}
	return at
}

// Offset returns the position of the next value in bytes from the start of the document.
func (r *Reader) Offset() int {
	r.space()
	return r.pos
}

// Left returns how many bytes of the document come after the position.
func (r *Reader) Left() int { return len(r.data) - r.pos }

// Fail returns an *Error at the given offset, for a rule of the caller's own format.
func (r *Reader) Fail(offset int, rule, format string, args ...any) error {
	return r.fail(offset, rule, format, args...)
}

func (r *Reader) fail(at int, rule, format string, args ...any) *Error {
	return &Error{Rule: rule, Offset: at, Msg: fmt.Sprintf(format, args...)}
}

// Kind returns the kind of the next value and reads nothing. It looks at the first byte only.
func (r *Reader) Kind() Kind {
	r.space()
	if r.pos == len(r.data) {
		return Invalid
	}
	switch c := r.data[r.pos]; {
	case c == '{':
		return Object
	case c == '[':
		return Array
	case c == '"':
		return String
	case c == '-' || isDigit(c):
		return Number
	case c == 't' || c == 'f':
		return Bool
	case c == 'n':
		return Null
	}
	return Invalid
}

func (r *Reader) space() {
	for r.pos < len(r.data) {
		switch r.data[r.pos] {
		case ' ', '\t', '\n', '\r':
			r.pos++
		default:
			return
		}
	}
}

// want fails unless the next value is of kind k.
func (r *Reader) want(k Kind) error {
	got := r.Kind()
	if got == k {
		return nil
	}
	at := r.pos
	switch got {
	case Invalid:
		return r.unexpected(k.String())
	case Bool, Null:
		if err := r.literal(); err != nil {
			return err
		}
	}
	if got == Null {
		return r.fail(at, RuleNotNull, "want %v, got null", k)
	}
	return r.fail(at, RuleType, "want %v, got %v", k, got)
}

// unexpected reports the byte at the position, where want belongs.
func (r *Reader) unexpected(want string) error {
	if r.pos >= len(r.data) {
		return r.fail(len(r.data), RuleSyntax, "want %s, got the end of the text", want)
	}
	c, _ := utf8.DecodeRune(r.data[r.pos:])
	return r.fail(r.pos, RuleSyntax, "want %s, got %q", want, c)
}

// literal reads true, false or null and says which by its first letter.
func (r *Reader) literal() error {
	for _, word := range [...]string{"true", "false", "null"} {
		if rest := r.data[r.pos:]; len(rest) >= len(word) && string(rest[:len(word)]) == word {
			r.pos += len(word)
			return nil
		}
	}
	return r.unexpected("true, false or null")
}

// Bool reads a boolean.
func (r *Reader) Bool() (bool, error) {
	if err := r.want(Bool); err != nil {
		return false, err
	}
	is := r.data[r.pos] == 't'
	return is, r.literal()
}

// Skip reads one value of any kind and checks it whole.
func (r *Reader) Skip() (err error) {
	switch r.Kind() {
	case Object:
		return r.skip()
	case Array:
		return r.Array(func(int) error { return r.Skip() })
	case String:
		_, err = r.text()
		return err
	case Number:
		_, err = r.number()
		return err
	case Bool, Null:
		return r.literal()
	}
	return r.unexpected("a value")
}

// Raw checks the next value whole and returns its text, which is a part of the document, not a copy.
func (r *Reader) Raw() ([]byte, error) {
	start := r.Offset()
	err := r.Skip()
	return r.data[start:r.pos], err
}

// Ahead returns the text from the next value on, which is a part of the document. It is not to be changed.
func (r *Reader) Ahead() []byte {
	r.space()
	return r.data[r.pos:]
}

// Pass moves over the first n bytes of Ahead. They must be one whole value that breaks no rule, which the caller has
// seen; its depth and its members are not counted.
func (r *Reader) Pass(n int) { r.pos += n }
