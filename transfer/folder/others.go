package folder

import (
	"cmp"
	"path/filepath"
	"slices"
	"strings"
	"unicode"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
)

// wanted says whether a file of this name could be part of a model: a shard, its index, or what goes along.
func wanted(name string) bool {
	_, along := kindOf(name)
	return along || strings.HasSuffix(name, identity.Extension)
}

// kindOf says whether a file that is no shard goes along with a model, and as what. The rule is by name and for the top
// level only: JSON, tokenizers, templates, Python code, and the documents that state what the model is and may be used
// for. Partial downloads, dot files and everything else stay behind.
func kindOf(name string) (Kind, bool) {
	upper := strings.ToUpper(name)
	switch {
	case strings.HasPrefix(name, "."), len(name) > identity.MaxFilename, strings.ContainsFunc(name, odd):
		return 0, false
	case startsWith(upper, "README", "LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY") && document(name):
		return Doc, true
	}
	switch filepath.Ext(name) {
	case ".json", ".jinja", ".model", ".tiktoken", ".txt":
		return Config, true
	case ".py":
		return Code, true
	case ".md":
		return Doc, true
	}
	return 0, false
}

func document(name string) bool {
	return slices.Contains([]string{"", ".md", ".txt", ".rst"}, filepath.Ext(name))
}

func startsWith(s string, prefixes ...string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(s, p) })
}

// odd runes do not survive as a file name everywhere.
func odd(r rune) bool {
	return r == '/' || r == '\\' || r == unicode.ReplacementChar || unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r)
}

// others keeps the files that go along, and warns of those that would but are links.
func (f *Folder) others(all map[string]listed) {
	var linked []string
	for name, l := range all {
		kind, along := kindOf(name)
		switch {
		case along && l.Mode == safetensors.Regular:
			l.Kind = kind
			f.Others = append(f.Others, l.File)
		case along && l.Mode == safetensors.Symlink:
			linked = append(linked, name)
		}
	}
	slices.SortFunc(f.Others, func(a, b File) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name))
	})
	if slices.Sort(linked); len(linked) > 0 {
		f.Warnings = append(f.Warnings, safetensors.Warning{Code: WarnLinked, Names: linked,
			Message: "links that do not go along: " + strings.Join(linked, ", ")})
	}
}
