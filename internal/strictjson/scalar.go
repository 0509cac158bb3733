package strictjson

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/bits"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

// Number reads a number and returns its text as it stands in the document.
func (r *Reader) Number() (string, error) {
	if err := r.want(Number); err != nil {
		return "", err
	}
	b, err := r.number()
	return string(b), err
}

// number reads a number at the position by the grammar of RFC 8259.
func (r *Reader) number() ([]byte, error) {
	start := r.pos
	if r.data[r.pos] == '-' {
		r.pos++
	}
	zero := r.pos < len(r.data) && r.data[r.pos] == '0'
	switch n := r.digits(); {
	case n == 0:
		return nil, r.unexpected("a digit")
	case zero && n > 1:
		return nil, r.fail(start, RuleSyntax, "number with a leading zero")
	}
	if r.pos < len(r.data) && r.data[r.pos] == '.' {
		r.pos++
		if r.digits() == 0 {
			return nil, r.unexpected("a digit")
		}
	}
	if r.pos < len(r.data) && (r.data[r.pos] == 'e' || r.data[r.pos] == 'E') {
		r.pos++
		if r.pos < len(r.data) && (r.data[r.pos] == '+' || r.data[r.pos] == '-') {
			r.pos++
		}
		if r.digits() == 0 {
			return nil, r.unexpected("a digit")
		}
	}
	text := r.data[start:r.pos]
	if r.finite && !isFinite(text) {
		return nil, r.fail(start, RuleF64, "number %.40s is out of range", text)
	}
	return text, nil
}

// isFinite says whether a number is within the range of a float64.
func isFinite(number []byte) bool {
	const largest = 308 // every number of so many digits, without an exponent, is
	if len(number) <= largest && !bytes.ContainsAny(number, "eE") {
		return true
	}
	_, err := strconv.ParseFloat(string(number), 64)
	return err == nil
}

// digits reads digits and returns how many.
func (r *Reader) digits() int {
	start := r.pos
	for r.pos < len(r.data) && isDigit(r.data[r.pos]) {
		r.pos++
	}
	return r.pos - start
}

// Uint64 reads an unsigned integer. It refuses every spelling but plain digits: no sign, fraction or exponent.
func (r *Reader) Uint64() (uint64, error) { return r.uint(math.MaxUint64, RuleU64) }

// Uint32 is Uint64 for values up to 2^32-1.
func (r *Reader) Uint32() (uint32, error) {
	v, err := r.uint(math.MaxUint32, RuleU32)
	return uint32(v), err
}

func (r *Reader) uint(most uint64, rule string) (uint64, error) {
	if err := r.want(Number); err != nil {
		return 0, err
	}
	at := r.pos
	b, err := r.number()
	if err != nil {
		return 0, err
	}
	if bytes.ContainsAny(b, ".eE") {
		return 0, r.fail(at, RuleInteger, "want an integer, got %.40s", b)
	}
	v, err := strconv.ParseUint(string(b), 10, 64)
	if err != nil || v > most {
		return 0, r.fail(at, rule, "want an integer from 0 to %d, got %.40s", most, b)
	}
	return v, nil
}

// String reads a string and returns it decoded.
func (r *Reader) String() (string, error) {
	b, err := r.Text()
	if err != nil {
		return "", err
	}
	return r.own(b), nil
}

// Text reads a string and returns it decoded, as bytes that may be a part of the document: they are not to be changed.
func (r *Reader) Text() ([]byte, error) {
	if err := r.want(String); err != nil {
		return nil, err
	}
	return r.text()
}

// Limits of the strings that own keeps: longer ones are seldom repeated.
const (
	ownLen   = 64
	ownCount = 64
)

// own returns b as a string, the same one for a short text that came before and was not displaced by another.
func (r *Reader) own(b []byte) string {
	if len(b) == 0 || len(b) > ownLen {
		return string(b)
	}
	at := &r.short[(len(b)*7+int(b[len(b)-1])+int(b[len(b)/2])*3)%ownCount]
	if *at != string(b) {
		*at = string(b)
	}
	return *at
}

