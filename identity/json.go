package identity

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

// MaxDocument is the largest text that Parse reads, in bytes: Kiln's own limit on a checkpoint manifest, ten times what
// the largest valid manifest needs.
const MaxDocument = 16 << 20

// shardText is about how long the text of a shard is, in bytes.
const shardText = 128

// document is a manifest as it stands in JSON, before the rules are checked.
type document struct {
	version         uint32
	kind, algorithm string
	aggregate       string
	total           uint64
	shards          []Shard
	malformed       map[int]error // what is wrong with the text of a shard's digest, by index

	reading int // index of the shard being read, -1 when none is
	next    Shard
	form    error // what is wrong with the text of its digest
}

// Parse reads a shard manifest and checks every rule. It refuses what Kiln refuses, and also a positional array in
// place of an object. The error is an *Error.
func Parse(data []byte) (Manifest, error) {
	if len(data) > MaxDocument {
		return Manifest{}, &Error{Stage: StageParse, Rule: RuleInputSize, Shard: -1,
			Msg: fmt.Sprintf("%d bytes, at most %d are read", len(data), MaxDocument)}
	}
	d := document{reading: -1}
	if err := strictjson.Read(data, func(r *strictjson.Reader) error { return d.read(r, len(data)) }); err != nil {
		e := &Error{Stage: StageParse, Shard: d.reading, Err: err}
		if j, ok := errors.AsType[*strictjson.Error](err); ok {
			e.Rule, e.Msg = j.Rule, j.Where()
		}
		return Manifest{}, e
	}
	return d.manifest()
}

// Read is Parse for a manifest that stands inside of a JSON document: the next value of r. What is wrong with its text is
// an error of r, and what is wrong with its content an *Error. One longer than MaxDocument is the latter, too.
func Read(r *strictjson.Reader) (Manifest, error) {
	d := document{reading: -1}
	if err := d.read(r, MaxDocument); err != nil {
		return Manifest{}, err
	}
	return d.manifest()
}

// read reads the document, whose shards may end at most so many bytes after its start.
func (d *document) read(r *strictjson.Reader, most int) error {
	start := r.Offset()
	if r.Kind() == strictjson.Null {
		return r.Fail(r.Offset(), strictjson.RuleType, "want an object, got null")
	}
	shard := d.shardFields(r)
	return r.Struct(
		text(r, "manifest_type", &d.kind),
		text(r, "aggregate_algorithm", &d.algorithm),
		text(r, "aggregate_sha256", &d.aggregate),
		number(r, "total_size_bytes", &d.total),
		strictjson.Field{Name: "schema_version", Read: func() (err error) {
			d.version, err = r.Uint32()
			return err
		}},
		strictjson.Field{Name: "shards", Read: func() error {
			d.shards = make([]Shard, 0, min(MaxShards, r.Left()/shardText))
			return r.Array(func(i int) error {
				d.reading = i
				if !d.compact(r) {
					if err := r.Struct(shard...); err != nil {
						return err
					}
				}
				if n := r.Offset() - start; n > most {
					return &Error{Stage: StageParse, Rule: RuleInputSize, Shard: -1,
						Msg: fmt.Sprintf("more than %d bytes, which is the most that is read", most)}
				}
				d.add()
				d.reading = -1
				return nil
			})
		}},
	)
}

// compact reads the next shard if it stands there as Kiln writes it: members in its order, without white space, nothing
// escaped, and a digest of the right form. Else it reads nothing.
func (d *document) compact(r *strictjson.Reader) bool {
	all := r.Ahead()
	name, ok := after(all, `{"filename":"`)
	n := portable(name)
	size, ok2 := after(name[n:], `","size_bytes":`)
	v, m := digits(size)
	sum, ok3 := after(size[m:], `,"sha256":"`)
	if !ok || !ok2 || !ok3 || m == 0 || len(sum) < textLen {
		return false
	}
	digest, err := DigestOfText(sum[:textLen])
	rest, ok := after(sum[textLen:], `"}`)
	if err != nil || !ok {
		return false
	}
	d.next, d.form = Shard{string(name[:n]), v, digest}, nil
	r.Pass(len(all) - len(rest))
	return true
}

// after returns what follows a start of b.
func after(b []byte, start string) (rest []byte, ok bool) {
	if len(b) < len(start) || string(b[:len(start)]) != start {
		return nil, false
	}
	return b[len(start):], true
}

