package ranges

import (
	"errors"
	"math"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
)

func TestParse(t *testing.T) {
	for spec, want := range map[string]Part{
		"bytes=0-0": {0, 1}, "bytes=2-5": {2, 4}, "bytes=2-": {2, 8}, "bytes=-3": {7, 3}, "bytes=-30": {0, 10},
		"BYTES = 9-99999999999999999999": {9, 1},
	} {
		if p, ok, err := Parse(spec, 10); p != want || !ok || err != nil {
			t.Errorf("%s: %+v, %v, %v", spec, p, ok, err)
		}
	}
	for _, spec := range []string{"", "items=0-1", "bytes=-", "bytes=1-2,4-5", "bytes=+1-2", "bytes=a-b", "bytes"} {
		if p, ok, err := Parse(spec, 10); ok || err != nil {
			t.Errorf("%q: %+v, %v, %v: want the whole blob", spec, p, ok, err)
		}
	}
	for _, spec := range []string{"bytes=10-", "bytes=5-4", "bytes=-0"} {
		if _, ok, err := Parse(spec, 10); ok || !errors.Is(err, api.ErrRangeInvalid) {
			t.Errorf("%s: %v, %v", spec, ok, err)
		}
	}
	if n, has, ok := Pos("99999999999999999999"); n != math.MaxInt64 || !has || !ok {
		t.Errorf("%d, %v, %v", n, has, ok)
	}
}
