package safetensors

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kiln-registry/kiln-registry/identity"
)

// Names with a meaning in a model folder.
const (
	IndexName         = "model.safetensors.index.json"
	SingleName        = "model.safetensors"
	adapterName       = "adapter_model.safetensors"
	adapterConfigName = "adapter_config.json"
)

// Mode is what kind of file a name in a listing is.
type Mode uint8

// The kinds of files. A link that is to be followed is listed as what it leads to.
const (
	Regular Mode = iota
	Symlink
	Dir
	Other // FIFO, socket, device
)

// Entry is one name of a listing.
type Entry struct {
	Name   string // with a slash: in a sub-folder; such entries are never chosen, they only help to explain
	Mode   Mode
	Size   int64  // bytes, of a regular file
	Target string // what a symbolic link says, for messages
	Broken bool   // the link leads nowhere, or in a circle
}

// Selection is the shard set of a folder.
type Selection struct {
	Shards    []string  // at least one, at most identity.MaxShards; in ascending byte order
	FromIndex bool      // the index document named them
	Extra     []string  // other safetensors files beside them, which are no part of the base; sorted
	Leftovers []string  // names of unfinished downloads (.incomplete), worth a mention; sorted
	Warnings  []Warning // conditions to report; in a fixed order
}

// Codes of Warning.
const (
	WarnExtra            = "extra_safetensors"
	WarnFamilyIncomplete = "numbered_family_incomplete"
	WarnCaseCollision    = "case_collision"
	WarnWindowsReserved  = "windows_reserved_name"
)

// Warning is a condition under which a selection holds but should be looked at.
type Warning struct {
	Code    string
	Names   []string // concerned or, of an incomplete family, missing; at most some of them
	Message string   // on one line
}

// Select says which entries of a folder are the shards of its base model, by the rules and in the order of Kiln's
// loader: the distinct files that model.safetensors.index.json names, if it exists; else model.safetensors alone; else
// every direct entry with the extension .safetensors. Names must be distinct; their order does not matter. index is
// called at most once, when the listing has a regular index document of at most MaxIndex bytes, and returns its bytes.
//
// A folder that Kiln would not load, or of which it could not make a shard manifest, is refused with an *Error. So is
// the folder of an adapter. An error of index is wrapped.
func Select(entries []Entry, index func() ([]byte, error)) (Selection, error) {
	l := newListing(entries)
	s, err := l.choose(index)
	if err == nil {
		s.Warnings = l.warnings(s)
	}
	return s, err
}

// Choose is Select without the warnings, for those who show them to nobody.
func Choose(entries []Entry, index func() ([]byte, error)) (Selection, error) {
	return newListing(entries).choose(index)
}

func (l listing) choose(index func() ([]byte, error)) (Selection, error) {
	names, fromIndex, err := l.candidates(index)
	if err != nil {
		return Selection{}, err
	}
	if err := l.check(names); err != nil {
		return Selection{}, err
	}
	s := Selection{Shards: names, FromIndex: fromIndex, Leftovers: l.leftovers}
	next := 0 // of names, which are sorted as well
	for _, n := range l.shardLike {
		for next < len(names) && names[next] < n {
			next++
		}
		if next == len(names) || names[next] != n {
			s.Extra = append(s.Extra, n)
		}
	}
	return s, nil
}

// listing is a folder's direct entries.
type listing struct {
	files     map[string]Entry
	shardLike []string // with the extension .safetensors, sorted
	leftovers []string // with the extension .incomplete, sorted
	below     []string // sub-folders with safetensors files in them, sorted
}

func newListing(entries []Entry) listing {
	l := listing{files: make(map[string]Entry, len(entries))}
	for _, e := range entries {
		switch i := strings.LastIndexByte(e.Name, '/'); {
		case i >= 0 && hasExtension(e.Name[i+1:]):
			l.below = append(l.below, e.Name[:i])
		case i >= 0:
		default:
			l.files[e.Name] = e
			if hasExtension(e.Name) {
				l.shardLike = append(l.shardLike, e.Name)
			}
			if strings.HasSuffix(e.Name, ".incomplete") {
				l.leftovers = append(l.leftovers, e.Name)
			}
		}
	}
	slices.Sort(l.shardLike)
	slices.Sort(l.leftovers)
	slices.Sort(l.below)
	l.below = slices.Compact(l.below)
	return l
}

