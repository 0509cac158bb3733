package index

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"slices"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

// A value is the version of its form, a body, and the CRC-32C of key, version and body: a damaged page of the engine
// shows, also where it still looks like one. Bodies are fields in a fixed order, integers as varints, texts with their
// length. Compared with JSON that is an eighth of the time to read and half the bytes, and pages of records are what
// listings are made of; a new form gets a new version.
const valueVersion byte = 1

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(key, value []byte) uint32 {
	return crc32.Update(crc32.Checksum(key, castagnoli), castagnoli, value)
}

// seal turns a body into the value of key.
func seal(key, body []byte) []byte {
	v := make([]byte, 0, 1+len(body)+4)
	v = append(append(v, valueVersion), body...)
	return binary.LittleEndian.AppendUint32(v, checksum(key, v))
}

// unseal returns the body of a value, never nil, or ErrDamaged.
func unseal(key, value []byte) ([]byte, error) {
	n := len(value) - 4
	if n < 1 || binary.LittleEndian.Uint32(value[n:]) != checksum(key, value[:n]) {
		return nil, fmt.Errorf("%w: checksum of a %q row", ErrDamaged, key[:1])
	}
	if value[0] != valueVersion {
		return nil, fmt.Errorf("%w: value of form %d, this program knows %d", ErrDamaged, value[0], valueVersion)
	}
	return value[1:n], nil
}

// body is a value being built.
type body []byte

func (b *body) uint(v uint64) { *b = binary.AppendUvarint(*b, v) }
func (b *body) int(v int64)   { *b = binary.AppendVarint(*b, v) }

func (b *body) text(s string) {
	b.uint(uint64(len(s)))
	*b = append(*b, s...)
}

func (b *body) sum(d [32]byte) { *b = append(*b, d[:]...) }

func (b *body) time(t time.Time) { b.int(t.UnixNano()) }

// reader takes a body apart. Once something is missing, bad is set and everything further is zero.
type reader struct {
	left []byte
	bad  bool
}

func (r *reader) skip(n int) {
	if n <= 0 {
		r.bad, r.left = true, nil
		return
	}
	r.left = r.left[n:]
}

func (r *reader) uint() uint64 {
	if len(r.left) > 0 && r.left[0] < 0x80 { // nearly all are small
		v := r.left[0]
		r.left = r.left[1:]
		return uint64(v)
	}
	v, n := binary.Uvarint(r.left)
	r.skip(n)
	if r.bad {
		return 0
	}
	return v
}

func (r *reader) int() int64 {
	v, n := binary.Varint(r.left)
	r.skip(n)
	if r.bad {
		return 0
	}
	return v
}

// count reads a number of things that take at least least bytes each, and so bounds what is allocated for them.
func (r *reader) count(least int) int {
	n := r.uint()
	if n > uint64(len(r.left)/least) {
		r.bad, r.left = true, nil
		return 0
	}
	return int(n)
}

func (r *reader) text() string { return string(r.bytes()) }

// bytes reads a text without copying it.
func (r *reader) bytes() []byte {
	n := r.count(1)
	if r.bad {
		return nil
	}
	b := r.left[:n]
	r.left = r.left[n:]
	return b
}

func (r *reader) sum() (d identity.Digest) {
	if len(r.left) < len(d) {
		r.bad, r.left = true, nil
		return d
	}
	r.left = r.left[copy(d[:], r.left):]
	return d
}

func (r *reader) time() time.Time { return time.Unix(0, r.int()).UTC() }

// err says whether the body had exactly the fields that were read.
func (r *reader) err(what string) error {
	if r.bad || len(r.left) > 0 {
		return fmt.Errorf("%w: malformed %s", ErrDamaged, what)
	}
	return nil
}

// Repo and Digest stand in the key.
func encodeRecord(r Record) []byte {
	var b body
	b.uint(r.Seq)
	b.time(r.Created)
	b.int(r.Size)
	b.text(r.MediaType)
	b.text(r.ArtifactType)
	b.text(string(r.Kind))
	b.text(string(r.State))
	b.text(string(r.Evidence))
	b.sum(r.Aggregate)
	b.uint(uint64(len(r.Bases)))
	for _, a := range r.Bases {
		b.sum(a)
	}
	b.sum(r.Packaging)
	b.sum(r.Subject)
	b.int(int64(r.ShardCount))
	b.uint(r.TotalSize)
	b.text(r.Name)
	b.text(string(r.Facts))
	b.uint(uint64(len(r.Links)))
	for _, l := range r.Links {
		b.text(l.Relation)
		b.sum(l.Target)
	}
	b.uint(uint64(len(r.Annotations)))
	for _, k := range slices.Sorted(maps.Keys(r.Annotations)) {
		b.text(k)
		b.text(r.Annotations[k])
	}
	return b
}

