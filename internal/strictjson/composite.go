package strictjson

import (
	"fmt"
	"strings"
)

// Object reads an object. It calls member for each member, in the order of the text, with the name; member must read
// the value. A name that occurs twice is refused before its second value is read.
func (r *Reader) Object(member func(name string) error) error {
	var names nameSet
	return r.members(func(at int, text []byte) error {
		name := r.own(text)
		if !names.add(r.data, at, text) {
			return r.twice(at, name)
		}
		if err := member(name); err != nil {
			return within(err, name, true)
		}
		return nil
	})
}

// members reads an object. It calls member for each member with its name, decoded, and where that starts.
func (r *Reader) members(member func(at int, name []byte) error) error {
	if err := r.open(Object); err != nil {
		return err
	}
	for first := true; ; first = false {
		if more, err := r.next('}', first); !more {
			return err
		}
		at := r.pos
		if r.count++; r.most > 0 && r.count > r.most {
			return r.fail(at, RuleMembers, "more than %d members in all objects", r.most)
		}
		name, err := r.name()
		if err != nil {
			return err
		}
		if err := member(at, name); err != nil {
			return err
		}
	}
}

// skip is Object for one whose members are only checked.
func (r *Reader) skip() error {
	var names nameSet
	return r.members(func(at int, text []byte) error {
		if !names.add(r.data, at, text) {
			return r.twice(at, string(text))
		}
		if err := r.Skip(); err != nil {
			return within(err, string(text), true)
		}
		return nil
	})
}

func (r *Reader) twice(at int, name string) error {
	return r.fail(at, RuleDuplicate, "member %.80q twice in one object", name)
}

// name reads a member name and the colon.
func (r *Reader) name() ([]byte, error) {
	if r.data[r.pos] != '"' {
		return nil, r.unexpected("a member name")
	}
	name, err := r.text()
	if err != nil {
		return nil, err
	}
	r.space()
	if r.pos == len(r.data) || r.data[r.pos] != ':' {
		return nil, r.unexpected("':'")
	}
	r.pos++
	return name, nil
}

// Array reads an array. It calls element for each element with its index; element must read the value.
func (r *Reader) Array(element func(i int) error) error {
	if err := r.open(Array); err != nil {
		return err
	}
	for i := 0; ; i++ {
		if more, err := r.next(']', i == 0); !more {
			return err
		}
		if err := element(i); err != nil {
			return within(err, fmt.Sprintf("[%d]", i), false)
		}
	}
}

func (r *Reader) open(k Kind) error {
	if err := r.want(k); err != nil {
		return err
	}
	if r.depth++; r.depth > MaxDepth {
		return r.fail(r.pos, RuleDepth, "nested deeper than %d", MaxDepth)
	}
	r.pos++
	return nil
}

// next moves to the next member or element, over the comma; false without an error means that the closing byte was
// read.
func (r *Reader) next(closing byte, first bool) (bool, error) {
	r.space()
	if r.pos < len(r.data) && r.data[r.pos] == closing {
		r.pos++
		r.depth--
		return false, nil
	}
	if !first {
		if r.pos == len(r.data) || r.data[r.pos] != ',' {
			return false, r.unexpected(fmt.Sprintf("',' or %q", closing))
		}
		r.pos++
		r.space()
	}
	if r.pos == len(r.data) || r.data[r.pos] == closing {
		return false, r.unexpected("a value")
	}
	return true, nil
}

// within puts the step to a value, a member name or an index, in front of the path of an error.
func within(err error, step string, isName bool) error {
	e, ok := err.(*Error)
	if !ok {
		return err
	}
	if isName && strings.ContainsFunc(step, oddInPath) {
		step = fmt.Sprintf("%.80q", step)
	}
	if e.Path != "" && e.Path[0] != '[' {
		step += "."
	}
	e.Path = step + e.Path
	return e
}

// oddInPath says whether a name with c is quoted in a path.
func oddInPath(c rune) bool { return c < '!' || c > '~' || c == '"' || c == '[' }

// Field is one member of an object of a fixed form.
type Field struct {
	Name     string
	Optional bool         // may be absent; null counts as absent
	Read     func() error // reads the value
}

// Struct reads an object that has the given members and no others, in any order. Names match in exact letter case.
func (r *Reader) Struct(fields ...Field) error {
	var found uint64 // bit i: fields[i] was there
	start := r.Offset()
	err := r.members(func(at int, name []byte) error {
		for i, f := range fields {
			if f.Name != string(name) {
				continue
			}
			if found&(1<<i) != 0 {
				return r.twice(at, f.Name)
			}
			found |= 1 << i
			if err := r.field(f); err != nil {
				return within(err, f.Name, true)
			}
			return nil
		}
		return within(r.stranger(string(name), fields), string(name), true)
	})
	if err != nil {
		return err
	}
	for i, f := range fields {
		if found&(1<<i) == 0 && !f.Optional {
			return r.fail(start, RuleRequired, "member %q missing", f.Name)
		}
	}
	return nil
}

// field reads the value of f.
func (r *Reader) field(f Field) error {
	if f.Optional && r.Kind() == Null {
		return r.literal()
	}
	return f.Read()
}

// stranger reports a name that is not one of fields.
func (r *Reader) stranger(name string, fields []Field) error {
	for _, f := range fields {
		if strings.EqualFold(f.Name, name) {
			return r.fail(r.pos, RuleExactName, "member %q must be spelled %q", name, f.Name)
		}
	}
	return r.fail(r.pos, RuleUnknownField, "unknown member %.80q", name)
}
