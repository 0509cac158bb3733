package classify

import (
	"path"
	"reflect"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
)

// adapter reads an adapter: with an adapter_manifest.json as Kiln writes it, with a receipt, or as PEFT saves it. What
// adapter_config.json calls the base is kept as text.
func (m *made) adapter() error {
	names := documents.AdapterFiles{Model: documents.AdapterWeightsFile, Config: documents.AdapterConfigFile}
	facts := &api.AdapterFacts{}
	m.Facts.Adapter = facts
	stated, err := m.adapterManifest(facts)
	if err != nil {
		return err
	}
	if stated != nil {
		names = stated.Files
		if err := checkNames(names); err != nil {
			return err
		}
	}
	if err := m.adapterConfig(names.Config, facts); err != nil {
		return err
	}
	receipt, err := m.adapterReceipt(names.Receipt, facts)
	if err != nil {
		return err
	}
	if stated != nil || receipt != nil && !receipt.Output.Weights.IsZero() { // which say what the weights are
		if err := m.files.checkPlain(names.Model); err != nil {
			return err
		}
	}
	sums := m.files.sums()
	if stated != nil {
		if err := stated.CheckFiles(sums); err != nil {
			return refused(documents.AdapterManifestFile, err)
		}
	} else {
		facts.Weights, facts.Config = sums[names.Model], sums[names.Config]
	}
	if reflect.ValueOf(*facts).IsZero() {
		m.Facts.Adapter = nil // it has no file that this could be read from
	}
	if _, err := strongest(m.claims...); err != nil || receipt == nil {
		return err
	}
	if stated != nil {
		return refused(documents.AdapterManifestFile, stated.CheckReceipt(*receipt))
	}
	return checkOutput(*receipt, facts.Weights, names.Model)
}

// checkNames refuses an adapter manifest that calls a document as weights are called, which are read as none.
func checkNames(names documents.AdapterFiles) error {
	for member, name := range map[string]string{"adapter_config": names.Config, "train_receipt": names.Receipt} {
		if isWeights(name) {
			return api.Errorf(api.CodeManifestInvalid, "%s $.files.%s: %.80q is no name of a document",
				documents.AdapterManifestFile, member, name).With(api.BadDocument{Reason: api.CodeDocumentInvalid,
				File: documents.AdapterManifestFile, Path: "$.files." + member, Rule: documents.RuleName})
		}
	}
	return nil
}

// checkOutput refuses a train_receipt.json of other weights than lie beside it.
func checkOutput(r documents.Receipt, weights identity.Digest, file string) error {
	if out := r.Output.Weights; !out.IsZero() && out != weights {
		return disagree(api.CodeDocumentConflict, out.String(),
			documents.ReceiptFile+" $.adapters.output.adapter_model_sha256", none(weights), file)
	}
	return nil
}

// others reads the documents at the top that go by a name of Kiln's, and that the kind of the artifact has no use for:
// what they say about the base counts as well.
func (m *made) others() error {
	if f, ok := m.other(documents.AdapterManifestFile); ok {
		d, err := readAs(m, f, documents.MaxDocument, documents.ParseAdapterManifest)
		if err != nil {
			return err
		}
		m.claims = append(m.claims, said(f.name, d.Base()))
	}
	if f, ok := m.other(documents.CheckpointFile); ok {
		d, err := readAs(m, f, documents.MaxDocument, documents.ParseCheckpoint)
		if err != nil {
			return err
		}
		m.claims = append(m.claims, said(f.name, d.Base()))
	}
	f, ok := m.other(documents.ReceiptFile)
	if !ok {
		return nil
	}
	d, err := readAs(m, f, documents.MaxDocument, documents.ParseReceipt)
	if err != nil {
		return err
	}
	m.claims = append(m.claims, said(f.name, d.Base()))
	if a := m.Facts.Adapter; a != nil {
		return checkOutput(d, a.Weights, documents.AdapterManifestFile+" $.safetensors_hash")
	}
	return nil
}

// other returns the document of that name, if it was not read.
func (m *made) other(name string) (file, bool) {
	f, ok := m.files.document(name)
	return f, ok && !m.seen[name]
}

// none is the text of a digest, or says that there is none.
func none(d identity.Digest) string {
	if d.IsZero() {
		return "none"
	}
	return d.String()
}

// adapterManifest reads the adapter_manifest.json, if there is one.
func (m *made) adapterManifest(facts *api.AdapterFacts) (*documents.AdapterManifest, error) {
	f, ok := m.files.document(documents.AdapterManifestFile)
	if !ok {
		return nil, nil
	}
	d, err := readAs(m, f, documents.MaxDocument, documents.ParseAdapterManifest)
	if err != nil {
		return nil, err
	}
	m.docs.Adapter = &d
	m.kiln, m.Facts.Name = true, label(d.Name)
	m.claims = append(m.claims, said(f.name, d.Base()))
	m.identify(d.Identities(), d.TrainingData, d.Precision)
	facts.Stated, facts.Weights, facts.Config, facts.Receipt = true, d.Weights, d.Config, d.Receipt
	facts.Parent = words(d.Parent)
	return &d, nil
}

