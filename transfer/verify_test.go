package transfer_test

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// statesOf returns the midstates of b, in segments that are small enough for a test.
func statesOf(t *testing.T, segment int64, b []byte) *lanes.States {
	t.Helper()
	r := lanes.NewRecorder(segment)
	r.Write(b)
	_, edges := r.Take()
	s, err := lanes.New(segment, int64(len(b)), identity.DigestOf(r), edges[:lanes.Edges(int64(len(b)), segment)])
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestVerifyByMidstates: the digest decides, whatever the midstates are; where they are right they say what is damaged.
func TestVerifyByMidstates(t *testing.T) {
	const segment = 64 << 10
	right := shard(10*segment+777, 1)
	size := int64(len(right))
	last := size / segment
	other := statesOf(t, segment, slices.Concat(right[:5*segment], []byte{1}, right[5*segment+1:]))
	other.Digest = identity.Sum(right)
	one := statesOf(t, segment, right)
	one.Edge[3][0] ^= 1
	for name, c := range map[string]struct {
		states  *lanes.States
		flip    []int64 // bytes that are damaged
		damaged []transfer.Range
	}{
		"right":             {states: statesOf(t, segment, right)},
		"none":              {},
		"none, damaged":     {flip: []int64{5}},
		"one forged":        {states: one},
		"of another file":   {states: other},
		"forged, damaged":   {states: one, flip: []int64{0}, damaged: []transfer.Range{{0, segment}, {3 * segment, 2 * segment}}},
		"one byte":          {states: statesOf(t, segment, right), flip: []int64{segment}, damaged: []transfer.Range{{segment, segment}}},
		"the last":          {states: statesOf(t, segment, right), flip: []int64{size - 1}, damaged: []transfer.Range{{last * segment, size - last*segment}}},
		"two side by side":  {states: statesOf(t, segment, right), flip: []int64{7 * segment, 8*segment + 1}, damaged: []transfer.Range{{7 * segment, 2 * segment}}},
		"the first and one": {states: statesOf(t, segment, right), flip: []int64{0, 2 * segment}, damaged: []transfer.Range{{0, segment}, {2 * segment, segment}}},
	} {
		t.Run(name, func(t *testing.T) {
			b := slices.Clone(right)
			for _, at := range c.flip {
				b[at] ^= 1
			}
			dir := t.TempDir()
			write(t, filepath.Join(dir, "model"), b)
			write(t, filepath.Join(dir, "beside"), []byte("x"))
			want := []staging.File{{Name: "model", Size: size, Digest: identity.Sum(right)},
				{Name: "beside", Size: 1, Digest: identity.Sum([]byte("x"))}}
			var moved, done int64
			v, err := transfer.Verify(t.Context(), dir, want, transfer.VerifyOptions{
				Jobs: 1,
				Watch: func(e transfer.Event) {
					if e.File == "model" && e.Step == transfer.Moved {
						moved = e.Bytes
					}
					if e.Step == transfer.Done {
						done += e.Total
					}
				},
				Midstates: func(f staging.File) *lanes.States {
					if f.Name != "model" {
						return nil
					}
					return c.states
				},
			})
			if err != nil || moved != size || done != size+1 {
				t.Fatalf("%v; %d bytes moved, %d done", err, moved, done)
			}
			if len(c.flip) == 0 {
				if v.Files != 2 || v.Bytes != size+1 || len(v.Findings) > 0 {
					t.Errorf("%+v", v)
				}
				return
			}
			if v.Files != 1 || len(v.Findings) != 1 {
				t.Fatalf("%+v", v)
			}
			f := v.Findings[0]
			if f.Code != transfer.FileMismatch || f.Got != identity.Sum(b) || !reflect.DeepEqual(f.Damaged, c.damaged) {
				t.Errorf("%+v, want %v damaged", f, c.damaged)
			}
			if strings.Contains(f.String(), "; damaged: ") != (c.damaged != nil) {
				t.Errorf("it says %q", f)
			}
		})
	}
}

// TestVerifyChanged: a file that changes while its segments are read is neither right nor wrong.
func TestVerifyChanged(t *testing.T) {
	const segment = 64 << 10
	dir, b := t.TempDir(), shard(20*segment, 1)
	path := filepath.Join(dir, "model")
	write(t, path, b)
	states := statesOf(t, segment, b)
	_, err := transfer.Verify(t.Context(), dir, []staging.File{{Name: "model", Size: int64(len(b)), Digest: states.Digest}},
		transfer.VerifyOptions{
			Watch: func(e transfer.Event) {
				if e.Step == transfer.Moved {
					os.WriteFile(path, b, 0o644)
				}
			},
			Midstates: func(staging.File) *lanes.States { return states },
		})
	if err == nil || !strings.Contains(err.Error(), transfer.ErrChanged.Error()) {
		t.Errorf("got %v", err)
	}
}