// hasExtension reports whether the extension of name is exactly safetensors. A file called just .safetensors has none.
func hasExtension(name string) bool {
	return strings.HasSuffix(name, identity.Extension) && name != identity.Extension
}

// candidates returns the names of the set, sorted, before their files are looked at.
func (l listing) candidates(index func() ([]byte, error)) (names []string, fromIndex bool, err error) {
	if e, ok := l.files[IndexName]; ok {
		names, err = readIndex(e, index)
		return names, true, err
	}
	if _, ok := l.files[SingleName]; ok {
		return []string{SingleName}, false, nil
	}
	switch n := len(l.shardLike); {
	case n == 0:
		return nil, false, l.noShards()
	case n > identity.MaxShards:
		return nil, false, refuse(CodeTooManyShards, "%d safetensors files, at most %d can make up a base", n,
			identity.MaxShards)
	}
	return slices.Clone(l.shardLike), false, nil
}

// noShards explains why nothing was found.
func (l listing) noShards() error {
	e := refuse(CodeNoShards, "no safetensors files")
	if len(l.below) > 0 {
		e.Names = l.below
		e.Msg += "; there are some in these sub-folders, each of which can be given on its own: " + some(l.below)
	}
	if len(l.leftovers) > 0 {
		e.Msg += "; unfinished downloads are there: " + some(l.leftovers)
	}
	return e
}

// check looks at the files of the set.
func (l listing) check(names []string) error {
	_, isAdapter := slices.BinarySearch(names, adapterName)
	if _, ok := l.files[adapterConfigName]; ok && isAdapter {
		return refuseFile(CodeAdapterNotBase, adapterName,
			"the folder holds an adapter (%s lies beside it), not a base model", adapterConfigName)
	}
	if err := checkNames(names); err != nil {
		return err
	}
	if err := l.checkMissing(names); err != nil {
		return err
	}
	for _, n := range names {
		if err := l.checkFile(l.files[n]); err != nil {
			return err
		}
	}
	return nil
}

// checkNames refuses names that can't stand in a shard manifest.
func checkNames(names []string) error {
	var bad []string
	var first error
	for _, n := range names {
		if err := identity.CheckFilename(n); err != nil {
			bad = append(bad, n)
			if first == nil {
				first = err
			}
		}
	}
	if first == nil {
		return nil
	}
	e := refuse(CodeNotPortableName, "%v", first)
	if e.Names = bad; len(bad) > 1 {
		e.Msg += "; all such names: " + some(bad)
	}
	return e
}

func (l listing) checkMissing(names []string) error {
	var missing, partial []string
	for _, n := range names {
		if _, ok := l.files[n]; !ok {
			missing = append(missing, n)
			if _, ok := l.files[n+".incomplete"]; ok {
				partial = append(partial, n+".incomplete")
			}
		}
	}
	if len(missing) == 0 {
		return nil
	}
	e := refuse(CodeIndexMissingFile, "%s names %d files, %d are missing: %s", IndexName, len(names), len(missing),
		quoteAll(missing))
	if e.Names = missing; len(partial) > 0 {
		e.Msg += "; unfinished downloads are there: " + some(partial)
	}
	return e
}

func (l listing) checkFile(e Entry) error {
	switch {
	case e.Mode == Symlink:
		return refuseLink(e)
	case e.Mode == Dir:
		return refuseFile(CodeNotRegular, e.Name, "a folder, must be a regular file")
	case e.Mode != Regular:
		return refuseFile(CodeNotRegular, e.Name, "neither a regular file nor a folder")
	case e.Size <= 0:
		return refuseFile(CodeEmptyShard, e.Name, "the file is empty")
	}
	return nil
}

// refuseLink explains why a link is not taken, and what to do.
func refuseLink(e Entry) error {
	msg := "a symbolic link"
	if e.Target != "" {
		msg += fmt.Sprintf(" to %+.300q", e.Target)
	}
	if e.Broken {
		return refuseFile(CodeSymlink, e.Name, "%s, which is missing or leads in a circle", msg)
	}
	if strings.Contains(e.Target, "blobs/") {
		msg += ", as in a Hugging Face hub cache"
	}
	return refuseFile(CodeSymlink, e.Name, "%s; model files must be regular", msg)
}

// some joins names for a message, shortened when there are many.
func some(names []string) string {
	const most = 10
	if len(names) <= most {
		return quoteAll(names)
	}
	return fmt.Sprintf("%s and %d more", quoteAll(names[:most]), len(names)-most)
}
