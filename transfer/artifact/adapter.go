package artifact

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

// maxListed bounds the listing of an adapter's folder.
const maxListed = 10_000

// Codes of warnings about adapters.
const (
	WarnUnproven  = "base_unproven"    // nothing says from which bytes it was trained
	WarnDoRA      = "dora"             // some servers can't serve those
	WarnResized   = "vocab_resized"    // it holds embeddings of its own
	WarnPrefix    = "prefix_unusual"   // its modules are not called as those of a plain language model
	WarnOnAdapter = "base_is_adapter"  // what it names as its base is an adapter
	WarnNotFinal  = "eval_not_final"   // an eval that was not at its end
	WarnLinks     = folder.WarnLinked  // links that do not go along
	WarnApart     = folder.WarnApart   // folders that do not go along
	WarnWeights   = "weights_left_out" // other weights beside those of the adapter
	WarnNames     = "base_names"       // the file names of the base are those that its registry holds it under
	WarnFiles     = "files_left_out"   // other files that do not go along, as the state of an optimizer
)

// usualPrefix begins the names of the tensors of an adapter for a plain language model.
const usualPrefix = "base_model.model.model."

// adapter is the folder of an adapter, with its documents read.
type adapter struct {
	folder   *folder.Folder
	members  map[string]folder.Member
	names    documents.AdapterFiles // of its files; no receipt: empty
	manifest *documents.AdapterManifest
	config   documents.AdapterConfig
	receipt  *documents.Receipt
	texts    map[string][]byte // of the documents, by name
	warnings []Warning
}

