package artifact

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

// StampOptions says how a stamp is made. The zero value is ready to use.
type StampOptions struct {
	Options
	Name  string // of the adapter; empty: that of its folder
	Force bool   // write the manifest of an adapter anew, whatever it says
}

// Stamped is what a stamp has made.
type Stamped struct {
	Path      string             `json:"path"` // of the document
	Aggregate identity.Aggregate `json:"aggregate_sha256"`
	Digest    identity.Digest    `json:"sha256"`  // of the document, as it is now
	Changed   bool               `json:"changed"` // false: it said so before
	Warnings  []Warning          `json:"-"`
}

// Stamp writes the full manifest of a base into what is at path. In the folder of an adapter, of any trainer, that is
// its adapter_manifest.json, which is made if there is none. A file is a receipt, an eval job or result or an adapter
// manifest: the manifest goes in, and no other byte changes. A document that names another base, or other files, is
// left alone. The document is replaced whole or not at all, and durable when this returns nil.
//
// The errors are those of Read, and of durable.Disk.
func Stamp(ctx context.Context, path string, base identity.Manifest, o StampOptions) (Stamped, error) {
	info, err := os.Stat(path)
	if err != nil {
		return Stamped{}, err
	}
	if info.IsDir() {
		return stampAdapter(ctx, path, base, o)
	}
	if o.Name != "" {
		return Stamped{}, &Error{Code: CodeOtherName, Msg: fmt.Sprintf("%q is a file, which is not renamed: --name %q", path,
			o.Name), Hint: "--name goes with the folder of an adapter"}
	}
	return stampFile(path, base)
}

// stampAdapter makes the manifest of an adapter, or puts the base into one that lacks it.
func stampAdapter(ctx context.Context, dir string, base identity.Manifest, o StampOptions) (Stamped, error) {
	a, err := openAdapter(dir, !o.Force, o.Options)
	if err != nil {
		return Stamped{}, cmp.Or(folder.CheckKind(dir, api.KindAdapter), forced(err))
	}
	d := &draft{Artifact: Artifact{folder: a.folder}}
	for _, name := range []string{a.names.Config, a.names.Model, a.names.Receipt} {
		if m, ok := a.members[name]; ok {
			d.parts = append(d.parts, part{name: name, file: m.File, text: a.texts[name]})
		}
	}
	if err := d.hash(ctx, o.Watch); err != nil {
		return Stamped{}, err
	}
	sums := map[string]identity.Digest{}
	for _, p := range d.parts {
		sums[p.name] = p.digest
	}
	old, text, err := a.stamped(sums, base, o.Name)
	if err != nil {
		return Stamped{}, err
	}
	s, err := publish(filepath.Join(a.folder.Dir, documents.AdapterManifestFile), old, text, 0o644)
	s.Aggregate, s.Warnings = base.Aggregate, a.warnings
	return s, err
}

// forced adds what to do about a manifest that is there and can't be read.
func forced(err error) error {
	if e, ok := errors.AsType[*documents.Error](err); ok && e.Kind == documents.KindAdapterManifest {
		return &Error{Code: CodeOtherDocument, Msg: unhinted(e), Hint: "--force writes the manifest anew"}
	}
	return err
}

// unhinted is what an error says of a document, without the hint and the rule: its own come after it here.
func unhinted(e *documents.Error) string { return fmt.Sprintf("%s: %s: %s", e.Kind, e.Path, e.Msg) }

// stamped returns the manifest that is there, nil if none is or it does not count, and the one that should be.
func (a *adapter) stamped(sums map[string]identity.Digest, base identity.Manifest, name string) (
	old, text []byte, err error,
) {
	if a.manifest == nil {
		text, err = a.newManifest(sums, base, name)
		return nil, text, err
	}
	if name != "" && name != a.manifest.Name {
		return nil, nil, &Error{Code: CodeOtherName, Msg: fmt.Sprintf("its %s calls it %q, and --name is %q",
			documents.AdapterManifestFile, a.manifest.Name, name), Hint: "--force writes the manifest anew, with that name"}
	}
	if err := a.check(sums); err != nil {
		hint := "--force writes the manifest anew, for the files that are there"
		msg := err.Error()
		if e, ok := errors.AsType[*documents.Error](err); ok {
			msg = unhinted(e)
		}
		return nil, nil, &Error{Code: CodeOtherFiles, Msg: msg, Hint: hint}
	}
	old = a.texts[documents.AdapterManifestFile]
	text, err = documents.StampAdapterManifest(old, base)
	return old, text, otherBase(err)
}

// otherBase says that a document names another base than the one to stamp it with.
func otherBase(err error) error {
	if e, ok := errors.AsType[*documents.Error](err); ok && e.Rule == documents.RuleBaseConflict {
		hint := "check --base; of an adapter, --force writes the manifest anew"
		msg := unhinted(e)
		if e.Said != "" { // two places, of which the one is what it is stamped with
			msg = fmt.Sprintf("the %s names base %s, and it is to be stamped with %s", e.OtherAt, e.Other, e.Said)
		}
		return &Error{Code: CodeOtherBase, Msg: msg, Hint: hint}
	}
	return err
}

