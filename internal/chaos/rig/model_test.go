package rig

import "testing"

// Half of a change must not pass for the whole of it or for nothing.
func TestSettle(t *testing.T) {
	a, b := newBlob(1, 1).Digest, newBlob(2, 1).Digest
	x, y := Key{"r", "x"}, Key{"r", "y"}
	for name, o := range map[string]struct {
		seen Names
		want bool
	}{
		"all":     {Names{x: b, y: b}, true},
		"nothing": {Names{x: a}, true},
		"half":    {Names{x: b}, false},
		"another": {Names{x: a, y: a}, false},
	} {
		l := newLedger()
		l.made(Change{x: a})
		l.doubts = []Change{{x: b, y: b}}
		if wrong := l.settle(o.seen); (len(wrong) == 0) != o.want {
			t.Errorf("%s: %q", name, wrong)
		}
	}
}
