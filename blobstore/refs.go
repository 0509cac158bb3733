package blobstore

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"
)

// The limits of one Put, on every engine.
const (
	MaxRefs      = 4095
	MaxRefsBytes = 16 << 20 // in the form that EncodeRefs makes
)

// EncodeRefs returns the form in which engines keep the refs of one Put: a count and so many refs, integers as varints,
// strings and manifests with their length before them. It fails where a limit is passed.
func EncodeRefs(refs []Ref) ([]byte, error) {
	if len(refs) > MaxRefs {
		return nil, fmt.Errorf("%d refs at once: the limit is %d", len(refs), MaxRefs)
	}
	b := binary.AppendUvarint(nil, uint64(len(refs)))
	for i := range refs {
		b = appendRef(b, &refs[i])
	}
	if len(b) > MaxRefsBytes {
		return nil, fmt.Errorf("refs of %d bytes at once: the limit is %d", len(b), MaxRefsBytes)
	}
	return b, nil
}

// The flags of a ref.
const (
	flagDeleted = 1 << iota
	flagTime
	flagFinding // before it there was none: records without it are read as ever
	flagsKnown  = flagDeleted | flagTime | flagFinding
)

func appendRef(b []byte, r *Ref) []byte {
	var flags byte
	if r.Deleted {
		flags |= flagDeleted
	}
	if !r.Time.IsZero() {
		flags |= flagTime
	}
	if r.Finding != "" {
		flags |= flagFinding
	}
	b = append(b, flags)
	b = appendBytes(b, r.Repo)
	b = appendBytes(b, r.Name)
	b = binary.AppendUvarint(b, r.Seq)
	b = append(b, r.Digest[:]...)
	b = appendBytes(b, r.MediaType)
	b = appendBytes(b, r.Manifest)
	if flags&flagTime != 0 {
		b = binary.AppendVarint(b, r.Time.Unix())
		b = binary.AppendUvarint(b, uint64(r.Time.Nanosecond()))
	}
	if flags&flagFinding != 0 {
		b = appendBytes(b, r.Finding)
	}
	return b
}

func appendBytes[T string | []byte](b []byte, s T) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

var errShort = errors.New("payload ends too early")

// payload reads what EncodeRefs made. After an error its reads return zeros.
type payload struct {
	b   []byte
	err error
}

func (p *payload) take(n uint64) []byte {
	if uint64(len(p.b)) < n {
		p.b, p.err = nil, errShort
		return nil
	}
	b := p.b[:n]
	p.b = p.b[n:]
	return b
}

func (p *payload) bytes() []byte { return p.take(p.uvarint()) }

func (p *payload) byte() (c byte) {
	if b := p.take(1); b != nil {
		c = b[0]
	}
	return c
}

func (p *payload) uvarint() uint64 {
	v, n := binary.Uvarint(p.b)
	p.take(uint64(max(n, 0)))
	if n <= 0 {
		p.b, p.err = nil, errShort
	}
	return v
}

func (p *payload) varint() int64 {
	v, n := binary.Varint(p.b)
	p.take(uint64(max(n, 0)))
	if n <= 0 {
		p.b, p.err = nil, errShort
	}
	return v
}

// DecodeRefs reads what EncodeRefs made. The manifests are part of b.
func DecodeRefs(b []byte) ([]Ref, error) {
	p := payload{b: b}
	n := p.uvarint()
	if n > MaxRefs {
		return nil, fmt.Errorf("payload of %d refs: the limit is %d", n, MaxRefs)
	}
	refs := make([]Ref, n)
	for i := range refs {
		if err := p.ref(&refs[i]); err != nil {
			return nil, err
		}
	}
	if len(p.b) > 0 {
		return nil, fmt.Errorf("payload has %d bytes too many", len(p.b))
	}
	return refs, p.err
}

func (p *payload) ref(r *Ref) error {
	flags := p.byte()
	if flags&^flagsKnown != 0 {
		return fmt.Errorf("ref with unknown flags %#x", flags)
	}
	r.Deleted = flags&flagDeleted != 0
	r.Repo = string(p.bytes())
	r.Name = string(p.bytes())
	r.Seq = p.uvarint()
	copy(r.Digest[:], p.take(uint64(len(r.Digest))))
	r.MediaType = string(p.bytes())
	if m := p.bytes(); len(m) > 0 {
		r.Manifest = m
	}
	if flags&flagTime != 0 {
		r.Time = time.Unix(p.varint(), int64(p.uvarint())).UTC()
	}
	if flags&flagFinding != 0 {
		r.Finding = string(p.bytes())
	}
	return p.err
}
