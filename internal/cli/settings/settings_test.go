package settings

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/kiln-registry/kiln-registry/internal/cli"
)

// flags are some of each type.
type flags struct {
	*pflag.FlagSet
	addr  string
	idle  time.Duration
	loud  bool
	share float64
	tags  []string
	n     int
}

func newFlags(t *testing.T, args ...string) *flags {
	t.Helper()
	f := &flags{FlagSet: pflag.NewFlagSet("serve", pflag.ContinueOnError)}
	f.StringVar(&f.addr, "addr", "127.0.0.1:5000", "")
	f.DurationVar(&f.idle, "idle-timeout", time.Minute, "")
	f.BoolVar(&f.loud, "loud", false, "")
	f.Float64Var(&f.share, "gc-share", 0.5, "")
	f.StringSliceVar(&f.tags, "immutable-tags", nil, "")
	f.IntVar(&f.n, "n", 7, "")
	f.String(Config, "", "")
	f.Bool(Print, false, "")
	if err := f.Parse(args); err != nil {
		t.Fatal(err)
	}
	return f
}

func file(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kiln.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func written(t *testing.T, s *Settings) string {
	t.Helper()
	var out strings.Builder
	if err := s.Write(&out); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestPrecedence(t *testing.T) {
	path := file(t, "# ours\naddr: 127.0.0.1:3\nidle-timeout: 3s\nloud: true\nimmutable-tags: ['a:v*', \"**:1\"]\n")
	env := []string{"KILN_CONFIG=" + path, "KILN_ADDR=127.0.0.1:2", "KILN_IDLE_TIMEOUT=2s", "KILN_LOUD=", "ADDR=x",
		"KILN_TOKEN=secret"}
	f := newFlags(t, "--addr", "127.0.0.1:1")
	s, err := Read(f.FlagSet, env)
	if err != nil {
		t.Fatal(err)
	}
	want := `addr: 127.0.0.1:1 # --addr
gc-share: 0.5 # default
idle-timeout: 2s # KILN_IDLE_TIMEOUT
immutable-tags: ['a:v*', '**:1'] # ` + path + ` line 5
loud: true # ` + path + ` line 4
n: 7 # default
`
	got := written(t, s)
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if f.addr != "127.0.0.1:1" || f.idle != 2*time.Second || !f.loud || len(f.tags) != 2 ||
		!s.Given("loud") || s.Given("n") {
		t.Errorf("%+v", f)
	}
	// What is printed is a file that sets the same.
	again := newFlags(t, "--config", file(t, got))
	if _, err := Read(again.FlagSet, nil); err != nil {
		t.Fatal(err)
	}
	if again.addr != f.addr || again.idle != f.idle || again.loud != f.loud ||
		!cmp.Equal(again.tags, f.tags) || again.n != 7 {
		t.Errorf("%+v, want %+v", again, f)
	}
}

func TestNothingSet(t *testing.T) {
	for _, text := range []string{"", "# nothing\n", "---\n", "{}\n", "null\n"} {
		s, err := Read(newFlags(t, "--config", file(t, text)).FlagSet, nil)
		if err != nil || strings.Count(written(t, s), "# default") != 6 {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestRefusedFiles(t *testing.T) {
	for text, want := range map[string]string{
		"\nidle_timeout: 3s\n":         `line 2: "idle_timeout" is no setting; the nearest is idle-timeout`,
		"addr: a\nADDR: b":             `line 2: "ADDR" is no setting`,
		"addr: a\nloud: true\naddr: b": `line 3: addr is set twice, first at `,
		"config: x":                    `"config" is no setting`,
		"print-config: true":           `"print-config" is no setting`,
		"loud: yes":                    `line 1: loud: want true or false`,
		"idle-timeout: 30":             `line 1: idle-timeout: want a duration, as 90s or 24h`,
		"gc-share: much":               `gc-share: want a number`,
		"n: 1.5":                       `n: want a whole number`,
		"addr:":                        `line 1: addr: has no value; leave it out for the default`,
		"addr: [a]":                    `line 1: addr: want one value, not a list`,
		"addr: {a: b}":                 `want a plain value`,
		"immutable-tags: [[a]]":        `want a plain value`,
		"immutable-tags: [~]":          `has no value`,
		"addr: &x a\n":                 `want a plain value`,
		"addr: !!binary YQ==":          `want a plain value`,
		"a: 1\n---\na: 1":              `more than one YAML document`,
		"addr: a\n---\naddr: b":        `more than one YAML document`,
		"- addr":                       `line 1: want settings`,
		"addr":                         `line 1: want settings`,
		"addr: [":                      `not YAML: `,
		"? [a]\n: b":                   `want the name of a setting`,
		"<<: {addr: a}":                `"<<" is no setting`,
		strings.Repeat("#", maxFile+1): `larger than`,
	} {
		path := file(t, text)
		_, err := Read(newFlags(t, "--config", path).FlagSet, nil)
		if err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), path) ||
			strings.Contains(err.Error(), "\n") || cli.Code(err) != cli.CodeBadInput {
			t.Errorf("%.40q: %v (code %d)", text, err, cli.Code(err))
		}
	}
	if _, err := Read(newFlags(t).FlagSet, []string{"KILN_CONFIG=/missing/kiln.yaml"}); !errors.Is(err, os.ErrNotExist) ||
		cli.Code(err) != cli.CodeNotFound {
		t.Error(err)
	}
}

func FuzzParse(f *testing.F) {
	for _, text := range []string{
		"addr: a\nimmutable-tags: [a, 'b']\n", "addr: &x a\nn: *x", "? [a]\n: b", "<<: {addr: a}", "---\n",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		values, err := parse("x", b, []string{"addr", "immutable-tags"})
		for name, e := range values {
			if err != nil || name != "addr" && name != "immutable-tags" || !e.list && len(e.values) != 1 {
				t.Fatalf("%s: %+v, %v", name, e, err)
			}
		}
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Fatalf("%q", err)
		}
	})
}

func TestRefusedVariables(t *testing.T) {
	for v, want := range map[string]string{
		"KILN_IDLE_TIMEOUT=30": "KILN_IDLE_TIMEOUT: want a duration",
		"KILN_LOUD=on":         "KILN_LOUD: want true or false",
	} {
		_, err := Read(newFlags(t).FlagSet, []string{v})
		if err == nil || !strings.Contains(err.Error(), want) || cli.Code(err) != cli.CodeUsage {
			t.Errorf("%s: %v", v, err)
		}
	}
}

func TestEnvironment(t *testing.T) {
	f := newFlags(t)
	s, err := Environment(f.FlagSet, []string{"KILN_ADDR=a", "KILN_N=3", "KILN_CONFIG=/missing"}, "addr")
	if err != nil || f.addr != "a" || f.n != 7 || !s.Given("addr") {
		t.Errorf("%+v, %v", f, err)
	}
}

func TestBlame(t *testing.T) {
	s, err := Read(newFlags(t, "--idle-timeout", "0s").FlagSet, []string{"KILN_ADDR=a", "KILN_LOUD=true"})
	if err != nil {
		t.Fatal(err)
	}
	err = s.Blame(cli.Hint(cli.Usagef("--addr %q: no port, --loud-er, --idle-timeout", "a"), "--loud"))
	if want := `--addr "a": no port, --loud-er, --idle-timeout (--addr is set by KILN_ADDR)`; err.Error() != want ||
		cli.Code(err) != cli.CodeUsage {
		t.Error(err)
	}
	if s.Blame(nil) != nil {
		t.Error("an error out of nothing")
	}
}

func TestStrays(t *testing.T) {
	s, err := Read(newFlags(t).FlagSet, nil)
	if err != nil {
		t.Fatal(err)
	}
	got := s.Strays([]string{
		"KILN_IDLE_TIMEOUTS=1", "KILN_ADDR=1", "KILN_TOKEN=1", "KILN_PORT_5000_TCP=1", "KILN_ADR=2", "KILN_M=", "X=1",
	})
	want := []string{
		"KILN_ADR is no setting; is KILN_ADDR meant?", "KILN_IDLE_TIMEOUTS is no setting; is KILN_IDLE_TIMEOUT meant?",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}