// openAdapter reads the documents of an adapter and the header of its weights. use says whether an
// adapter_manifest.json counts.
func openAdapter(dir string, use bool, o Options) (*adapter, error) {
	f, found, err := folder.List(dir, false, maxListed, folder.Options{FollowLinks: o.FollowLinks})
	if errors.Is(err, folder.ErrTooMany) {
		return nil, &Error{Code: CodeTooManyFiles, Msg: err.Error(), Hint: "name the folder that the adapter was saved to"}
	}
	if err != nil {
		return nil, err
	}
	a := &adapter{folder: f, members: map[string]folder.Member{}, texts: map[string][]byte{},
		names: documents.AdapterFiles{Model: documents.AdapterWeightsFile, Config: documents.AdapterConfigFile}}
	for _, m := range found {
		a.members[m.Name] = m
	}
	reads := []func() error{a.readConfig, a.readReceipt, a.readHeader}
	if use {
		reads = append([]func() error{a.readManifest}, reads...)
	}
	for _, read := range reads {
		if err := read(); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// has says whether a regular file of that name is there. A link in its place is an error.
func (a *adapter) has(name string) (bool, error) {
	m, ok := a.members[name]
	switch {
	case !ok:
		return false, nil
	case m.Mode == safetensors.Symlink:
		return false, &Error{Code: CodeNotRegular, Names: []string{name},
			Msg: fmt.Sprintf("%q is a link to %q", name, m.Target), Hint: "--follow-links reads what links lead to"}
	case m.Mode != safetensors.Regular:
		return false, &Error{Code: CodeNotRegular, Names: []string{name}, Msg: fmt.Sprintf("%q is no regular file", name)}
	}
	return true, nil
}

// read reads a document if it is there.
func (a *adapter) read(name string) (text []byte, err error) {
	if ok, err := a.has(name); !ok {
		return nil, err
	}
	text, err = document(a.folder, a.members[name].File, documents.MaxDocument)
	if err == nil {
		a.texts[name] = text
	}
	return text, err
}

func (a *adapter) readManifest() error {
	text, err := a.read(documents.AdapterManifestFile)
	if text == nil || err != nil {
		return err
	}
	m, err := documents.ParseAdapterManifest(text)
	if err != nil {
		return err
	}
	a.manifest, a.names = &m, m.Files
	return nil
}

func (a *adapter) readConfig() error {
	text, err := a.read(a.names.Config)
	if err != nil {
		return err
	}
	if text == nil {
		if several := a.adaptersInside(); len(several) > 0 {
			return &Error{Code: CodeSeveral, Names: several, Msg: fmt.Sprintf("%s holds %d adapters: %s", a.folder.Dir,
				len(several), strings.Join(several, ", ")), Hint: "push each of them alone, by its own folder"}
		}
		return &Error{Code: CodeNoConfig, Names: []string{a.names.Config}, Msg: fmt.Sprintf("%s holds no %s", a.folder.Dir,
			a.names.Config), Hint: "name the folder that the adapter was saved to, with its configuration"}
	}
	a.config, err = documents.ParseAdapterConfig(text)
	return err
}

// adaptersInside names the folders inside that hold an adapter.
func (a *adapter) adaptersInside() (names []string) {
	for _, name := range sortedNames(a.members) {
		if a.members[name].Mode != safetensors.Dir {
			continue
		}
		if _, err := os.Stat(filepath.Join(a.folder.Dir, name, documents.AdapterConfigFile)); err == nil {
			names = append(names, name)
		}
	}
	return names
}

func (a *adapter) readReceipt() error {
	name := a.names.Receipt
	if name == "" {
		name = documents.ReceiptFile
	}
	text, err := a.read(name)
	if text == nil || err != nil {
		return err // that a manifest names a receipt which is not there is found by its own check
	}
	r, err := documents.ParseReceipt(text)
	if err != nil {
		return err
	}
	a.names.Receipt, a.receipt = name, &r
	return nil
}

// readHeader reads the header of the weights: whether they are those of an adapter, and what a server should know.
func (a *adapter) readHeader() error {
	ok, err := a.has(a.names.Model)
	if err != nil {
		return err
	}
	if !ok {
		return a.noWeights()
	}
	h, err := a.folder.HeaderOf(a.members[a.names.Model].File)
	if err != nil {
		return err
	}
	var lora, dora, embeddings, odd []string
	for _, t := range h.Tensors {
		switch name := strings.ToLower(t.Name); {
		case strings.Contains(name, "lora_magnitude_vector"):
			dora = append(dora, t.Name)
		case strings.Contains(name, "lora"):
			lora = append(lora, t.Name)
		case strings.HasSuffix(name, "embed_tokens.weight"), strings.HasSuffix(name, "lm_head.weight"):
			embeddings = append(embeddings, t.Name)
		}
		if !strings.HasPrefix(t.Name, usualPrefix) && !strings.HasSuffix(t.Name, "lm_head.weight") {
			odd = append(odd, t.Name)
		}
	}
	if kind := a.config.Type; len(lora) == 0 && (kind == "" || strings.EqualFold(kind, "LORA")) {
		return &Error{Code: CodeNoTensors, Names: []string{a.names.Model}, Msg: fmt.Sprintf(
			"%q holds %d tensors, none of them of a LoRA adapter", a.names.Model, len(h.Tensors)),
			Hint: "a base model is pushed with kiln-push base"}
	}
	if a.config.DoRA || len(dora) > 0 {
		a.warn(WarnDoRA, "it is a DoRA adapter, which some servers can't serve")
	}
	if len(embeddings) > 0 {
		a.warn(WarnResized, "it holds whole embeddings, %.200q: it may need a base of another vocabulary size, and the same "+
			"aggregate does not promise that it loads", embeddings)
	}
	if len(odd) > 0 {
		a.warn(WarnPrefix, "its modules are not called as those of a plain language model, as %.200q: check that the "+
			"server knows them", odd[0])
	}
	return nil
}

func (a *adapter) noWeights() error {
	e := &Error{Code: CodeNoWeights, Names: []string{a.names.Model}, Hint: "the adapter was not saved to its end",
		Msg: fmt.Sprintf("%s holds no %s", a.folder.Dir, a.names.Model)}
	for _, name := range sortedNames(a.members) {
		if ext := filepath.Ext(name); ext == ".bin" || ext == ".pt" || ext == ".pth" {
			e.Msg += fmt.Sprintf("; %q is a pickle, which is not opened", name)
			e.Hint = "save it as safetensors: in PEFT, model.save_pretrained(DIR, safe_serialization=True)"
			break
		}
	}
	return e
}

func (a *adapter) warn(code, format string, args ...any) {
	a.warnings = append(a.warnings, Warning{code, fmt.Sprintf(format, args...)})
}

// readAdapter reads the folder of an adapter: with an adapter_manifest.json as Kiln writes it, or as PEFT saves it. The
// documents, tokenizer and templates beside it go along; other weights and folders do not.
func readAdapter(dir string, o Options) (*draft, error) {
	a, err := openAdapter(dir, true, o)
	if err != nil {
		return nil, err
	}
	d := &draft{
		Artifact: Artifact{BaseText: a.config.BaseName, folder: a.folder}, kiln: a.manifest != nil || a.receipt != nil,
		hint: stampHint(dir),
	}
	if a.receipt != nil {
		d.Name = a.receipt.Name
		d.claims = append(d.claims, a.receipt.Base())
	}
	if a.manifest != nil {
		d.Name = a.manifest.Name
		d.claims = append([]documents.Binding{a.manifest.Base()}, d.claims...)
	}
	a.list(d)
	a.namesAdapter()
	if !d.kiln && o.Base.Aggregate.IsZero() {
		a.warn(WarnUnproven, "nothing says from which bytes it was trained: --base names its base")
	}
	d.Warnings, d.check = a.warnings, a.check
	return d, nil
}

// list makes parts of the files of an adapter, and names what stays behind.
func (a *adapter) list(d *draft) {
	var links, apart, weights, files []string
	for _, name := range sortedNames(a.members) {
		m := a.members[name]
		kind, along := folder.Along(name)
		switch {
		case name == a.names.Model:
			kind, along = folder.Weight, true
		case name == a.names.Receipt:
			kind, along = folder.Doc, true
		case name == a.names.Config:
			kind, along = folder.Config, true
		case m.Mode == safetensors.Dir && !strings.HasPrefix(name, "."):
			apart = append(apart, name)
			continue
		case along && m.Mode == safetensors.Symlink:
			links = append(links, name)
			continue
		case m.Mode == safetensors.Regular && strings.HasSuffix(name, identity.Extension):
			weights = append(weights, name)
			continue
		}
		switch {
		case along && m.Mode == safetensors.Regular:
			d.parts = append(d.parts, part{name: name, kind: kind, file: m.File, text: a.texts[name]})
		case !strings.HasPrefix(name, "."):
			files = append(files, name)
		}
	}
	for _, left := range []struct {
		code, what string
		names      []string
	}{
		{WarnLinks, "links do not go along", links}, {WarnApart, "folders do not go along", apart},
		{WarnWeights, "other weights do not go along", weights}, {WarnFiles, "other files do not go along", files},
	} {
		if len(left.names) > 0 {
			a.warn(left.code, "%s: %s", left.what, strings.Join(left.names, ", "))
		}
	}
}

// namesAdapter warns where base_model_name_or_path leads to the folder of another adapter.
func (a *adapter) namesAdapter() {
	name := a.config.BaseName
	if name == "" {
		return
	}
	if !filepath.IsAbs(name) {
		name = filepath.Join(a.folder.Dir, name)
	}
	if _, err := os.Stat(filepath.Join(name, documents.AdapterConfigFile)); err == nil {
		a.warn(WarnOnAdapter, "it was trained on another adapter, %q: it needs both that one and its base", a.config.BaseName)
	}
}

// check compares the documents with the files and with each other. A receipt without a manifest is held against the
// weights in the same way.
func (a *adapter) check(sums map[string]identity.Digest) error {
	m := a.manifest
	if m == nil {
		m = &documents.AdapterManifest{Weights: sums[a.names.Model]}
	} else if err := m.CheckFiles(sums); err != nil {
		return err
	}
	if a.receipt == nil {
		return nil
	}
	return m.CheckReceipt(*a.receipt)
}
