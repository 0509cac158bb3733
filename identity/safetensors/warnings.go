package safetensors

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/kiln-registry/kiln-registry/identity"
)

// warnings returns the conditions to report about a selection.
func (l listing) warnings(s Selection) (w []Warning) {
	if len(s.Extra) > 0 {
		w = append(w, l.extraWarning(s.Extra))
	}
	if !s.FromIndex {
		w = append(w, familyWarnings(s.Shards)...)
	}
	return append(append(w, collisionWarnings(s.Shards)...), reservedWarnings(s.Shards)...)
}

func (l listing) extraWarning(extra []string) Warning {
	const most = 10
	var list []string
	for _, n := range extra[:min(len(extra), most)] {
		text := quote(n)
		if e := l.files[n]; e.Mode == Regular {
			text = fmt.Sprintf("%s (%d bytes)", text, e.Size)
		}
		list = append(list, text)
	}
	if more := len(extra) - most; more > 0 {
		list = append(list, fmt.Sprintf("%d more", more))
	}
	return Warning{WarnExtra, extra, "not part of the base: " + strings.Join(list, ", ")}
}

// family is a set of files name-00001-of-00003.safetensors that share all but the first number.
type family struct {
	stem  string // up to the number
	tail  string // from -of- on
	width int    // digits of the number
}

// member splits a name of a family; false for other names.
func member(name string) (f family, number, total int, ok bool) {
	const maxDigits = 6 // more can't be a count of files
	rest := strings.TrimSuffix(name, identity.Extension)
	at := strings.LastIndex(rest, "-of-")
	if at < 0 {
		return family{}, 0, 0, false
	}
	dash := strings.LastIndexByte(rest[:at], '-')
	first, last := rest[dash+1:at], rest[at+len("-of-"):]
	if dash < 0 || !allDigits(first) || !allDigits(last) || len(first) > maxDigits || len(last) > maxDigits {
		return family{}, 0, 0, false
	}
	number, _ = strconv.Atoi(first)
	total, _ = strconv.Atoi(last)
	return family{rest[:dash+1], name[at:], len(first)}, number, total, true
}

func allDigits(s string) bool { return s != "" && strings.Trim(s, "0123456789") == "" }

// familyWarnings names the files that numbered families lack.
func familyWarnings(shards []string) (w []Warning) {
	const most = 10
	have := map[family]map[int]bool{}
	totals := map[family]int{}
	var order []family
	for _, n := range shards {
		f, number, total, ok := member(n)
		if !ok {
			continue
		}
		if have[f] == nil {
			have[f], totals[f] = map[int]bool{}, total
			order = append(order, f)
		}
		if 1 <= number && number <= total {
			have[f][number] = true
		}
	}
	for _, f := range order {
		lacking := totals[f] - len(have[f])
		var names []string
		for i := 1; i <= totals[f] && len(names) < min(lacking, most); i++ {
			if !have[f][i] {
				names = append(names, fmt.Sprintf("%s%0*d%s", f.stem, f.width, i, f.tail))
			}
		}
		if lacking == 0 {
			continue
		}
		text := fmt.Sprintf("%d of %d files of a numbered set are missing: %s", lacking, totals[f], quoteAll(names))
		if lacking > most {
			text += fmt.Sprintf(" and %d more", lacking-most)
		}
		w = append(w, Warning{WarnFamilyIncomplete, names, text})
	}
	return w
}

// collisionWarnings names shards that are one file where letter case does not count.
func collisionWarnings(shards []string) (w []Warning) {
	groups := map[string][]string{}
	var order []string
	for _, n := range shards {
		key := strings.ToLower(n)
		if groups[key] = append(groups[key], n); len(groups[key]) == 2 {
			order = append(order, key)
		}
	}
	for _, key := range order {
		w = append(w, Warning{WarnCaseCollision, groups[key],
			"names that differ only in letter case are one file on some volumes: " + some(groups[key])})
	}
	return w
}

// reservedWarnings names shards that Windows can't store.
func reservedWarnings(shards []string) []Warning {
	var names []string
	for _, n := range shards {
		if stem, _, _ := strings.Cut(n, "."); isReserved(strings.ToLower(stem)) {
			names = append(names, n)
		}
	}
	if names == nil {
		return nil
	}
	return []Warning{{WarnWindowsReserved, names, "names that Windows keeps for devices: " + some(names)}}
}

func isReserved(stem string) bool {
	switch stem {
	case "con", "prn", "aux", "nul":
		return true
	}
	return len(stem) == 4 && (stem[:3] == "com" || stem[:3] == "lpt") && '1' <= stem[3] && stem[3] <= '9'
}
