package access

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"

	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
)

func TestGlobs(t *testing.T) {
	odd := strings.Split("team/|team//a|team/a/|team/a//b|/|//|/a|a/|a\n|team/a\n/b|a.b|a/b/c|a||team|team/\xff|team-1/x", "|")
	for glob, repos := range map[string]string{
		"team/*":    "team/a team/a-b !team !team/a/b !other/a !xteam/a",
		"team/**":   "team/a team/a/b/c !team !teamx/a",
		"**":        "a a/b a/b/c",
		"*":         "a !a/b",
		"a/*/c":     "a/b/c !a/c !a/b/b/c",
		"team-*/x":  "team-1/x team-/x !team/x !team-1/y",
		"**/models": "a/models a/b/models !models",
		"a.b":       "a.b !axb",
	} {
		re, err := compileGlob(glob)
		if err != nil {
			t.Fatal(err)
		}
		for repo := range strings.FieldsSeq(repos) {
			repo, not := strings.CutPrefix(repo, "!")
			if re.MatchString(repo) == not {
				t.Errorf("%s on %s: got %v", glob, repo, not)
			}
		}
		for _, repo := range odd {
			if got, want := re.matches(repo), re.MatchString(repo); got != want {
				t.Errorf("%s on %q: got %v, want %v as by its expression", glob, repo, got, want)
			}
		}
	}
	for _, bad := range []string{"", "a//b", "/a", "a**", "A", "a b", "a/../b?"} {
		if _, err := compileGlob(bad); err == nil {
			t.Errorf("glob %q was taken", bad)
		}
	}
}

func file(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tokens.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestFileIsStrict(t *testing.T) {
	_, sum := NewSecret()
	ok := "version: 1\ntokens:\n- name: ci\n  sha256: " + sum + "\n" +
		"  allow:\n  - {repositories: [a/**], actions: [pull]}\n"
	if _, err := ParseFile([]byte(ok)); err != nil {
		t.Fatal(err)
	}
	for name, bad := range map[string]string{
		"empty": "", "no version": "tokens: []\n", "other version": "version: 2\n",
		"unknown member":  "version: 1\nadmin: true\n",
		"two documents":   ok + "---\nversion: 1\n",
		"duplicate key":   "version: 1\nversion: 1\n",
		"action":          strings.Replace(ok, "[pull]", "[pull, admin]", 1),
		"no actions":      strings.Replace(ok, "[pull]", "[]", 1),
		"no name":         strings.Replace(ok, "name: ci", "name: ''", 1),
		"hash":            strings.Replace(ok, sum, sum[:63], 1),
		"unknown in rule": strings.Replace(ok, "actions:", "action: x, actions:", 1),
		"twice":           ok + strings.TrimPrefix(ok, "version: 1\ntokens:\n"),
		"glob":            strings.Replace(ok, "a/**", "a/**b", 1),
	} {
		if _, err := ParseFile([]byte(bad)); err == nil {
			t.Errorf("%s: was taken", name)
		}
	}
}

// What is wrong with a file is one line for people: where, what, and what is allowed.
func TestErrorsOfAFile(t *testing.T) {
	_, sum := NewSecret()
	entry := func(more string) string {
		return "version: 1\ntokens:\n- name: ci\n  sha256: " + sum + "\n" + more
	}
	for bad, want := range map[string]string{
		"":                                        "empty: want version: 1",
		"# nothing\n":                             "empty: want version: 1",
		"version: 1\nadmin: yes\n":                `line 2: "admin" is unknown in the file: want version, anonymous, tokens`,
		"version: one\n":                          "line 1: version: want 1",
		"version: 1\ntokens: frob\n":              "line 2: tokens: want a list",
		"frob\n":                                  "line 1: the file: want version, anonymous, tokens",
		"version: 1\nversion: 1\n":                `line 2: "version" occurs twice in the file`,
		"version: [\n":                            "not YAML: line ",
		"a\x01b":                                  "not YAML: ",
		"version: 1\n---\nversion: 1\n":           "more than one YAML document",
		"version: 1\n--- [\n":                     "not YAML: ",
		"version: 1\ntokens: [x]\n":               "line 2: a token: want name, sha256, expires, allow",
		entry("  pull: yes\n"):                    `line 5: "pull" is unknown in a token: want name, sha256, expires, allow`,
		entry("  expires:\n"):                     "line 5: expires: want a time, as 2030-01-31T12:00:00Z",
		entry("  expires: tomorrow\n"):            "line 5: expires: want a time, as 2030-01-31T12:00:00Z",
		entry("  expires: 0001-01-01\n"):          "line 5: expires: want a time",
		entry("  allow: {actions: [pull]}\n"):     "line 5: allow: want a list",
		entry("  allow: [{repository: x}]\n"):     `line 5: "repository" is unknown in a rule: want repositories, actions`,
		entry("  allow: [{actions: [[]]}]\n"):     "line 5: actions: want a text",
		entry("  allow: [{actions: pull}]\n"):     "line 5: actions: want a list",
		entry("- {name: !!binary aGk=}\n"):        "line 5: name: want a text",
		entry("- {name: [], sha256: x}\n"):        "line 5: name: want a text",
		entry("- {name: \"a\\nb\", sha256: x}\n"): `token 2 ("a\nb"): name must have`,
		entry("- {name: a b, sha256: x}\n"):       `token 2 ("a b"): name must have`,
		entry("- {name: \"a\\u202eb\"}\n"):        "name must have",
	} {
		_, err := ParseFile([]byte(bad))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %s", bad, err, want)
			continue
		}
		for _, no := range []string{"\n", "access.", "unmarshal", "yaml:"} {
			if strings.Contains(err.Error(), no) {
				t.Errorf("%q: %q in %q", bad, no, err)
			}
		}
	}
}

