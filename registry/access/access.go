// Package access decides who a caller is and what the caller may do in which repository. Rules come from a token file;
// with a token file everything that it does not allow is denied, without one every caller may do everything.
package access

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
)

// Action is something that a caller may do in a repository.
type Action string

// The actions. None implies another one.
const (
	Pull   Action = "pull"   // read and list
	Push   Action = "push"   // upload, put manifests and move tags
	Delete Action = "delete" // delete tags, manifests and blobs
)

// Caller is who asks, and what that caller may do. It is an argument of every operation of a registry. The zero Caller
// is anonymous and may do nothing. Callers are values, safe for concurrent use, and keep the rules of the moment they
// were recognised.
type Caller struct {
	Name  string // the token's name; empty: anonymous
	rules []rule
	all   bool
}

// Everyone returns the caller that may do everything: the one of a registry without a token file.
func Everyone() Caller { return Caller{all: true} }

// May says whether the caller may do that in the repository.
func (c Caller) May(a Action, repo string) bool {
	if c.all {
		return true
	}
	for _, r := range c.rules {
		if r.allows(a, repo) {
			return true
		}
	}
	return false
}

// MayAnywhere says whether there can be a repository in which the caller may do that.
func (c Caller) MayAnywhere(a Action) bool {
	if c.all {
		return true
	}
	for _, r := range c.rules {
		if r.has(a) {
			return true
		}
	}
	return false
}

// Sees says whether the caller may pull from the repository: the filter of every listing.
func (c Caller) Sees(repo string) bool { return c.May(Pull, repo) }

// Filter returns Sees and Next, or nil for both if there is no repository that the caller does not see: a walk then need
// not ask.
func (c Caller) Filter() (see func(repo string) bool, next func(repo string) (string, bool)) {
	if c.all || slices.ContainsFunc(c.rules, rule.showsAll) {
		return nil, nil
	}
	return c.Sees, c.Next
}

// Next returns a name of a repository, not before repo in byte order, such that the caller sees no repository between
// the two. found is false if the caller sees none from repo on. A walk in that order thus goes past what it must not
// show by one step for each glob of the caller's rules, however many repositories there are.
func (c Caller) Next(repo string) (next string, found bool) {
	if c.all {
		return repo, true
	}
	for _, r := range c.rules {
		if !r.has(Pull) {
			continue
		}
		for _, g := range r.repos {
			if at, ok := g.next(repo); ok && (!found || at < next) {
				next, found = at, true
			}
		}
	}
	return next, found
}

// Check returns nil if the caller may do that in the repository, ErrUnauthorized for an anonymous caller who may not,
// and ErrDenied for any other. The answer does not depend on whether the repository exists.
func (c Caller) Check(a Action, repo string) error {
	if c.May(a, repo) {
		return nil
	}
	return c.refusal(fmt.Sprintf("%s %s", a, repo))
}

// CheckAnywhere is Check for operations that are not about one repository: it refuses callers who may do that nowhere.
func (c Caller) CheckAnywhere(a Action) error {
	if c.MayAnywhere(a) {
		return nil
	}
	return c.refusal(string(a))
}

func (c Caller) refusal(what string) error {
	if c.Name == "" {
		return api.Errorf(api.CodeUnauthorized, "authentication required to %s", what)
	}
	return api.Errorf(api.CodeDenied, "token %q may not %s", c.Name, what)
}

// Gate recognises callers. It is safe for concurrent use.
type Gate struct {
	path  string // empty: no token file, everyone may do everything
	now   func() time.Time
	log   *slog.Logger
	every time.Duration // how long after a look at the file the next one may be

	rules  atomic.Pointer[ruleset] // of the last valid file
	loaded time.Time
	looked atomic.Int64 // when the file was last looked at, in nanoseconds since loaded

	mu    sync.Mutex
	state fileState // of the file then
}

// lookEvery bounds how long a change of the token file may go unseen. To look costs more than to recognise a caller.
const lookEvery = 100 * time.Millisecond

// fileState is what changes when a file is written or replaced. Whoever writes it may set mod back, but not changed.
type fileState struct {
	mod     time.Time
	size    int64
	changed syscall.Timespec
	info    fs.FileInfo
}

// Open returns the gate of a registry without a token file.
func Open() *Gate { return &Gate{} }

