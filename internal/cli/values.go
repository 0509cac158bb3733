package cli

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Size is the value of a flag that takes a number of bytes.
type Size int64

var sizeUnits = []struct {
	name string
	n    int64
}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"B", 1}, {"", 1}}

// Type implements pflag.Value.
func (s *Size) Type() string { return "size" }

// String implements pflag.Value: in a unit in which it is a small whole number, if there is one.
func (s *Size) String() string {
	for _, u := range sizeUnits[:3] {
		if n := int64(*s); n%u.n == 0 && n/u.n > 0 && n/u.n < 1024 {
			return fmt.Sprintf("%d%s", n/u.n, u.name)
		}
	}
	return fmt.Sprint(int64(*s))
}

// Set implements pflag.Value: it reads a whole number with a unit.
func (s *Size) Set(text string) error {
	for _, u := range sizeUnits {
		digits, ok := strings.CutSuffix(text, u.name)
		if !ok {
			continue
		}
		n, err := strconv.ParseUint(digits, 10, 63)
		if err != nil || n > math.MaxInt64/uint64(u.n) {
			break
		}
		*s = Size(int64(n) * u.n)
		return nil
	}
	return fmt.Errorf("%.40q: want a number of bytes, as 32MiB or 100MB", text)
}

// NotNegative refuses a flag's duration below 0.
func NotNegative(flag string, d time.Duration) error {
	if d < 0 {
		return Usagef("%s %s: want 0 or more", flag, d)
	}
	return nil
}

// Share refuses a flag's number that is no share: more than 0, and 1 at most.
func Share(flag string, v float64) error {
	if !(v > 0 && v <= 1) {
		return Usagef("%s %g: want more than 0, and 1 at most", flag, v)
	}
	return nil
}
