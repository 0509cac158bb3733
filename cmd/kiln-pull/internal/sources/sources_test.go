package sources

import "testing"

func TestRate(t *testing.T) {
	for s, want := range map[string]rate{
		"1000": 1000, "1K": 1000, "500k": 500_000, "20M": 20_000_000, "1.5G": 1_500_000_000, "0.5m": 500_000,
	} {
		var r rate
		if err := r.Set(s); err != nil || r != want {
			t.Errorf("%s: %d, %v, want %d", s, r, err, want)
		}
	}
	for _, s := range []string{
		"", "K", "0", "999", "-5M", "1e6", "10X", "10MB", "NaN", "Inf", "0x10K", "9999999G", "1_000K", " 5M",
	} {
		var r rate
		if err := r.Set(s); err == nil {
			t.Errorf("%q: %d", s, r)
		}
	}
}