// Load returns a gate that follows a token file: a change takes effect with the first request that comes a tenth of a
// second later, and a token that is new at once. A file that is no longer valid, or gone, leaves the last valid rules in
// force and is logged once. The first file must be valid.
func Load(path string, log *slog.Logger) (*Gate, error) {
	g := &Gate{path: path, now: time.Now, log: log, every: lookEvery, loaded: time.Now()}
	state, err := stat(path)
	if err != nil {
		return nil, fmt.Errorf("token file: %w", err)
	}
	rules, err := readFile(path)
	if err != nil {
		return nil, err
	}
	g.rules.Store(rules)
	g.state = state
	return g, nil
}

// Open says whether the gate has no token file, so that every caller may do everything.
func (g *Gate) Open() bool { return g.path == "" }

// Caller recognises who sent a request: by a bearer token, or by a token as the password of basic authentication (the
// user name is not looked at). A request without credentials is anonymous. A token that is unknown or has expired is
// ErrUnauthorized, never anonymous.
func (g *Gate) Caller(r *http.Request) (Caller, error) {
	if g.Open() {
		return Everyone(), nil
	}
	rules := g.rules.Load()
	if time.Since(g.loaded)-time.Duration(g.looked.Load()) >= g.every {
		rules = g.look()
	}
	secret, given, err := credentials(r)
	if err != nil {
		return Caller{}, err
	}
	if !given {
		return Caller{rules: rules.anonymous}, nil
	}
	t, ok := rules.find(secret)
	if !ok {
		t, ok = g.look().find(secret)
	}
	switch {
	case !ok:
		return Caller{}, api.Errorf(api.CodeUnauthorized, "unknown token")
	case !t.expires.IsZero() && !g.now().Before(t.expires):
		return Caller{}, api.Errorf(api.CodeUnauthorized, "token %q expired at %s", t.name, t.expires.Format(time.RFC3339))
	}
	return Caller{Name: t.name, rules: t.rules}, nil
}

func credentials(r *http.Request) (secret string, given bool, err error) {
	h := r.Header.Get("Authorization")
	if h == "" {
		return "", false, nil
	}
	if scheme, rest, ok := strings.Cut(h, " "); ok && strings.EqualFold(scheme, "Bearer") {
		return strings.TrimSpace(rest), true, nil
	}
	if _, password, ok := r.BasicAuth(); ok {
		return password, true, nil
	}
	return "", false, api.Errorf(
		api.CodeUnauthorized,
		"authorization header: want Bearer, or Basic with the token as password",
	)
}

// find looks for the token of a secret by the hash of that. How long it takes tells at most something of the hash, which
// is of no use without the secret.
func (s *ruleset) find(secret string) (token, bool) {
	i, ok := s.at[sha256.Sum256([]byte(secret))]
	if !ok {
		return token{}, false
	}
	return s.tokens[i], true
}

// look returns the rules in force, after a look at the file.
func (g *Gate) look() *ruleset {
	g.mu.Lock()
	defer g.mu.Unlock()
	began := time.Since(g.loaded)
	defer func() { g.looked.Store(int64(began)) }()
	state, err := stat(g.path)
	if err == nil && state.same(g.state) || err != nil && g.state.info == nil {
		return g.rules.Load()
	}
	g.state = state
	var rules *ruleset
	if err == nil {
		rules, err = readFile(g.path)
	}
	if err != nil {
		g.log.Error("token file is not valid; the rules read before stay in force", "path", g.path, "error", err)
		return g.rules.Load()
	}
	g.log.Info("token file read", "path", g.path, "tokens", len(rules.tokens))
	g.rules.Store(rules)
	return rules
}

func stat(path string) (fileState, error) {
	info, err := os.Stat(path)
	if err != nil {
		return fileState{}, err
	}
	s := fileState{mod: info.ModTime(), size: info.Size(), info: info}
	if sys, ok := info.Sys().(*syscall.Stat_t); ok {
		s.changed = sys.Ctim
	}
	return s, nil
}

func (s fileState) same(o fileState) bool {
	return o.info != nil && s.mod.Equal(o.mod) && s.size == o.size && s.changed == o.changed &&
		os.SameFile(s.info, o.info)
}

func readFile(path string) (*ruleset, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("token file: %w", err)
	}
	if len(b) > maxFile {
		return nil, fmt.Errorf("token file %s: larger than 16 MiB", path)
	}
	f, err := ParseFile(b)
	if err != nil {
		return nil, fmt.Errorf("token file %s: %w", path, err)
	}
	return f.compile()
}
