package saved

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/internal/cli"
)

// Compared is what an index and a file have of each other.
type Compared struct {
	Same  int // rows of the file that the index has as they are
	Since int // rows that only the index has or that are newer there, and rows of the file that are gone by a later change
}

// Compare fails unless an index that was made from a store has each row of the file, or knows of a later change of the
// same manifest or tag.
func (f *File) Compare(ctx context.Context, ix *index.Index) (did Compared, err error) {
	c := comparing{File: f, ix: ix}
	if err := c.rewind(); err != nil {
		return did, err
	}
	for r, err := range ix.Export(ctx) {
		if err == nil {
			err = c.add(ctx, r)
		}
		if err != nil {
			return did, err
		}
	}
	for !c.ended {
		if err := c.absent(ctx); err != nil {
			return did, err
		}
	}
	return c.did, c.verdict()
}

// comparing is a Compare on its way.
type comparing struct {
	*File
	ix    *index.Index
	did   Compared
	wrong int    // rows of the file that the index should have
	first string // the first one of them
}

// add compares the next row of the index.
func (c *comparing) add(ctx context.Context, r index.Row) error {
	for !c.ended && order(c.row, r) < 0 {
		if err := c.absent(ctx); err != nil {
			return err
		}
	}
	if c.ended || order(c.row, r) != 0 {
		c.did.Since++
		return nil
	}
	text, err := json.Marshal(r)
	switch {
	case err != nil:
		return err
	case bytes.Equal(text, c.text):
		c.did.Same++
	case r.Seq > c.row.Seq:
		c.did.Since++
	case r.Seq < c.row.Seq:
		c.lacks(fmt.Sprintf("change %d of it: the store's last one is %d", c.row.Seq, r.Seq))
	default:
		c.lacks(fmt.Sprintf("member %s as it is there", differing(c.text, text)))
	}
	return c.next()
}

// absent looks for why the index does not have a row of the file, and goes to the next one.
func (c *comparing) absent(ctx context.Context) error {
	var op index.Op = index.PutManifest{Record: index.Record{
		Repo: c.row.Repository, Digest: c.row.Digest, Seq: c.row.Seq,
	}}
	if c.row.Type == tag {
		op = index.PutTag{Repo: c.row.Repository, Tag: c.row.Tag, Digest: c.row.Digest, Seq: c.row.Seq}
	}
	lacking, err := c.ix.Lacks(ctx, op)
	if err != nil {
		return err
	}
	if len(lacking) > 0 {
		c.lacks("it, nor a later change of it")
	} else {
		c.did.Since++
	}
	return c.next()
}

func (c *comparing) lacks(what string) {
	if c.wrong++; c.wrong > 1 {
		return
	}
	name := fmt.Sprintf("manifest %s@%s", c.row.Repository, c.row.Digest)
	if c.row.Type == tag {
		name = fmt.Sprintf("tag %s:%s", c.row.Repository, c.row.Tag)
	}
	c.first = fmt.Sprintf("%s:%d: %s: the store does not have %s", c.name, c.line, name, what)
}

func (c *comparing) verdict() error {
	if c.wrong == 0 {
		return nil
	}
	text := c.first
	if c.wrong > 1 {
		text += fmt.Sprintf("; and so for %d more", c.wrong-1)
	}
	return cli.Hint(cli.Exit(cli.CodeNo, fmt.Errorf("%s", text)),
		"nothing was changed: put the records that the store lacks back from a backup; kiln-registry reindex takes the store "+
			"as it is")
}

// differing names the first member that differs between two rows.
func differing(a, b []byte) string {
	var x, y map[string]json.RawMessage
	_, _ = json.Unmarshal(a, &x), json.Unmarshal(b, &y) // both were rows before
	for _, m := range []string{"digest", "created", "media_type", "size", "artifact_type", "kind", "content_state", "evidence",
		"aggregate_sha256", "shard_count", "total_size_bytes", "packaging", "subject", "annotations", "name", "facts", "links",
		"refers"} {
		if !bytes.Equal(x[m], y[m]) {
			return fmt.Sprintf("%q", m)
		}
	}
	return "that it has"
}