func TestWhatAFileMayHold(t *testing.T) {
	_, sum := NewSecret()
	f, err := ParseFile([]byte("version: 1\nanonymous: &all\n- {repositories: [a/*], actions: [pull]}\ntokens:\n" +
		"- name: 7\n  sha256: " + sum + "\n  expires: 2031-02-03T04:05:06Z\n  allow: *all\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := Rule{[]string{"a/*"}, []Action{Pull}}
	expires := time.Date(2031, 2, 3, 4, 5, 6, 0, time.UTC)
	if got := f.Tokens[0]; got.Name != "7" || got.SHA256 != sum || !got.Expires.Equal(expires) ||
		!slices.Equal(got.Allow[0].Repositories, want.Repositories) || !slices.Equal(got.Allow[0].Actions, want.Actions) {
		t.Errorf("%+v", f)
	}
	b, err := f.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	if again, err := ParseFile(b); err != nil || !reflect.DeepEqual(again, f) {
		t.Errorf("%+v, %v", again, err)
	}
	for _, empty := range []string{"version: 1\n", "version: 1\ntokens:\nanonymous: []\n"} {
		if _, err := ParseFile([]byte(empty)); err != nil {
			t.Error(err)
		}
	}
}

func TestSecretsDiffer(t *testing.T) {
	a, x := NewSecret()
	b, y := NewSecret()
	if a == b || x == y || !strings.HasPrefix(a, TokenPrefix) || len(a) < len(TokenPrefix)+22 {
		t.Fatal(a, b)
	}
}

func request(header ...string) *http.Request {
	r, _ := http.NewRequest("GET", "http://x/", nil)
	if len(header) == 1 {
		r.Header.Set("Authorization", header[0])
	}
	return r
}

func TestCallers(t *testing.T) {
	secret, sum := NewSecret()
	old, oldSum := NewSecret()
	path := file(t, "version: 1\nanonymous:\n- {repositories: [public/**], actions: [pull]}\ntokens:\n"+
		"- name: ci\n  sha256: "+sum+"\n  allow:\n  - {repositories: [team/**], actions: [pull, push]}\n"+
		"- name: old\n  sha256: "+oldSum+"\n  expires: 2020-01-01T00:00:00Z\n  allow:\n"+
		"  - {repositories: ['**'], actions: [pull]}\n")
	g, err := Load(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	basic := request()
	basic.SetBasicAuth("anybody", secret)
	for _, r := range []*http.Request{request("Bearer " + secret), request("bearer " + secret), basic} {
		c, err := g.Caller(r)
		if err != nil || c.Name != "ci" {
			t.Fatalf("%+v, %v", c, err)
		}
		if !c.May(Push, "team/a/b") || c.May(Delete, "team/a") || c.May(Pull, "other/a") || c.May(Pull, "public/a") {
			t.Error("rights of ci are wrong")
		}
		if err := c.Check(Delete, "team/a"); !errors.Is(err, api.ErrDenied) {
			t.Error(err)
		}
		if c.CheckAnywhere(Push) != nil || c.CheckAnywhere(Delete) == nil {
			t.Error("CheckAnywhere")
		}
	}
	nobody, err := g.Caller(request())
	if err != nil || nobody.Name != "" || !nobody.Sees("public/x") || nobody.Sees("team/a") {
		t.Fatalf("%+v, %v", nobody, err)
	}
	if err := nobody.Check(Pull, "team/a"); !errors.Is(err, api.ErrUnauthorized) {
		t.Error(err)
	}
	for _, h := range []string{"Bearer " + old, "Bearer " + secret + "x", "Bearer ", "Digest x", "Basic !!",
		"Bearer " + sum} {
		if c, err := g.Caller(request(h)); !errors.Is(err, api.ErrUnauthorized) || c.MayAnywhere(Pull) {
			t.Errorf("%s: %+v, %v", h, c, err)
		}
	}
	if c, err := Open().Caller(request()); err != nil || !c.May(Delete, "x") {
		t.Error("an open gate is not open")
	}
	if new(Caller).May(Pull, "x") {
		t.Error("the zero caller may pull")
	}
}

func TestFileIsFollowed(t *testing.T) {
	secret, sum := NewSecret()
	text := func(actions string) []byte {
		return []byte(
			"version: 1\ntokens:\n- name: ci\n  sha256: " + sum + "\n  allow:\n" +
				"  - {repositories: ['**'], actions: " + actions + "}\n",
		)
	}
	path := file(t, string(text("[pull]")))
	var log bytes.Buffer
	g, err := Load(path, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	g.every = 0
	replace := func(b []byte, age time.Duration) {
		t.Helper()
		next := path + ".new"
		if err := os.WriteFile(next, b, 0o600); err != nil {
			t.Fatal(err)
		}
		at := time.Now().Add(-age)
		if err := errors.Join(os.Chtimes(next, at, at), os.Rename(next, path)); err != nil {
			t.Fatal(err)
		}
	}
	may := func(a Action) bool {
		c, err := g.Caller(request("Bearer " + secret))
		return err == nil && c.May(a, "x")
	}
	if may(Push) {
		t.Fatal("may push too early")
	}
	replace(text("[pull, push]"), 3*time.Hour)
	if !may(Push) {
		t.Fatal("a changed file was not read")
	}
	replace([]byte("version: 1\ntokens: nonsense\n"), 2*time.Hour)
	for range 2 {
		if !may(Push) {
			t.Fatal("an invalid file changed the rules")
		}
	}
	if n := strings.Count(log.String(), "not valid"); n != 1 {
		t.Fatalf("said %d times that the file is not valid:\n%s", n, &log)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if !may(Push) {
			t.Fatal("a removed file changed the rules")
		}
	}
	if n := strings.Count(log.String(), "not valid"); n != 2 {
		t.Fatalf("said %d times that the file is not valid:\n%s", n, &log)
	}
	replace(text("[pull]"), time.Hour)
	if may(Push) || !may(Pull) {
		t.Fatal("the next valid file was not read")
	}
}

// A file that is written in place is read again, also if its size is the same and its time of change was set back.
func TestFileIsWrittenInPlace(t *testing.T) {
	secret, sum := NewSecret()
	text := "version: 1\ntokens:\n- {name: ci, sha256: " + sum + ", allow: [{repositories: ['**'], actions: [pull]}]}\n"
	path := file(t, text)
	g, err := Load(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	g.every = 0
	was := g.state
	for now := was; now.changed == was.changed; { // times of change may have ticks of milliseconds
		text := strings.ReplaceAll(text, "pull", "push")
		if err := errors.Join(os.WriteFile(path, []byte(text), 0o600), os.Chtimes(path, was.mod, was.mod)); err != nil {
			t.Fatal(err)
		}
		if now, err = stat(path); err != nil || now.size != was.size || !now.mod.Equal(was.mod) {
			t.Fatal(now, err)
		}
	}
	if c, err := g.Caller(request("Bearer " + secret)); err != nil || c.May(Pull, "x") || !c.May(Push, "x") {
		t.Error("it was not read again:", err)
	}
}

// A change is seen after a while, and one that makes an unknown token known at once.
func TestFileIsNotLookedAtAllTheTime(t *testing.T) {
	secrets, entries := [3]string{}, [3]string{}
	for i := range secrets {
		var sum string
		secrets[i], sum = NewSecret()
		entries[i] = fmt.Sprintf("- {name: t%d, sha256: %s, allow: [{repositories: ['**'], actions: [pull]}]}\n", i, sum)
	}
	path := file(t, "version: 1\ntokens:\n"+entries[0]+entries[1])
	g, err := Load(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	g.every = time.Hour
	known := func(i int) bool {
		_, err := g.Caller(request("Bearer " + secrets[i]))
		return err == nil
	}
	if err := os.WriteFile(path, []byte("version: 1\ntokens:\n"+entries[1]+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if !known(0) || !known(1) {
		t.Fatal("the file was read before its time")
	}
	if err := os.WriteFile(path, []byte("version: 1\ntokens:\n"+entries[1]+entries[2]+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if !known(2) || known(0) || !known(1) {
		t.Fatal("a new token is not known at once")
	}
	if err := os.WriteFile(path, []byte("version: 1\ntokens:\n"+entries[2]), 0o600); err != nil {
		t.Fatal(err)
	}
	g.every = 0
	if known(1) || !known(2) {
		t.Fatal("a revoked token is known")
	}
}

func TestFilter(t *testing.T) {
	for _, c := range []struct {
		rules []Rule
		all   bool
	}{
		{nil, false},
		{[]Rule{{[]string{"**"}, []Action{Push, Delete}}}, false},
		{[]Rule{{[]string{"*", "*/**", "a/**"}, []Action{Pull}}}, false},
		{[]Rule{{[]string{"x"}, []Action{Pull}}, {[]string{"y", "**"}, []Action{Push, Pull}}}, true},
	} {
		rules, err := compileRules(c.rules)
		if err != nil {
			t.Fatal(err)
		}
		see, next := Caller{Name: "x", rules: rules}.Filter()
		if (see == nil) != c.all || (next == nil) != c.all {
			t.Errorf("%v: all is %v, want %v", c.rules, see == nil, c.all)
		}
	}
	if see, next := Everyone().Filter(); see != nil || next != nil {
		t.Error("everyone does not see all")
	}
	if see, _ := (Caller{}).Filter(); see == nil || see("x") {
		t.Error("nobody sees something")
	}
}

// TestNext walks names in byte order, as a listing does, and compares what it meets with what Sees says of each name.
func TestNext(t *testing.T) {
	var names []string
	for _, a := range []string{"a", "aa", "b", "team", "team-x", "zoo"} {
		for _, b := range []string{"", "/a", "/b", "/b/c", "/bb", "/x-dev", "/y-dev/z"} {
			names = append(names, a+b)
		}
	}
	slices.Sort(names)
	for _, globs := range [][]string{
		{"a"}, {"**"}, {"*"}, {"team/**"}, {"team/*"}, {"team*/b"}, {"team/b/c", "b/a"}, {"*/b"}, {"zoo/*-dev", "a/**"},
		{"team/b*", "team/b", "aa"}, {"nothing", "zzz/**"},
	} {
		rules, err := compileRules([]Rule{
			{Repositories: globs, Actions: []Action{Pull}},
			{Repositories: []string{"**"}, Actions: []Action{Push}},
		})
		if err != nil {
			t.Fatal(err)
		}
		c := Caller{rules: rules}
		var want, got []string
		for _, n := range names {
			if c.Sees(n) {
				want = append(want, n)
			}
		}
		steps, at := 0, ""
		for ; ; steps++ {
			next, found := c.Next(at)
			i, _ := slices.BinarySearch(names, next)
			if !found || i == len(names) {
				break
			}
			if next < at {
				t.Fatalf("%q: Next(%q) went back to %q", globs, at, next)
			}
			if c.Sees(names[i]) {
				got = append(got, names[i])
			}
			at = names[i] + "\x00"
		}
		if !slices.Equal(got, want) {
			t.Errorf("%q: met %q, want %q", globs, got, want)
		}
		if exact := !strings.Contains(strings.Join(globs, ""), "*"); exact && steps > len(globs) {
			t.Errorf("%q: %d steps", globs, steps)
		}
	}
	if _, found := (Caller{}).Next(""); found {
		t.Error("the zero caller sees something")
	}
	if next, found := Everyone().Next("x"); !found || next != "x" {
		t.Error("Everyone does not see x")
	}
}
