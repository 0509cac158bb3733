package identity

import (
	"fmt"
	"math/bits"
	"strings"
	"unicode/utf8"
)

// Stage says which step of reading a manifest refused it.
type Stage string

// The stages.
const (
	StageParse    Stage = "parse"    // the text is not a document of this form
	StageValidate Stage = "validate" // the document breaks a rule of kiln.base-weight-shards.v1
)

// Rules of the validate stage, in the order in which they are checked. The rules of the parse stage are those of the
// JSON reader (json-syntax, utf-8, no-duplicate-keys, no-trailing-data, type, not-null, required, no-unknown-fields,
// exact-field-names, integer-only, u64-range, u32-range, depth) and RuleInputSize.
const (
	RuleInputSize          = "input-size"
	RuleSchemaVersion      = "schema-version"
	RuleManifestType       = "manifest-type"
	RuleAggregateAlgorithm = "aggregate-algorithm"
	RuleShardCount         = "shard-count"
	RuleFilename           = "filename"     // per shard, in list order, as are the next three
	RuleNonzeroSize        = "nonzero-size" //
	RuleDigestForm         = "digest-form"  // also of the aggregate, after the total
	RuleSortedUnique       = "sorted-unique"
	RuleTotalOverflow      = "total-overflow"
	RuleTotal              = "total"
	RuleAggregate          = "aggregate"
)

// Error says why a shard manifest is refused: at which stage, by which rule, at which shard, with which values.
type Error struct {
	Stage Stage
	Rule  string
	Shard int    // index in the list, -1 when the fault is not in one shard
	Msg   string // place and values on one line
	Err   error  // what the JSON reader said, nil in the validate stage
}

// Error gives one line that ends with the rule.
func (e *Error) Error() string { return "shard manifest: " + e.Msg + " (" + e.Rule + ")" }

// Unwrap returns the error of the JSON reader, if any.
func (e *Error) Unwrap() error { return e.Err }

func refuse(rule string, shard int, format string, args ...any) error {
	return &Error{Stage: StageValidate, Rule: rule, Shard: shard, Msg: fmt.Sprintf(format, args...)}
}

// Validate checks every rule of kiln.base-weight-shards.v1 in the documented order. The error is an *Error.
func (m Manifest) Validate() error {
	if err := m.validateShards(); err != nil {
		return err
	}
	return checkAggregate(m)
}

// validateShards checks all rules but that of the aggregate.
func (m Manifest) validateShards() error {
	if err := checkCount(len(m.Shards)); err != nil {
		return err
	}
	for i, s := range m.Shards {
		if err := checkShard(m.Shards[:i], s, nil); err != nil {
			return err
		}
	}
	return checkTotal(m)
}

func checkCount(n int) error {
	if n < 1 || n > MaxShards {
		return refuse(RuleShardCount, -1, "%d shards, must be 1 to %d", n, MaxShards)
	}
	return nil
}

// checkShard checks the shard that follows those before it. form is what reading the text of its digest gave.
func checkShard(before []Shard, s Shard, form error) error {
	i := len(before)
	if err := CheckFilename(s.Filename); err != nil {
		return refuse(RuleFilename, i, "shards[%d]: %v", i, err)
	}
	switch {
	case s.Size == 0:
		return refuse(RuleNonzeroSize, i, "shards[%d] %s: size_bytes is 0, must be at least 1", i, s.Filename)
	case form != nil:
		return refuse(RuleDigestForm, i, "shards[%d] %s: %v", i, s.Filename, form)
	case i == 0 || before[i-1].Filename < s.Filename:
		return nil
	case before[i-1].Filename == s.Filename:
		return refuse(RuleSortedUnique, i, "shards[%d] %s: the same filename as the shard before it", i, s.Filename)
	}
	return refuse(RuleSortedUnique, i, "shards[%d] %s: comes after %s, must be in ascending byte order", i, s.Filename,
		before[i-1].Filename)
}

// CheckFilename says whether a name can stand in a shard manifest: 1 to 255 bytes out of A-Z a-z 0-9 . - _, ending with
// .safetensors in lower case. The error quotes the name, escaped, so that it stays on one line.
func CheckFilename(name string) error {
	if len(name) > MaxFilename {
		return fmt.Errorf("filename %+.60q... has %d bytes, at most %d are allowed", name, len(name), MaxFilename)
	}
	if n := portable(name); n < len(name) {
		c, _ := utf8.DecodeRuneInString(name[n:])
		return fmt.Errorf("filename %+q: %+q is not allowed, only A-Z a-z 0-9 . - _", name, c)
	}
	if !strings.HasSuffix(name, Extension) {
		return fmt.Errorf("filename %q does not end with %s", name, Extension)
	}
	return nil
}

// portable returns how many bytes at the start of a text can stand in the name of a shard.
func portable[text string | []byte](s text) (n int) {
	for n < len(s) && isPortable[s[n]] {
		n++
	}
	return n
}

var isPortable = func() (is [256]bool) {
	for _, c := range []byte("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.-_") {
		is[c] = true
	}
	return is
}()

func checkTotal(m Manifest) error {
	var sum, carry uint64
	for _, s := range m.Shards {
		if sum, carry = bits.Add64(sum, s.Size, 0); carry != 0 {
			return refuse(RuleTotalOverflow, -1, "the sizes of the shards add up to more than 2^64-1")
		}
	}
	if sum != m.TotalSize {
		return refuse(RuleTotal, -1, "total_size_bytes is %d, the shards add up to %d", m.TotalSize, sum)
	}
	return nil
}

func checkAggregate(m Manifest) error {
	if a := aggregate(m.Shards); a != m.Aggregate {
		return refuse(RuleAggregate, -1, "aggregate_sha256 is %v, the shards give %v", m.Aggregate, a)
	}
	return nil
}
