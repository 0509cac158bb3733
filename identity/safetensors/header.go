package safetensors

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

// MaxHeader is the longest header that is read, in bytes: MAX_HEADER_SIZE of the reference implementation.
const MaxHeader = 100_000_000

// metadataName is the one name in a header that is no tensor.
const metadataName = "__metadata__"

// DType is the name of an element type, as it stands in the header.
type DType string

// Bits returns the size of one element, 0 for a name that the format does not have.
func (d DType) Bits() uint64 {
	switch d {
	case "F4":
		return 4
	case "F6_E2M3", "F6_E3M2":
		return 6
	case "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ":
		return 8
	case "I16", "U16", "F16", "BF16":
		return 16
	case "I32", "U32", "F32":
		return 32
	case "C64", "F64", "I64", "U64":
		return 64
	}
	return 0
}

// Tensor is one entry of a header.
type Tensor struct {
	Name       string
	DType      DType
	Shape      []uint64 // empty for a scalar
	Begin, End uint64   // in bytes from the end of the header; End may equal Begin
}

// Header is a checked header: its tensors cover the rest of the file without gap or overlap.
type Header struct {
	Tensors  []Tensor          // in the order of their bytes
	Metadata map[string]string // nil when the header has none
	Size     uint64            // bytes before the data: 8 and the length of the header's text
}

// Read reads and checks the header of a file of size bytes. It reads the header only, and takes memory in proportion to
// it. The error is an *Error, or that of r. With the code unknown_dtype all else was right, and the header is returned.
//
// It refuses all that the reference implementation (safetensors 0.8.0) refuses, and four things that this one takes: a
// name twice in one object, metadata that is null, a tensor described by an array, and white space before the header.
func Read(r io.ReaderAt, size int64) (Header, error) {
	first := make([]byte, min(size, diagnoseLen))
	if err := readFull(r, first, 0); err != nil {
		return Header{}, err
	}
	if err := Diagnose(first); err != nil {
		return Header{}, err
	}
	var prefix [8]byte
	copy(prefix[:], first)
	n, err := HeaderLen(prefix, size)
	if err != nil {
		return Header{}, err
	}
	text := make([]byte, n)
	if err := readFull(r, text, 8); err != nil {
		return Header{}, err
	}
	return ParseHeader(prefix, text, size)
}

func readFull(r io.ReaderAt, b []byte, off int64) error {
	if n, err := r.ReadAt(b, off); n < len(b) {
		return fmt.Errorf("read the safetensors header: %d of %d bytes at %d: %w", n, len(b), off, err)
	}
	return nil
}

// HeaderLen returns the length of the header's text, which follows the prefix. It is at most MaxHeader, and lies within
// a file of size bytes. For a file of fewer than 8 bytes the prefix does not matter. The error is an *Error.
func HeaderLen(prefix [8]byte, size int64) (int64, error) {
	if size < 8 {
		return 0, refuse(CodeHeaderTooShort,
			"the file has %d bytes, a safetensors file starts with 8 for the length of its header", size)
	}
	if err := Diagnose(prefix[:]); err != nil {
		return 0, err
	}
	n := binary.LittleEndian.Uint64(prefix[:])
	switch {
	case n > MaxHeader:
		return 0, otherFormat(prefix, refuse(CodeHeaderTooLarge,
			"the header has %d bytes, at most %d are read; the file starts with %+q", n, MaxHeader, prefix[:]))
	case n > uint64(size-8):
		return 0, otherFormat(prefix, refuse(CodeHeaderExceeds,
			"the header has %d bytes, the file has only %d after the first 8", n, size-8))
	}
	return int64(n), nil
}

// ParseHeader checks a header: prefix are the first 8 bytes of a file of size bytes, text is what HeaderLen says
// follows. It keeps neither. Errors and results are those of Read.
func ParseHeader(prefix [8]byte, text []byte, size int64) (Header, error) {
	n, err := HeaderLen(prefix, size)
	if err != nil {
		return Header{}, err
	}
	if n != int64(len(text)) {
		return Header{}, fmt.Errorf("parse the safetensors header: got %d bytes, the length says %d", len(text), n)
	}
	p := parser{head: Header{Size: 8 + uint64(n)}}
	if err := p.parse(text); err != nil {
		if !bytes.HasPrefix(text, []byte("{")) {
			err = otherFormat(prefix, err)
		}
		return Header{}, err
	}
	if err := checkLayout(p.head.Tensors, uint64(size)-p.head.Size); err != nil {
		return Header{}, err
	}
	if p.unknown != nil {
		return p.head, p.unknown
	}
	return p.head, nil
}

// minTensor is the length of the shortest entry of a header, a one-letter name and a comma included.
const minTensor = len(`"":{"dtype":"U8","shape":[],"data_offsets":[0,0]},`)

// parser reads a header's text.
type parser struct {
	head    Header
	unknown *Error   // the first tensor of an unknown type
	next    Tensor   // the one being read
	shape   []uint64 // of that one
	arena   []uint64 // where shapes are kept, many to an allocation
}