func decodeRecord(repo string, d identity.Digest, data []byte) (Record, error) {
	r := reader{left: data}
	rec := Record{Repo: repo, Digest: d}
	rec.Seq = r.uint()
	rec.Created = r.time()
	rec.Size = r.int()
	rec.MediaType = r.text()
	rec.ArtifactType = r.text()
	rec.Kind = api.Kind(r.text())
	rec.State = api.ContentState(r.text())
	rec.Evidence = api.Evidence(r.text())
	rec.Aggregate = identity.Aggregate(r.sum())
	if n := r.count(32); n > 0 {
		rec.Bases = make([]identity.Aggregate, n)
		for i := range rec.Bases {
			rec.Bases[i] = identity.Aggregate(r.sum())
		}
	}
	rec.Packaging = r.sum()
	rec.Subject = r.sum()
	rec.ShardCount = int(r.int())
	rec.TotalSize = r.uint()
	rec.Name = r.text()
	if facts := r.text(); facts != "" {
		rec.Facts = []byte(facts)
	}
	if n := r.count(33); n > 0 {
		rec.Links = make([]Link, n)
		for i := range rec.Links {
			rec.Links[i] = Link{r.text(), r.sum()}
		}
	}
	if n := r.count(2); n > 0 {
		rec.Annotations = make(map[string]string, n)
		for range n {
			k := r.text()
			rec.Annotations[k] = r.text()
		}
	}
	return rec, r.err("record")
}

func encodeSums(sums []identity.Digest) []byte {
	b := make(body, 0, 32*len(sums))
	for _, d := range sums {
		b.sum(d)
	}
	return b
}

func decodeSums(data []byte) ([]identity.Digest, error) {
	r := reader{left: data}
	sums := make([]identity.Digest, 0, len(data)/32)
	for len(r.left) > 0 {
		sums = append(sums, r.sum())
	}
	return sums, r.err("list of digests")
}

func encodeShards(m identity.Manifest) []byte {
	var b body
	b.sum(m.Aggregate)
	b.uint(m.TotalSize)
	b.uint(uint64(len(m.Shards)))
	for _, s := range m.Shards {
		b.text(s.Filename)
		b.uint(s.Size)
		b.sum(s.Digest)
	}
	return b
}

func decodeShards(data []byte) (identity.Manifest, error) {
	r := reader{left: data}
	m := identity.Manifest{Aggregate: identity.Aggregate(r.sum()), TotalSize: r.uint()}
	m.Shards = make([]identity.Shard, r.count(34))
	for i := range m.Shards {
		m.Shards[i] = identity.Shard{Filename: r.text(), Size: r.uint(), Digest: r.sum()}
	}
	return m, r.err("shard manifest")
}

// encodePut is the form of a put in the temporary files of an import.
func encodePut(p PutManifest) []byte {
	var b body
	b.text(string(encodeRecord(p.Record)))
	b.text(string(p.Manifest))
	b.text(string(encodeSums(p.Refers)))
	b.text(string(encodeSums(p.Lists)))
	if len(p.Shards.Shards) > 0 {
		b = append(b, encodeShards(p.Shards)...)
	}
	return b
}

func decodePut(repo string, d identity.Digest, data []byte) (p PutManifest, err error) {
	r := reader{left: data}
	record := r.bytes()
	p.Manifest = bytes.Clone(r.bytes())
	refers, lists := r.bytes(), r.bytes()
	if r.bad {
		return p, r.err("put")
	}
	errs := make([]error, 4)
	p.Record, errs[0] = decodeRecord(repo, d, record)
	p.Refers, errs[1] = decodeSums(refers)
	p.Lists, errs[2] = decodeSums(lists)
	if len(r.left) > 0 {
		p.Shards, errs[3] = decodeShards(r.left)
	}
	return p, errors.Join(errs...)
}

type tagValue struct {
	digest identity.Digest
	seq    uint64
}

func (v tagValue) encode() []byte {
	var b body
	b.sum(v.digest)
	b.uint(v.seq)
	return b
}

func decodeTag(data []byte) (v tagValue, err error) {
	r := reader{left: data}
	v.digest = r.sum()
	v.seq = r.uint()
	return v, r.err("tag")
}

type lease struct {
	size  int64
	until time.Time
}

func (l lease) encode() []byte {
	var b body
	b.int(l.size)
	b.time(l.until)
	return b
}

func decodeLease(data []byte) (l lease, err error) {
	r := reader{left: data}
	l.size = r.int()
	l.until = r.time()
	return l, r.err("lease")
}

func encodeUpload(u Upload) []byte {
	var b body
	b.text(u.Repo)
	b.text(u.Caller)
	b.sum(u.Digest)
	b.int(u.Size)
	b.time(u.Expires)
	return b
}

func decodeUpload(id string, data []byte) (Upload, error) {
	r := reader{left: data}
	u := Upload{ID: id}
	u.Repo = r.text()
	u.Caller = r.text()
	u.Digest = r.sum()
	u.Size = r.int()
	u.Expires = r.time()
	return u, r.err("upload")
}