// digits reads the whole number at the start of b, of n digits; 0 if that is no number of at most 19 digits.
func digits(b []byte) (v uint64, n int) {
	for n < len(b) && '0' <= b[n] && b[n] <= '9' {
		v = v*10 + uint64(b[n]-'0')
		n++
	}
	if n > 19 || n > 1 && b[0] == '0' {
		return 0, 0
	}
	return v, n
}

// add takes the shard that was read.
func (d *document) add() {
	if d.form != nil {
		if d.malformed == nil {
			d.malformed = map[int]error{}
		}
		d.malformed[len(d.shards)] = d.form
	}
	d.shards = append(d.shards, d.next)
}

func (d *document) shardFields(r *strictjson.Reader) []strictjson.Field {
	return []strictjson.Field{
		text(r, "filename", &d.next.Filename),
		number(r, "size_bytes", &d.next.Size),
		{Name: "sha256", Read: func() error {
			b, err := r.Text()
			if err == nil {
				d.next.Digest, d.form = DigestOfText(b)
			}
			return err
		}},
	}
}

func text(r *strictjson.Reader, name string, to *string) strictjson.Field {
	return strictjson.Field{Name: name, Read: func() (err error) { *to, err = r.String(); return err }}
}

func number(r *strictjson.Reader, name string, to *uint64) strictjson.Field {
	return strictjson.Field{Name: name, Read: func() (err error) { *to, err = r.Uint64(); return err }}
}

// manifest checks the rules in the documented order and returns the manifest.
func (d *document) manifest() (Manifest, error) {
	m := Manifest{TotalSize: d.total, Shards: d.shards}
	if err := d.check(&m); err != nil {
		return Manifest{}, err
	}
	return m, nil
}

func (d *document) check(m *Manifest) (err error) {
	switch {
	case d.version != SchemaVersion:
		return refuse(RuleSchemaVersion, -1, "schema_version is %d, only %d is read", d.version, SchemaVersion)
	case d.kind != ManifestType:
		return refuse(RuleManifestType, -1, "manifest_type is %.80q, must be %q", d.kind, ManifestType)
	case d.algorithm != AggregateAlgorithm:
		return refuse(RuleAggregateAlgorithm, -1, "aggregate_algorithm is %.80q, must be %q", d.algorithm, AggregateAlgorithm)
	}
	if err := checkCount(len(m.Shards)); err != nil {
		return err
	}
	for i := range m.Shards {
		if err := checkShard(m.Shards[:i], m.Shards[i], d.malformed[i]); err != nil {
			return err
		}
	}
	if err := checkTotal(*m); err != nil {
		return err
	}
	if m.Aggregate, err = ParseAggregate(d.aggregate); err != nil {
		return refuse(RuleDigestForm, -1, "aggregate_sha256: %v", err)
	}
	return checkAggregate(*m)
}

// MarshalJSON gives the canonical text: members in the order of Kiln's own, no white space. Equal manifests give equal
// bytes. A manifest that Parse would refuse is an error.
func (m Manifest) MarshalJSON() ([]byte, error) {
	if err := m.Validate(); err != nil {
		return nil, err
	}
	b := make([]byte, 0, 320+len(m.Shards)*160)
	b = append(b, `{"schema_version":`...)
	b = strconv.AppendUint(b, SchemaVersion, 10)
	b = append(b, `,"manifest_type":"`+ManifestType+`","aggregate_algorithm":"`+AggregateAlgorithm+`"`...)
	b = append(append(b, `,"aggregate_sha256":"`...), m.Aggregate.String()...)
	b = strconv.AppendUint(append(b, `","total_size_bytes":`...), m.TotalSize, 10)
	b = append(b, `,"shards":[`...)
	for i, s := range m.Shards {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(append(b, `{"filename":"`...), s.Filename...)
		b = strconv.AppendUint(append(b, `","size_bytes":`...), s.Size, 10)
		b = append(append(b, `,"sha256":"`...), s.Digest.String()...)
		b = append(b, `"}`...)
	}
	return append(b, "]}"...), nil
}

// UnmarshalJSON is Parse.
func (m *Manifest) UnmarshalJSON(data []byte) (err error) {
	*m, err = Parse(data)
	return err
}
