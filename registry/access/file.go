package access

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// FileVersion is the version of the token file's format.
const FileVersion = 1

// TokenPrefix starts every token, so that secret scanners and people recognise one.
const TokenPrefix = "kiln_"

const maxFile = 16 << 20

// File is a token file: YAML, unknown members refused.
type File struct {
	Version   int     `yaml:"version"`             // FileVersion
	Anonymous []Rule  `yaml:"anonymous,omitempty"` // what callers without a token may do; absent: nothing
	Tokens    []Token `yaml:"tokens,omitempty"`
}

// Token is one token. The file holds the hash of its secret only.
type Token struct {
	Name    string    `yaml:"name"`              // unique; stands in the log and owns uploads
	SHA256  string    `yaml:"sha256"`            // 64 hex digits, of the whole token text
	Expires time.Time `yaml:"expires,omitempty"` // absent: never
	Allow   []Rule    `yaml:"allow"`
}

// Rule allows actions in the repositories that match one of the globs. In a glob, * stands for any characters of one
// path component, and ** as a whole component for one or more components: team/* is team/a, team/** is also team/a/b.
type Rule struct {
	Repositories []string `yaml:"repositories"`
	Actions      []Action `yaml:"actions"`
}

// NewSecret returns a new token with 256 bits from the system's random source, and the hash that the file keeps of it.
func NewSecret() (secret, sum string) {
	b := make([]byte, 32)
	rand.Read(b) // never fails: the runtime ends the program instead
	secret = TokenPrefix + base64.RawURLEncoding.EncodeToString(b)
	h := sha256.Sum256([]byte(secret))
	return secret, hex.EncodeToString(h[:])
}

// Marshal returns the file's text. It does not check it.
func (f File) Marshal() ([]byte, error) {
	var buf bytes.Buffer
	enc := yaml.NewEncoder(&buf)
	enc.SetIndent(2)
	if err := enc.Encode(f); err != nil {
		return nil, err
	}
	return buf.Bytes(), enc.Close()
}

// ruleset is a checked file, ready to be asked.
type ruleset struct {
	anonymous []rule
	tokens    []token
	at        map[[sha256.Size]byte]int // those of tokens, by their hash
}

type token struct {
	name    string
	hash    [sha256.Size]byte
	expires time.Time
	rules   []rule
}

type rule struct {
	actions []Action
	repos   []glob
}

func (r rule) has(a Action) bool { return slices.Contains(r.actions, a) }

func (r rule) allows(a Action, repo string) bool {
	return r.has(a) && slices.ContainsFunc(r.repos, func(g glob) bool { return g.matches(repo) })
}

// showsAll says whether the rule lets every repository be pulled from.
func (r rule) showsAll() bool {
	return r.has(Pull) && slices.ContainsFunc(r.repos, func(g glob) bool { return g.tail && g.start == "" })
}

func (f File) compile() (*ruleset, error) {
	if f.Version != FileVersion {
		return nil, fmt.Errorf("version: got %d, want %d", f.Version, FileVersion)
	}
	anonymous, err := compileRules(f.Anonymous)
	if err != nil {
		return nil, fmt.Errorf("anonymous: %w", err)
	}
	s := &ruleset{anonymous: anonymous, at: map[[sha256.Size]byte]int{}}
	names := map[string]bool{}
	for i, t := range f.Tokens {
		c, err := t.compile()
		if err != nil {
			return nil, fmt.Errorf("token %d (%q): %w", i+1, t.Name, err)
		}
		if _, twice := s.at[c.hash]; twice || names[c.name] {
			return nil, fmt.Errorf("token %d (%q): name or sha256 occurs twice", i+1, t.Name)
		}
		names[c.name], s.at[c.hash] = true, len(s.tokens)
		s.tokens = append(s.tokens, c)
	}
	return s, nil
}

func (t Token) compile() (token, error) {
	if !validName(t.Name) {
		return token{}, errors.New("name must have 1 to 128 bytes, all of them printable text without spaces")
	}
	sum, err := hex.DecodeString(t.SHA256)
	if err != nil || len(sum) != sha256.Size {
		return token{}, errors.New("sha256 must be 64 hex digits")
	}
	rules, err := compileRules(t.Allow)
	return token{t.Name, [sha256.Size]byte(sum), t.Expires, rules}, err
}

// validName keeps names that can't be told apart, or that would break a line, out of logs.
func validName(s string) bool {
	hidden := func(c rune) bool { return c == ' ' || !unicode.IsPrint(c) }
	return s != "" && len(s) <= 128 && utf8.ValidString(s) && !strings.ContainsFunc(s, hidden)
}

func compileRules(in []Rule) ([]rule, error) {
	var out []rule
	for i, r := range in {
		c := rule{actions: r.Actions}
		if len(r.Actions) == 0 || len(r.Repositories) == 0 {
			return nil, fmt.Errorf("rule %d: needs repositories and actions", i+1)
		}
		for _, a := range r.Actions {
			if a != Pull && a != Push && a != Delete {
				return nil, fmt.Errorf("rule %d: action %q is none of pull, push, delete", i+1, a)
			}
		}
		for _, g := range r.Repositories {
			compiled, err := compileGlob(g)
			if err != nil {
				return nil, fmt.Errorf("rule %d: %w", i+1, err)
			}
			c.repos = append(c.repos, compiled)
		}
		out = append(out, c)
	}
	return out, nil
}

var globComponent = regexp.MustCompile(`^[a-z0-9._*-]+$`)

// glob matches names of repositories.
type glob struct {
	*regexp.Regexp
	start string // of every name that matches
	exact bool   // start is the only name that matches
	tail  bool   // start and any components behind it match
}

// matches says whether a name matches. Where a glob has no star, or ends with its only one, ** as a component, that takes
// no regular expression: listings ask for each repository.
func (g glob) matches(repo string) bool {
	switch {
	case g.exact:
		return repo == g.start
	case !strings.HasPrefix(repo, g.start):
		return false
	case g.tail:
		rest := repo[len(g.start):]
		return rest != "" && rest[0] != '/' && rest[len(rest)-1] != '/' && !strings.Contains(rest, "//")
	}
	return g.MatchString(repo)
}

// next returns the first name in byte order, not before repo, that may match.
func (g glob) next(repo string) (first string, found bool) {
	switch {
	case g.start >= repo:
		return g.start, true
	case !g.exact && strings.HasPrefix(repo, g.start):
		return repo, true
	}
	return "", false
}

func compileGlob(g string) (glob, error) {
	var parts []string
	for _, c := range strings.Split(g, "/") {
		switch {
		case c == "**":
			parts = append(parts, `[^/]+(?:/[^/]+)*`)
		case !globComponent.MatchString(c), strings.Contains(c, "**"):
			return glob{}, fmt.Errorf(
				"repository glob %q: component %q; want lowercase letters, digits, . _ - and *, or ** alone",
				g,
				c,
			)
		default:
			parts = append(parts, strings.ReplaceAll(regexp.QuoteMeta(c), `\*`, `[^/]*`))
		}
	}
	re, err := regexp.Compile(`^` + strings.Join(parts, "/") + `$`)
	start, _, wild := strings.Cut(g, "*")
	return glob{re, start, !wild, g == start+"**"}, err
}