// text reads the string at the position. The bytes are a part of the document when it has no escapes.
func (r *Reader) text() ([]byte, error) {
	r.pos++
	start := r.pos
	r.pos += plain(r.data[start:])
	if r.pos == len(r.data) {
		return nil, r.unexpected("'\"'")
	}
	switch c := r.data[r.pos]; c {
	case '"':
		r.pos++
		return r.data[start : r.pos-1], nil
	case '\\':
		return r.escaped(start)
	default:
		return nil, r.fail(r.pos, RuleSyntax, "control character %#02x in a string", c)
	}
}

// plain returns how many bytes at the start of b stand for themselves in a string. It looks at eight of them at a time.
func plain(b []byte) int {
	const ones, tops = 0x0101010101010101, 0x8080808080808080
	i := 0
	for ; i+8 <= len(b); i += 8 {
		w := binary.LittleEndian.Uint64(b[i:])
		quote, slash := w^ones*'"', w^ones*'\\'
		// The lowest top bit that is set is that of the first byte which is below ' ', or zero after the exclusive or.
		found := ((w-ones*' ')&^w | (quote-ones)&^quote | (slash-ones)&^slash) & tops
		if found != 0 {
			return i + bits.TrailingZeros64(found)/8
		}
	}
	for i < len(b) && b[i] != '"' && b[i] != '\\' && b[i] >= ' ' {
		i++
	}
	return i
}

// escaped reads the rest of a string that started at start and has its first escape at the position.
func (r *Reader) escaped(start int) ([]byte, error) {
	out := append([]byte(nil), r.data[start:r.pos]...)
	for r.pos < len(r.data) {
		switch c := r.data[r.pos]; {
		case c == '"':
			r.pos++
			return out, nil
		case c == '\\':
			c, err := r.escape()
			if err != nil {
				return nil, err
			}
			out = utf8.AppendRune(out, c)
		case c < ' ':
			return nil, r.fail(r.pos, RuleSyntax, "control character %#02x in a string", c)
		default:
			out = append(out, c)
			r.pos++
		}
	}
	return nil, r.unexpected("'\"'")
}

// escape reads one escape, or the two that make one character outside the basic plane.
func (r *Reader) escape() (rune, error) {
	at := r.pos
	if r.pos++; r.pos == len(r.data) {
		return 0, r.unexpected("an escape")
	}
	c := r.data[r.pos]
	if c != 'u' {
		i := strings.IndexByte(`"\/bfnrt`, c)
		if i < 0 {
			return 0, r.unexpected("an escape")
		}
		r.pos++
		return rune("\"\\/\b\f\n\r\t"[i]), nil
	}
	r.pos++
	high, err := r.hex4()
	if err != nil || !utf16.IsSurrogate(high) {
		return high, err
	}
	if rest := r.data[r.pos:]; len(rest) >= 2 && rest[0] == '\\' && rest[1] == 'u' {
		r.pos += 2
		low, err := r.hex4()
		if err != nil {
			return 0, err
		}
		if c := utf16.DecodeRune(high, low); c != utf8.RuneError {
			return c, nil
		}
	}
	return 0, r.fail(at, RuleUTF8, "lone surrogate escape \\u%04x", high)
}

// hex4 reads four hex digits.
func (r *Reader) hex4() (rune, error) {
	var v rune
	for range 4 {
		if r.pos == len(r.data) {
			return 0, r.unexpected("a hex digit")
		}
		c := r.data[r.pos]
		switch {
		case isDigit(c):
			v = v<<4 | rune(c-'0')
		case 'a' <= c|0x20 && c|0x20 <= 'f':
			v = v<<4 | rune(c|0x20-'a'+10)
		default:
			return 0, r.unexpected("a hex digit")
		}
		r.pos++
	}
	return v, nil
}