// newManifest makes a manifest of what is known: the files and, as Kiln does, what the receipt says.
func (a *adapter) newManifest(sums map[string]identity.Digest, base identity.Manifest, name string) ([]byte, error) {
	if name == "" {
		dir, err := filepath.Abs(a.folder.Dir) // . and .. are no names
		if err != nil {
			return nil, err
		}
		name = filepath.Base(dir)
	}
	var receipt identity.Digest
	if a.receipt != nil {
		receipt = a.receipt.Digest
	}
	m := documents.NewAdapterManifest(name, sums[a.names.Model], sums[a.names.Config], receipt, base)
	if r := a.receipt; r != nil {
		m.Parent, m.KilnCommit = r.Parent.Path, r.KilnCommit
		m.ModelConfig, m.TrainingTemplate = r.ModelConfig, r.TrainingTemplate
		m.Provenance, m.Precision = r.Provenance, r.Precision
		m.TrainingData, m.TrainingDataSource = r.TrainingData, r.TrainingDataSource
		m.TrainingDataPath = r.TrainingDataPath
		if err := m.CheckReceipt(*r); err != nil {
			return nil, err
		}
	}
	return m.Document()
}

// stampers put a base into a document, by the member that tells what the document is.
var stampers = map[string]func([]byte, identity.Manifest) ([]byte, error){
	"receipt_type":  documents.StampReceipt,
	"manifest_type": documents.StampAdapterManifest,
	"":              documents.StampEval,
}

func stampFile(path string, base identity.Manifest) (Stamped, error) {
	if filepath.Ext(path) == rowsExt {
		return Stamped{}, &Error{Code: CodeOtherDocument, Hint: "stamp the eval job, and export the rows of it again",
			Msg: fmt.Sprintf("%q holds outcome rows, which are not stamped", path)}
	}
	_, file, old, err := one(path, documents.MaxEval, Options{})
	if err != nil {
		return Stamped{}, err
	}
	if file.Name == documents.CheckpointFile {
		return Stamped{}, &Error{Code: CodeOtherDocument, Msg: "a checkpoint manifest is not stamped",
			Hint: "a run that resumes compares it as it was written; push it with --legacy"}
	}
	text, err := stampers[memberOf(old)](old, base)
	if err != nil {
		return Stamped{}, otherBase(err)
	}
	if err := unnamed(path, old, text); err != nil {
		return Stamped{}, err
	}
	info, err := os.Lstat(path)
	if err != nil {
		return Stamped{}, err
	}
	s, err := publish(path, old, text, info.Mode().Perm())
	s.Aggregate = base.Aggregate
	return s, err
}

// memberOf returns which of the members that tell a document's type it has. It is no check: that is the reader's.
func memberOf(text []byte) string {
	var members map[string]json.RawMessage
	if json.Unmarshal(text, &members) == nil {
		for name := range stampers {
			if _, ok := members[name]; ok {
				return name
			}
		}
	}
	return ""
}

// unnamed refuses to change a receipt whose bytes the adapter manifest beside it names.
func unnamed(path string, old, text []byte) error {
	beside := filepath.Join(filepath.Dir(path), documents.AdapterManifestFile)
	if bytes.Equal(old, text) || filepath.Base(path) == documents.AdapterManifestFile {
		return nil
	}
	_, _, b, err := one(beside, documents.MaxDocument, Options{})
	if err != nil {
		return nil
	}
	m, err := documents.ParseAdapterManifest(b)
	if err != nil || m.Receipt != identity.Sum(old) {
		return nil
	}
	return &Error{
		Code: CodeReceiptNamed,
		Msg:  fmt.Sprintf("%s names the bytes of %s, %s", beside, filepath.Base(path), m.Receipt),
		Hint: fmt.Sprintf("kiln-push stamp %s stamps the adapter manifest, which is enough", filepath.Dir(path)),
	}
}

// publish makes text the content of the file at path, unless it is old, which is what is there.
func publish(path string, old, text []byte, mode os.FileMode) (Stamped, error) {
	s := Stamped{Path: path, Digest: identity.Sum(text), Changed: old == nil || !bytes.Equal(old, text)}
	if !s.Changed {
		return s, nil
	}
	if info, err := os.Lstat(path); err == nil && !info.Mode().IsRegular() {
		return s, &Error{Code: CodeNotRegular, Msg: fmt.Sprintf("%q is no regular file", path), Hint: "name the file itself"}
	}
	if err := (durable.Disk{}).WriteFile(path, text, mode); err != nil {
		return s, fmt.Errorf("write %s: %w", path, err)
	}
	return s, nil
}
