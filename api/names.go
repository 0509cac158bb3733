package api

import (
	"regexp"
	"strings"

	"github.com/kiln-registry/kiln-registry/identity"
)

// Limits on names. The grammars are those of the OCI distribution spec 1.1; the length of a repository name is what the
// common clients and registries agree on.
const (
	MaxRepoBytes = 255
	MaxTagBytes  = 128
)

var (
	repoGrammar = regexp.MustCompile(`^[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*$`)
	tagGrammar  = regexp.MustCompile(`^[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}$`)
)

// CheckRepo says whether s is a repository name. ErrNameInvalid.
func CheckRepo(s string) error {
	if len(s) > MaxRepoBytes {
		return Errorf(CodeNameInvalid, "repository name is longer than %d bytes", MaxRepoBytes)
	}
	if !repoGrammar.MatchString(s) {
		return Errorf(
			CodeNameInvalid,
			"repository name %q: want lowercase letters, digits, single . _ - inside, / between",
			s,
		)
	}
	return nil
}

// CheckTag says whether s is a tag. ErrTagInvalid.
func CheckTag(s string) error {
	if !tagGrammar.MatchString(s) {
		return Errorf(
			CodeTagInvalid,
			"tag %.140q: want at most %d of A-Z a-z 0-9 _ . -, not starting with . or -",
			s,
			MaxTagBytes,
		)
	}
	return nil
}

// ParseDigest reads a digest and refuses everything that is not one, sha512 and other algorithms included.
// ErrDigestInvalid.
func ParseDigest(s string) (identity.Digest, error) {
	d, err := identity.ParseDigest(s)
	if err != nil {
		return d, Errorf(CodeDigestInvalid, "%v", err)
	}
	return d, nil
}

// Ref is the last part of a manifest's path: a tag or a digest, exactly one of them.
type Ref struct {
	Tag    string
	Digest identity.Digest
}

// ParseRef reads a tag or a digest: what holds a colon is a digest. ErrTagInvalid, ErrDigestInvalid.
func ParseRef(s string) (Ref, error) {
	if strings.Contains(s, ":") {
		d, err := ParseDigest(s)
		return Ref{Digest: d}, err
	}
	return Ref{Tag: s}, CheckTag(s)
}

// String returns the text form, which ParseRef reads.
func (r Ref) String() string {
	if r.Tag != "" {
		return r.Tag
	}
	return r.Digest.String()
}

// ParseReference reads a reference within one registry: repository:tag or repository@digest. ErrNameInvalid,
// ErrTagInvalid, ErrDigestInvalid.
func ParseReference(s string) (repo string, ref Ref, err error) {
	repo, digest, byDigest := strings.Cut(s, "@")
	if byDigest {
		ref.Digest, err = ParseDigest(digest)
	} else {
		repo, ref.Tag, _ = strings.Cut(s, ":")
		err = CheckTag(ref.Tag)
	}
	if err != nil {
		return "", Ref{}, err
	}
	return repo, ref, CheckRepo(repo)
}
