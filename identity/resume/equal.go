package resume

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"

	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

// difference compares two JSON texts the way serde_json compares values: the order of members does not count, white
// space and escapes do not, null is not the same as absent, a whole number is not the same as a fraction (1 and 1.0
// differ), fractions are compared as float64. It returns where they first differ and both values there, or "" if they
// are equal. Both texts must be valid.
func difference(path string, a, b []byte) string {
	x, errA := parse(a)
	y, errB := parse(b)
	if errA != nil || errB != nil { // never of texts that a reader of this project kept
		return fmt.Sprintf("%s can't be compared", path)
	}
	return x.diff(path, y)
}

// value is one JSON value.
type value struct {
	kind    strictjson.Kind
	text    string // of a string, decoded; else as it stands
	members map[string]value
	items   []value
}

func parse(text []byte) (v value, err error) {
	err = strictjson.Read(text, func(r *strictjson.Reader) (err error) { v, err = read(r); return err })
	return v, err
}

func read(r *strictjson.Reader) (v value, err error) {
	switch v.kind = r.Kind(); v.kind {
	case strictjson.Object:
		v.members = map[string]value{}
		err = r.Object(func(name string) (err error) { v.members[name], err = read(r); return err })
	case strictjson.Array:
		err = r.Array(func(int) error {
			item, err := read(r)
			v.items = append(v.items, item)
			return err
		})
	case strictjson.String:
		v.text, err = r.String()
	default:
		var text []byte
		text, err = r.Raw()
		v.text = string(text)
	}
	return v, err
}

// diff says where v and o first differ, in the order of member names.
func (v value) diff(path string, o value) string {
	differs := fmt.Sprintf("%s is %s in the checkpoint, %s in this run", path, v.short(), o.short())
	if v.kind != o.kind {
		return differs
	}
	switch v.kind {
	case strictjson.Object:
		return v.diffMembers(path, o)
	case strictjson.Array:
		if len(v.items) != len(o.items) {
			return differs
		}
		for i, item := range v.items {
			if d := item.diff(fmt.Sprintf("%s[%d]", path, i), o.items[i]); d != "" {
				return d
			}
		}
		return ""
	case strictjson.Number:
		if sameNumber(v.text, o.text) {
			return ""
		}
	case strictjson.String, strictjson.Bool, strictjson.Null:
		if v.text == o.text {
			return ""
		}
	}
	return differs
}

func (v value) diffMembers(path string, o value) string {
	all := maps.Clone(v.members)
	maps.Copy(all, o.members)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		at := path + "." + shown(name)
		mine, has := v.members[name]
		its, hasToo := o.members[name]
		switch {
		case !hasToo:
			return fmt.Sprintf("%s is %s in the checkpoint, not there in this run", at, mine.short())
		case !has:
			return fmt.Sprintf("%s is not there in the checkpoint, %s in this run", at, its.short())
		}
		if d := mine.diff(at, its); d != "" {
			return d
		}
	}
	return ""
}

// shown is a member name on one line, cut where it is very long.
func shown(name string) string {
	if len(name) <= 80 && strconv.Quote(name) == `"`+name+`"` {
		return name
	}
	return fmt.Sprintf("%.60q", name)
}

// short is a value on one line, cut where it is long.
func (v value) short() string {
	switch v.kind {
	case strictjson.Object:
		return fmt.Sprintf("an object of %d members", len(v.members))
	case strictjson.Array:
		return fmt.Sprintf("a list of %d", len(v.items))
	case strictjson.String:
		return fmt.Sprintf("%.80q", v.text)
	}
	return fmt.Sprintf("%.40s", v.text)
}

// sameNumber compares two numbers as serde_json holds them: whole numbers that fit an i64 or a u64 exactly, all others,
// and -0, as float64.
func sameNumber(a, b string) bool {
	wholeA, wholeB := whole(a), whole(b)
	if wholeA != wholeB {
		return false
	}
	if wholeA {
		return a == b // a whole number has one spelling
	}
	x, errA := strconv.ParseFloat(a, 64)
	y, errB := strconv.ParseFloat(b, 64)
	if errA != nil || errB != nil || math.IsInf(x, 0) || math.IsInf(y, 0) {
		return a == b
	}
	return x == y
}

func whole(s string) bool {
	if s == "-0" {
		return false
	}
	if _, err := strconv.ParseUint(s, 10, 64); err == nil {
		return true
	}
	_, err := strconv.ParseInt(s, 10, 64)
	return err == nil
}
