package attach

import (
	"encoding/base64"
	"errors"
	"fmt"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

// ErrDocument: a document that breaks the format, or does not agree with itself.
var ErrDocument = errors.New("not a document of resident weights")

// Parse reads a document and checks it: no member that the format does not have, every tensor inside of its shard, and,
// of a base, an aggregate that is that of its shards. The error is ErrDocument.
func Parse(text []byte) (Document, error) {
	var d Document
	r := reading{}
	err := strictjson.Read(text, func(s *strictjson.Reader) error {
		r.Reader = s
		return r.document(&d)
	})
	if err == nil {
		err = d.Check()
	}
	if err != nil {
		return Document{}, fmt.Errorf("%w: %w", ErrDocument, err)
	}
	return d, nil
}

// reading reads the parts of a document.
type reading struct{ *strictjson.Reader }

func field(name string, read func() error) strictjson.Field {
	return strictjson.Field{Name: name, Read: read}
}

func optional(name string, read func() error) strictjson.Field {
	return strictjson.Field{Name: name, Optional: true, Read: read}
}

func (r reading) document(d *Document) error {
	return r.Struct(
		r.integer("schema_version", &d.Version),
		r.text("document_type", &d.Type),
		r.text("aggregate_algorithm", &d.Algorithm),
		field("aggregate_sha256", func() (err error) { d.Aggregate, err = parsed(r, identity.ParseAggregate); return err }),
		optional("adapter", func() error { d.Adapter = new(Adapter); return r.adapter(d.Adapter) }),
		field("verification", func() error { return r.verification(&d.Verification) }),
		list(r, "devices", &d.Devices, r.device),
		list(r, "shards", &d.Shards, r.shard),
		list(r, "tensors", &d.Tensors, r.tensor),
		optional("lease", func() error { d.Lease = new(Lease); return r.lease(d.Lease) }),
		field("generation", func() (err error) { d.Generation, err = r.number(); return err }),
	)
}

func (r reading) adapter(a *Adapter) error {
	return r.Struct(r.digest("digest", &a.Digest), r.text("name", &a.Name))
}

func (r reading) verification(v *Verification) error {
	return r.Struct(
		r.text("method", &v.Method),
		field("completed_at", func() (err error) {
			v.Completed, err = parsed(r, func(s string) (time.Time, error) { return time.Parse(time.RFC3339Nano, s) })
			return err
		}),
		r.size("bytes", &v.Bytes),
		r.boolean("read_back", &v.ReadBack),
	)
}

func (r reading) device(d *Device) error {
	return r.Struct(r.integer("index", &d.Index), r.text("uuid", &d.UUID), r.text("pci", &d.PCI),
		r.text("backend", &d.Backend))
}

func (r reading) shard(s *Shard) error {
	return r.Struct(
		r.text("name", &s.Name), r.digest("sha256", &s.Digest), r.size("size_bytes", &s.Size),
		r.size("data_nbytes", &s.Data), r.integer("device", &s.Device), r.handle(&s.IPC),
		optional("replicas", list(r, "", &s.Replicas, func(p *Replica) error {
			return r.Struct(r.integer("device", &p.Device), r.handle(&p.IPC))
		}).Read),
	)
}

// handle reads the member ipc, which may be null but not absent from what this package writes.
func (r reading) handle(to **IPC) strictjson.Field {
	return optional("ipc", func() error {
		p := new(IPC)
		*to = p
		return r.Struct(
			r.text("kind", &p.Kind),
			optional("handle", func() (err error) {
				p.Handle, err = parsed(r, base64.StdEncoding.Strict().DecodeString)
				return err
			}),
			optional("descriptor", func() error { p.Descriptor = new(int); return r.integer("", p.Descriptor).Read() }),
			optional("allocation_bytes", r.size("", &p.Allocation).Read),
			r.size("offset", &p.Offset),
		)
	})
}

func (r reading) tensor(t *gpuload.Tensor) error {
	return r.Struct(
		r.text("name", &t.Name),
		r.text("dtype", &t.DType),
		list(r, "shape", &t.Shape, func(n *uint64) (err error) { *n, err = r.number(); return err }),
		r.integer("shard", &t.Shard),
		field("offset", func() (err error) { t.Offset, err = r.number(); return err }),
		field("nbytes", func() (err error) { t.NBytes, err = r.number(); return err }),
		r.boolean("aligned", &t.Aligned),
	)
}

func (r reading) lease(l *Lease) error { return r.Struct(r.text("id", &l.ID), r.text("mode", &l.Mode)) }

// number reads an integer below 2^53.
func (r reading) number() (uint64, error) {
	at := r.Offset()
	n, err := r.Uint64()
	if err == nil && n > maxInteger {
		err = r.Fail(at, strictjson.RuleU64, "%d is not below 2^53", n)
	}
	return n, err
}

func (r reading) size(name string, to *int64) strictjson.Field {
	return field(name, func() error {
		n, err := r.number()
		*to = int64(n)
		return err
	})
}

// integer reads a small number: an index or a count.
func (r reading) integer(name string, to *int) strictjson.Field {
	return field(name, func() error {
		at := r.Offset()
		n, err := r.number()
		if *to = int(n); err == nil && n > 1<<31-1 {
			err = r.Fail(at, strictjson.RuleU32, "%d is too large", n)
		}
		return err
	})
}

func (r reading) text(name string, to *string) strictjson.Field {
	return field(name, func() (err error) { *to, err = r.String(); return err })
}

func (r reading) boolean(name string, to *bool) strictjson.Field {
	return field(name, func() (err error) { *to, err = r.Bool(); return err })
}

func (r reading) digest(name string, to *identity.Digest) strictjson.Field {
	return field(name, func() (err error) { *to, err = parsed(r, identity.ParseDigest); return err })
}

// parsed reads a string of a form.
func parsed[T any](r reading, parse func(string) (T, error)) (v T, err error) {
	at := r.Offset()
	s, err := r.String()
	if err != nil {
		return v, err
	}
	if v, err = parse(s); err != nil {
		return v, r.Fail(at, strictjson.RuleType, "%v", err)
	}
	return v, nil
}

// list reads an array, which is never nil then.
func list[T any](r reading, name string, to *[]T, element func(*T) error) strictjson.Field {
	return field(name, func() error {
		*to = []T{}
		return r.Array(func(int) error {
			var v T
			err := element(&v)
			*to = append(*to, v)
			return err
		})
	})
}
