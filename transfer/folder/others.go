package folder

import (
	"cmp"
	"io/fs"
	"maps"
	"os"
	"path"
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

// kindOf says whether a file that is no shard goes along with a model, and as what. The rule is by name: JSON, tokenizers, templates, Python code, and the documents that state what the model is and may be used
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

// maxDepth is how many folders deep files go along with a model.
const maxDepth = 8

// inside lists the folders in a model's: a file there goes along as one at the top would, under its path with slashes.
// Folders that are links or begin with a dot are not looked into. One that holds weights of its own stays behind with
// all that is in it, since it is another model or a checkpoint, and is named in apart.
func (f *Folder) inside(all map[string]listed, dir string, depth int) (found map[string]listed, apart []string, err error) {
	found = map[string]listed{}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if all[name].Mode != safetensors.Dir || strings.HasPrefix(name, ".") || strings.ContainsFunc(name, odd) {
			continue
		}
		at := path.Join(dir, name)
		sub, err := os.ReadDir(filepath.Join(f.Dir, filepath.FromSlash(at)))
		if err != nil {
			return nil, nil, err
		}
		if slices.ContainsFunc(sub, func(d fs.DirEntry) bool { return isWeight(d.Name()) }) || depth == maxDepth {
			apart = append(apart, at)
			continue
		}
		members, err := f.list(at, sub)
		if err != nil {
			return nil, nil, err
		}
		deeper, left, err := f.inside(members, at, depth+1)
		if err != nil {
			return nil, nil, err
		}
		for _, l := range members {
			if _, along := kindOf(path.Base(l.File.Name)); along && len(l.File.Name) <= identity.MaxFilename {
				found[l.File.Name] = l
			}
		}
		maps.Copy(found, deeper)
		apart = append(apart, left...)
	}
	return found, apart, nil
}

// isWeight says whether a file is one of the usual containers of weights.
func isWeight(name string) bool {
	switch filepath.Ext(name) {
	case identity.Extension, ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack":
		return true
	}
	return false
}

// others keeps the files that go along, and warns of those that would but are links or lie beside other weights.
func (f *Folder) others(all map[string]listed) error {
	deeper, apart, err := f.inside(all, "", 1)
	if err != nil {
		return err
	}
	if len(apart) > 0 {
		f.Warnings = append(f.Warnings, safetensors.Warning{Code: WarnApart, Names: apart,
			Message: "folders with weights of their own do not go along: " + strings.Join(apart, ", ")})
	}
	all = maps.Clone(all)
	maps.Copy(all, deeper)
	var linked []string
	for name, l := range all {
		kind, along := kindOf(path.Base(name))
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
	return nil
}
