package artifact

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

// rowsExt is the extension of a file of outcome rows.
const rowsExt = ".jsonl"

// readReceipt reads a training receipt. In the artifact it is called train_receipt.json, whatever its file is called:
// that is where readers look.
func readReceipt(path string, o Options) (*draft, error) {
	f, file, text, err := one(path, documents.MaxDocument, o)
	if err != nil {
		return nil, err
	}
	r, err := documents.ParseReceipt(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return &draft{
		Artifact: Artifact{Name: r.Name, folder: f, parts: []part{
			{name: documents.ReceiptFile, kind: folder.Doc, file: file, text: text},
		}},
		claims: []documents.Binding{r.Base()}, kiln: true, hint: stampHint(path), check: nothing,
	}, nil
}

func stampHint(path string) string {
	return fmt.Sprintf("kiln-push stamp %s --base DIR|REF records its base; --legacy pushes it as an archive", path)
}

// nothing is the check of an artifact that is one document.
func nothing(map[string]identity.Digest) error { return nil }

// one reads a file that is an artifact by itself.
func one(path string, limit int64, o Options) (*folder.Folder, folder.File, []byte, error) {
	f, file, err := folder.One(path, folder.Options{FollowLinks: o.FollowLinks})
	if err != nil {
		return nil, file, nil, err
	}
	text, err := document(f, file, limit)
	return f, file, text, err
}

// readEval reads an eval: a job as Kiln archives it or a result, or outcome rows in a file *.jsonl.
func readEval(path string, o Options) (*draft, error) {
	if info, err := os.Stat(path); err != nil {
		return nil, err
	} else if info.IsDir() {
		return nil, &fs.PathError{Op: "read", Path: path, Err: syscall.EISDIR}
	}
	switch filepath.Ext(path) {
	case rowsExt:
		return readRows(path, o)
	case ".json":
	default:
		return nil, &Error{Code: CodeFileName, Hint: "name an eval job or result *.json, and a file of outcome rows *.jsonl",
			Msg: fmt.Sprintf("%q is called neither *.json nor *%s", filepath.Base(path), rowsExt)}
	}
	f, file, text, err := one(path, documents.MaxEval, o)
	if err != nil {
		return nil, err
	}
	e, err := documents.ParseEval(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	d := &draft{
		Artifact: Artifact{Name: e.ID, folder: f, parts: []part{{name: file.Name, kind: folder.Doc, file: file, text: text}}},
		claims:   []documents.Binding{e.Base()}, kiln: true, hint: stampHint(path), check: nothing,
	}
	if !e.Final() {
		d.Warnings = append(d.Warnings, Warning{WarnNotFinal, fmt.Sprintf("the eval was %s when this was written", e.State)})
	}
	return d, nil
}

// readRows reads outcome rows: they are checked and hashed in one pass.
func readRows(path string, o Options) (*draft, error) {
	f, file, err := folder.One(path, folder.Options{FollowLinks: o.FollowLinks})
	if err != nil {
		return nil, err
	}
	if file.Size > documents.MaxEval { // which a registry of this project refuses
		return nil, &Error{Code: CodeTooLarge, Hint: "split it by lines, and push each part as an eval of its own",
			Msg: fmt.Sprintf("%s has %d bytes, at most %d are taken", file.Name, file.Size, documents.MaxEval)}
	}
	in, unchanged, err := f.Read(file)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	h := identity.NewHash()
	rows, err := documents.ReadOutcomes(io.TeeReader(in, h))
	if changed := unchanged(); changed != nil {
		return nil, changed
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	claim, named := rows.Of(o.Base.Aggregate)
	if !named {
		claim = documents.Binding{
			Evidence: documents.EvidenceNone, Kind: documents.KindOutcomes, Path: "$.base_weight_shard_manifest of each row",
		}
	}
	d := &draft{
		Artifact: Artifact{Name: strings.TrimSuffix(file.Name, rowsExt), Rows: rows, folder: f, parts: []part{
			{name: file.Name, kind: folder.Doc, file: file, digest: identity.DigestOf(h)},
		}},
		claims: []documents.Binding{claim}, kiln: true, hint: "export the rows again with their manifest; --legacy pushes them as an archive",
		check: nothing,
	}
	if rows.Unbound > 0 && len(rows.Shards) > 0 && !o.Legacy {
		return nil, &Error{Code: CodeLegacy, Hint: d.hint, Msg: fmt.Sprintf(
			"%s: %d of %d rows hold no full manifest of their base", file.Name, rows.Unbound, rows.Rows)}
	}
	return d, nil
}