func encodeNumber(n uint64) []byte {
	var b body
	b.uint(n)
	return b
}

func decodeNumber(data []byte) (uint64, error) {
	r := reader{left: data}
	n := r.uint()
	return n, r.err("number")
}

// row is what a key of a listing says. Its texts are parts of that key, and valid as long as it is.
type row struct {
	group, repo []byte
	created     uint64 // inverted
	digest      identity.Digest
}

// rowEnd is the length of what every key of a listing ends with: the time and the manifest.
const rowEnd = 8 + 32

// read reads a key of a listing.
func (r *row) read(k []byte) error {
	from, to := 1, len(k)-rowEnd
	grouped := k[0] == tableAggregate || k[0] == tableName || k[0] == tableLink
	switch {
	case grouped:
		from += 32
	case k[0] == tableSubject:
		to -= 64
	}
	if to <= from {
		return errKey
	}
	if grouped {
		n := bytes.IndexByte(k[from:to], 0)
		if n < 0 {
			return errKey
		}
		r.group, from = k[from:from+n], from+n+1
	}
	end := to - 1
	if end < from || bytes.IndexByte(k[from:to], 0) != end-from {
		return errKey
	}
	r.repo = k[from:end]
	r.created = binary.BigEndian.Uint64(k[len(k)-rowEnd:])
	r.digest = identity.Digest(k[len(k)-32:])
	return nil
}

// tx is a Txn with the forms of this package's values.
type tx struct{ Txn }

func (ix *Index) view(ctx context.Context, fn func(tx) error) error {
	return ix.kv.View(ctx, func(x Txn) error { return fn(tx{x}) })
}

// load returns the body of a value, nil if there is no such key.
func (t tx) load(k key) ([]byte, error) {
	v, err := t.Get(k)
	if err != nil || v == nil {
		return nil, err
	}
	return unseal(k, v)
}

func (t tx) store(k key, body []byte) error { return t.Put(k, seal(k, body)) }

// mark puts a row that is only a key.
func (t tx) mark(k key) error { return t.Put(k, nil) }

func (t tx) has(k key) (bool, error) {
	v, err := t.Get(k)
	return v != nil, err
}

// number loads a number; 0 if there is no such key.
func (t tx) number(k key) (uint64, error) {
	b, err := t.load(k)
	if err != nil || b == nil {
		return 0, err
	}
	return decodeNumber(b)
}

func (t tx) deleteAll(keys [][]byte) error {
	for _, k := range keys {
		if err := t.Delete(k); err != nil {
			return err
		}
	}
	return nil
}

// any says whether there is a key with the prefix.
func (t tx) any(prefix key) bool {
	for range t.Range(prefix, after(prefix)) {
		return true
	}
	return false
}

// listed is the value of a row by aggregate. JSON is that of an api.Artifact; where Binds is set it lacks the end, which
// is notHeld or isHeld.
type listed struct {
	evidence []byte
	boundBy  identity.Digest
	binds    bool
	json     []byte
}

// Flags of a listed.
const (
	flagBinds = 1 << iota
	flagBoundBy
)

func encodeListed(r Record, binding Binding, bases int, tags []string, more bool) ([]byte, error) {
	text, err := json.Marshal(wireOf(r, binding, bases, tags, more))
	if err != nil {
		return nil, fmt.Errorf("list %s@%s: %w", r.Repo, r.Digest, err)
	}
	flags := uint64(0)
	if r.Kind != api.KindBase {
		flags, text = flags|flagBinds, bytes.TrimSuffix(text, []byte(notHeld))
	}
	if !binding.BoundBy.IsZero() {
		flags |= flagBoundBy
	}
	b := make(body, 0, len(text)+64)
	b.uint(flags)
	b.text(string(binding.Evidence))
	if flags&flagBoundBy != 0 {
		b.sum(binding.BoundBy)
	}
	return append(b, text...), nil
}

// decode reads a value without copying it.
func (l *listed) decode(data []byte) error {
	if len(data) < 2 || data[0] > flagBinds|flagBoundBy || data[1] >= 0x80 || len(data)-2 < int(data[1]) {
		return errListed
	}
	flags, n := data[0], 2+int(data[1])
	l.evidence, l.json, l.boundBy = data[2:n], data[n:], identity.Digest{}
	if flags&flagBoundBy != 0 {
		if len(l.json) < len(l.boundBy) {
			return errListed
		}
		l.json = l.json[copy(l.boundBy[:], l.json):]
	}
	l.binds = flags&flagBinds != 0
	return nil
}

var errListed = fmt.Errorf("%w: malformed listing", ErrDamaged)

// appendTo appends the JSON of the artifact.
func (l *listed) appendTo(b []byte, held bool) []byte {
	b = append(b, l.json...)
	switch {
	case !l.binds:
		return b
	case held:
		return append(b, isHeld...)
	}
	return append(b, notHeld...)
}
