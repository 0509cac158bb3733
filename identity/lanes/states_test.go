package lanes

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
)

// seal ends a form with its own hash.
func seal(body []byte) []byte {
	sum := identity.Sum(body)
	return append(bytes.Clone(body), sum[:]...)
}

// form returns that of midstates with segments of SegmentSize, over states that are of no real blob.
func form(size int64, edges int) []byte {
	b := []byte(formatName)
	b = binary.BigEndian.AppendUint64(b, SegmentSize)
	b = binary.BigEndian.AppendUint64(b, uint64(size))
	b = append(b, random(20, 32+32*edges)...)
	return seal(b)
}

// TestForm holds the form to its description, with a blob whose midstate can be had with other means: 16 MiB of zeros
// and the letter x.
func TestForm(t *testing.T) {
	blob := append(make([]byte, SegmentSize), 'x')
	b, err := record(t, SegmentSize, blob, 1<<20).MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	want := hex.EncodeToString([]byte("kiln.sha256-midstates.v1")) + "0000000001000000" + "0000000001000001" +
		identity.Sum(blob).Hex()
	if got := hex.EncodeToString(b); !strings.HasPrefix(got, want) || len(b) != 24+8+8+32+32+32 {
		t.Errorf("form of %d bytes: %s", len(b), got)
	}
	state := NewRecorder(SegmentSize)
	state.Write(blob[:SegmentSize])
	saved, err := state.MarshalBinary()
	if err != nil || !bytes.Equal(b[72:104], saved[4:36]) {
		t.Errorf("state %x, %v", b[72:104], err)
	}
	if !bytes.Equal(b, seal(b[:len(b)-32])) {
		t.Error("the form does not end with its hash")
	}
}

func TestParse(t *testing.T) {
	for _, c := range []struct {
		size  int64
		edges int
		ok    bool
	}{
		{0, 0, true}, {1, 0, true}, {SegmentSize, 0, true}, {SegmentSize + 1, 1, true}, {5 * SegmentSize, 4, true},
		{0, 1, false}, {SegmentSize, 1, false}, {SegmentSize + 1, 0, false}, {SegmentSize + 1, 2, false},
		{-1, 0, false}, {-1 << 63, 0, false}, {1<<63 - 1, 0, false}, {SegmentSize * (MaxEdges + 2), MaxEdges + 1, false},
	} {
		b := form(c.size, c.edges)
		s, err := Parse(b)
		if (err == nil) != c.ok {
			t.Errorf("%d bytes, %d edges: %v", c.size, c.edges, err)
		}
		if err != nil {
			continue
		}
		if again, err := s.MarshalBinary(); err != nil || !bytes.Equal(again, b) {
			t.Errorf("%d bytes, %d edges: marshals to another form, %v", c.size, c.edges, err)
		}
	}
	if largest, err := Parse(form(SegmentSize*(MaxEdges+1), MaxEdges)); err != nil || len(largest.Edge) != MaxEdges {
		t.Errorf("the largest form: %v", err)
	}
	if len(form(SegmentSize*(MaxEdges+1), MaxEdges)) != MaxBytes {
		t.Error("MaxBytes is not the size of the largest form")
	}
}

func TestParseRefuses(t *testing.T) {
	good := form(3*SegmentSize, 2)
	body := good[:len(good)-32]
	change := func(at int, to byte) []byte {
		b := bytes.Clone(body)
		b[at] = to
		return seal(b)
	}
	for what, b := range map[string][]byte{
		"nothing":                nil,
		"only the name":          []byte(formatName),
		"too short":              good[:headSize+31],
		"only a seal":            seal([]byte(formatName)),
		"cut":                    good[:len(good)-1],
		"cut at a state":         good[:len(good)-32],
		"something after":        append(bytes.Clone(good), 0),
		"a state after":          append(bytes.Clone(good), make([]byte, 32)...),
		"half a state":           seal(body[:len(body)-16]),
		"another version":        change(23, '2'),
		"another segment":        change(31, 64),
		"a huge segment":         change(24, 0x80),
		"a size of another blob": change(39, 1),
		"text":                   []byte(`{"format":"kiln.sha256-midstates.v1"}`),
	} {
		if _, err := Parse(b); err == nil || !strings.HasPrefix(err.Error(), "read midstates: ") {
			t.Errorf("%s: %v", what, err)
		}
	}
	for at := range good {
		b := bytes.Clone(good)
		b[at] ^= 1
		if _, err := Parse(b); err == nil {
			t.Errorf("a bit flipped at %d: no error", at)
		}
	}
	if _, err := ParseSegments(good, small); err == nil {
		t.Error("segments of 16 MiB pass for smaller ones")
	}
}

func TestNewRefuses(t *testing.T) {
	for what, s := range map[string]States{
		"a state too few":  {Segment: 64, Size: 129, Edge: make([]State, 1)},
		"a state too many": {Segment: 64, Size: 128, Edge: make([]State, 2)},
		"no segment":       {Size: 10},
		"an odd segment":   {Segment: 100, Size: 10},
		"a negative size":  {Segment: 64, Size: -1},
		"too many edges":   {Segment: 64, Size: 64 * (MaxEdges + 2), Edge: make([]State, MaxEdges+1)},
	} {
		if _, err := New(s.Segment, s.Size, s.Digest, s.Edge); err == nil {
			t.Errorf("%s: no error from New", what)
		}
		if _, err := s.MarshalBinary(); err == nil {
			t.Errorf("%s: no error from MarshalBinary", what)
		}
	}
}

// FuzzParse: what is taken marshals to the same bytes, and its checks end without a panic. The seal is made right, as
// nothing would come past it otherwise.
func FuzzParse(f *testing.F) {
	for _, b := range [][]byte{form(0, 0), form(SegmentSize+1, 1), form(3*SegmentSize, 2), form(1<<62, 1), {}} {
		f.Add(b[:max(0, len(b)-32)], true)
		f.Add(b, false)
	}
	f.Fuzz(func(t *testing.T, b []byte, sealed bool) {
		if sealed {
			b = seal(b)
		}
		s, err := Parse(b)
		if err != nil {
			return
		}
		again, err := s.MarshalBinary()
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("marshals to %d other bytes, %v", len(again), err)
		}
		stream := s.Stream()
		stream.Write(b)
		if bad := stream.End(); len(bad) == 0 || len(bad) > s.Len() {
			t.Errorf("a stream of other bytes: segments %d of %d failed", len(bad), s.Len())
		}
		for i := range s.Len() {
			if off, n := s.Range(i); off < 0 || n < 0 || off+n > s.Size {
				t.Fatalf("segment %d is %d bytes at %d of %d", i, n, off, s.Size)
			}
		}
	})
}