// adapterConfig reads the configuration that PEFT writes, if there is one.
func (m *made) adapterConfig(name string, facts *api.AdapterFacts) error {
	f, ok := m.files.document(name)
	if !ok {
		return nil
	}
	c, err := readAs(m, f, documents.MaxDocument, documents.ParseAdapterConfig)
	if err != nil {
		return err
	}
	facts.BaseText, facts.Type, facts.DoRA = words(c.BaseName), words(c.Type), c.DoRA
	facts.Modules, facts.Saved = some(c.TargetModules), some(c.SavedModules)
	if c.Rank != nil {
		facts.Rank = count(*c.Rank)
	}
	return nil
}

// adapterReceipt reads the receipt of an adapter, if there is one; empty: under its usual name.
func (m *made) adapterReceipt(name string, facts *api.AdapterFacts) (*documents.Receipt, error) {
	if name == "" {
		name = documents.ReceiptFile
	}
	f, ok := m.files.document(name)
	if !ok {
		return nil, nil // that a manifest names one which is not there is found by its own check
	}
	r, err := m.readReceipt(f)
	facts.Receipt = f.Digest
	return r, err
}

func (m *made) readReceipt(f file) (*documents.Receipt, error) {
	r, err := readAs(m, f, documents.MaxDocument, func(text []byte) (documents.Receipt, error) {
		return documents.ParseReceiptBeside(text, f.Digest, m.docs.Adapter)
	})
	if err != nil {
		return nil, err
	}
	m.kiln, m.Facts.Created = true, words(r.Produced)
	if m.Facts.Name == "" {
		m.Facts.Name = label(r.Name)
	}
	m.claims = append(m.claims, said(f.name, r.Base()))
	m.identify(r.Identities(), r.TrainingData, r.Precision)
	m.docs.Receipt = &r
	m.Facts.Receipt = &api.ReceiptFacts{
		Digest: f.Digest, Status: r.Status, Mode: words(r.Mode), Output: r.Output.Weights, Start: r.Parent.Weights,
	}
	return &r, nil
}

// receipt reads a training receipt that is an artifact of its own.
func (m *made) receipt() error {
	f, err := m.files.needed(api.KindReceipt, documents.ReceiptFile)
	if err != nil {
		return err
	}
	_, err = m.readReceipt(f)
	return err
}

// checkpoint reads a checkpoint. Its layers must be exactly the files that it lists.
func (m *made) checkpoint() error {
	f, err := m.files.needed(api.KindCheckpoint, documents.CheckpointFile)
	if err != nil {
		return err
	}
	c, err := readAs(m, f, documents.MaxDocument, documents.ParseCheckpoint)
	if err != nil {
		return err
	}
	if len(m.files) != len(m.layers) {
		return api.Errorf(api.CodeManifestInvalid, "%d layers of the checkpoint have no file name: %s lists every file",
			len(m.layers)-len(m.files), f.name)
	}
	var entries []documents.Entry
	for _, d := range m.layers {
		if err := m.files.checkPlain(d.Name()); err != nil {
			return err
		}
		entries = append(entries, documents.Entry{Path: d.Name(), Links: 1, Size: uint64(d.Size), Digest: d.Digest})
	}
	if err := c.CheckFiles(entries); err != nil {
		return refused(f.name, err)
	}
	m.docs.Checkpoint = &c
	m.kiln, m.Facts.Name, m.Facts.Created = true, label(c.Adapter), words(c.Created)
	m.claims = append(m.claims, said(f.name, c.Base()))
	m.identify(c.Identities(), c.Data.Content, c.Precision)
	m.Facts.Checkpoint = &api.CheckpointFacts{
		ID: c.ID, TrainingKind: c.Training, Step: c.Progress.GlobalStep, Steps: c.Progress.TotalSteps,
		Weights: c.Files[c.State.AdapterParameters].Digest,
	}
	return nil
}

// identify keeps the other identities that a document records, unless an earlier document gave them.
func (m *made) identify(i documents.Identities, data identity.Digest, p *documents.Precision) {
	note := func(name, value string) {
		if _, has := m.Facts.Identities[name]; has {
			return
		}
		if m.Facts.Identities == nil {
			m.Facts.Identities = map[string]string{}
		}
		m.Facts.Identities[name] = value
	}
	for name, d := range map[string]identity.Digest{
		api.IdentityModelConfig: i.ModelConfig, api.IdentityTokenizer: i.TokenizerVocab,
		api.IdentityTokenizerConfig: i.TokenizerConfig, api.IdentityChatTemplate: i.ChatTemplate,
		api.IdentityTrainingTemplate: i.TrainingTemplate, api.IdentityProvenance: i.Provenance,
		api.IdentityTrainingData: data,
	} {
		if !d.IsZero() {
			note(name, d.String())
		}
	}
	if p != nil {
		note(api.IdentityPrecision, words("parameters "+p.Parameters+", optimizer state "+p.OptimizerState+
			", activations "+p.Activations+", gradients "+p.Gradients))
	}
}

// parentName returns by which name an adapter calls the one that it was trained from, which it may give as a path.
func parentName(parent string) string {
	if parent == "" {
		return ""
	}
	return path.Base(parent)
}