func (p *parser) parse(text []byte) *Error {
	if len(text) == 0 || text[0] != '{' {
		return refuse(CodeHeaderNotJSON, "the header of %d bytes does not start with '{'", len(text))
	}
	p.head.Tensors = make([]Tensor, 0, min(bytes.Count(text, []byte(`"data_offsets"`)), len(text)/minTensor+1))
	err := strictjson.Read(text, func(r *strictjson.Reader) error {
		r.Finite()
		return r.Object(func(name string) error {
			if name == metadataName {
				return p.metadata(r)
			}
			return p.tensor(r, name)
		})
	})
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	if j, ok := errors.AsType[*strictjson.Error](err); ok && j.Rule == strictjson.RuleDuplicate {
		return refuse(CodeDuplicateTensor, "%s at byte %d of the header", j.Msg, j.Offset)
	}
	return refuse(CodeHeaderNotJSON, "the header is not JSON: %s", headerFault(err))
}

// headerFault gives the text of a fault and the place in the header.
func headerFault(err error) string {
	if j, ok := errors.AsType[*strictjson.Error](err); ok {
		return fmt.Sprintf("%s at byte %d of the header", j.Msg, j.Offset)
	}
	return err.Error()
}

func (p *parser) metadata(r *strictjson.Reader) error {
	if r.Kind() != strictjson.Object {
		return refuse(CodeMetadata, "%s is %v, must be an object of strings", metadataName, r.Kind())
	}
	p.head.Metadata = map[string]string{}
	return r.Object(func(key string) (err error) {
		if k := r.Kind(); k != strictjson.String && k != strictjson.Invalid {
			return refuse(CodeMetadata, "%s has %v under %+.80q, must be a string", metadataName, k, key)
		}
		p.head.Metadata[key], err = r.String()
		return err
	})
}

// tensor reads the description of one tensor and checks what can be checked of it alone. Members that the format does
// not have are passed over, as the reference implementation does.
func (p *parser) tensor(r *strictjson.Reader, name string) error {
	p.next = Tensor{Name: name}
	t := &p.next
	var dtype, shape, offsets bool
	p.shape = p.shape[:0]
	err := r.Object(func(member string) (err error) {
		switch member {
		case "dtype":
			dtype = true
			var text string
			text, err = r.String()
			t.DType = DType(text)
		case "shape":
			shape = true
			err = r.Array(func(int) error {
				v, err := r.Uint64()
				p.shape = append(p.shape, v)
				return err
			})
		case "data_offsets":
			offsets = true
			err = p.offsets(r, t)
		default:
			err = r.Skip()
		}
		return err
	})
	if err != nil {
		return tensorFault(name, err)
	}
	if !dtype || !shape || !offsets {
		return refuse(CodeBadTensor, "tensor %+.80q lacks dtype, shape or data_offsets", name)
	}
	t.Shape = p.keep(p.shape)
	if t.End < t.Begin {
		return refuse(CodeOffsetOrder, "tensor %+.80q ends at %d, before it begins at %d", name, t.End, t.Begin)
	}
	p.head.Tensors = append(p.head.Tensors, *t)
	if t.DType.Bits() > 0 {
		return checkSize(*t)
	}
	if p.unknown == nil {
		p.unknown = refuse(CodeUnknownDType, "tensor %+.80q has the dtype %+.40q, which the format does not have", name,
			t.DType)
	}
	return nil
}

func (p *parser) offsets(r *strictjson.Reader, t *Tensor) error {
	count := 0
	err := r.Array(func(i int) error {
		v, err := r.Uint64()
		if i == 0 {
			t.Begin = v
		} else {
			t.End = v
		}
		count = i + 1
		return err
	})
	if err == nil && count != 2 {
		return refuse(CodeBadTensor, "tensor %+.80q has %d data_offsets, must have 2", t.Name, count)
	}
	return err
}

// tensorFault names the tensor in a fault of its description. A fault of the JSON itself stays as it is.
func tensorFault(name string, err error) error {
	j, ok := errors.AsType[*strictjson.Error](err)
	if !ok {
		return err
	}
	switch j.Rule {
	case strictjson.RuleInteger, strictjson.RuleU64:
		return refuse(CodeBadInteger, "tensor %+.80q: %s", name, headerFault(err))
	case strictjson.RuleType, strictjson.RuleNotNull:
		return refuse(CodeBadTensor, "tensor %+.80q: %s", name, headerFault(err))
	}
	return err
}

// keep returns a copy of shape.
func (p *parser) keep(shape []uint64) []uint64 {
	const chunk = 1024
	if len(shape) == 0 {
		return nil
	}
	if cap(p.arena)-len(p.arena) < len(shape) {
		p.arena = make([]uint64, 0, max(chunk, len(shape)))
	}
	start := len(p.arena)
	p.arena = append(p.arena, shape...)
	return p.arena[start:len(p.arena):len(p.arena)]
}
