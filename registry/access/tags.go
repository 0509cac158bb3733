package access

import (
	"fmt"
	"regexp"
	"strings"
)

// TagPatterns choose tags by patterns of the form REPOSITORY:TAG. The repository is a glob as in a Rule; in the tag *
// stands for any characters. The zero TagPatterns choose none. It is safe for concurrent use.
type TagPatterns struct{ patterns []tagPattern }

type tagPattern struct {
	repo glob
	tag  *regexp.Regexp
}

var tagGlob = regexp.MustCompile(`^[A-Za-z0-9._*-]{1,128}$`)

// ParseTagPatterns reads patterns. Its errors say which one is wrong, and what is allowed.
func ParseTagPatterns(patterns []string) (TagPatterns, error) {
	var out TagPatterns
	for _, p := range patterns {
		repo, tag, found := strings.Cut(p, ":")
		if !found || !tagGlob.MatchString(tag) {
			return TagPatterns{}, fmt.Errorf("pattern %q: want REPOSITORY:TAG, as team/**:v*", p)
		}
		inRepo, err := compileGlob(repo)
		if err != nil {
			return TagPatterns{}, fmt.Errorf("pattern %q: %w", p, err)
		}
		text := strings.ReplaceAll(regexp.QuoteMeta(tag), `\*`, `.*`)
		out.patterns = append(out.patterns, tagPattern{inRepo, regexp.MustCompile(`^` + text + `$`)})
	}
	return out, nil
}

// Match says whether a pattern chooses the tag of the repository.
func (t TagPatterns) Match(repo, tag string) bool {
	for _, p := range t.patterns {
		if p.repo.MatchString(repo) && p.tag.MatchString(tag) {
			return true
		}
	}
	return false
}

// MatchRepo says whether a pattern chooses any tags of the repository.
func (t TagPatterns) MatchRepo(repo string) bool {
	for _, p := range t.patterns {
		if p.repo.MatchString(repo) {
			return true
		}
	}
	return false
}

// Repositories are globs of repository names, as in a Rule.
type Repositories struct{ globs []glob }

// ParseRepositories reads globs. Its errors say which one is wrong, and what is allowed.
func ParseRepositories(globs []string) (Repositories, error) {
	var out Repositories
	for _, g := range globs {
		compiled, err := compileGlob(g)
		if err != nil {
			return Repositories{}, err
		}
		out.globs = append(out.globs, compiled)
	}
	return out, nil
}

// Match says whether a glob chooses the repository.
func (r Repositories) Match(repo string) bool {
	for _, g := range r.globs {
		if g.MatchString(repo) {
			return true
		}
	}
	return false
}
