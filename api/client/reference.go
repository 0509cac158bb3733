package client

import (
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

// Reference names something in a registry: host[:port]/repository[:tag][@sha256:…]. Tag and Digest may both be unset.
type Reference struct {
	Host   string          // host or host:port
	Repo   string          // never empty
	Tag    string          // empty: none was given
	Digest identity.Digest // zero: none was given
}

// ParseReference reads the text form. The host is never guessed: its first component must hold a dot or a colon, or be
// localhost.
func ParseReference(s string) (Reference, error) {
	bad := func(format string, args ...any) (Reference, error) {
		return Reference{}, fmt.Errorf("reference %.200q: %s", s, fmt.Sprintf(format, args...))
	}
	var r Reference
	rest, digest, has := strings.Cut(s, "@")
	if has {
		d, err := identity.ParseDigest(digest)
		if err != nil {
			return bad("%v", err)
		}
		if d.IsZero() {
			return bad("no manifest has a digest of zeros")
		}
		r.Digest = d
	}
	host, rest, ok := strings.Cut(rest, "/")
	if !ok || host != "localhost" && !strings.ContainsAny(host, ".:") {
		return bad("names no registry; want host[:port]/repository[:tag][@sha256:…]")
	}
	if strings.ContainsAny(host, "?#\\ ") || host[0] == ':' || strings.HasSuffix(host, ":") {
		return bad("%q is no host or host:port", host)
	}
	r.Host = host
	r.Repo, r.Tag, has = strings.Cut(rest, ":")
	switch {
	case has && api.CheckTag(r.Tag) != nil:
		return bad("%v", api.CheckTag(r.Tag))
	case api.CheckRepo(r.Repo) != nil:
		return bad("%v", api.CheckRepo(r.Repo))
	}
	return r, nil
}

// String returns the text form.
func (r Reference) String() string {
	s := r.Host + "/" + r.Repo
	if r.Tag != "" {
		s += ":" + r.Tag
	}
	if !r.Digest.IsZero() {
		s += "@" + r.Digest.String()
	}
	return s
}

// Name returns what the registry is to be asked for: the digest if there is one, else the tag. Empty: neither is set.
func (r Reference) Name() string {
	if !r.Digest.IsZero() {
		return r.Digest.String()
	}
	return r.Tag
}

// Loopback says whether host, with or without a port, is this machine's loopback: localhost, 127.0.0.0/8 or [::1].
// Such registries are spoken to over plain HTTP.
func Loopback(host string) bool {
	name := host
	if h, _, err := net.SplitHostPort(host); err == nil {
		name = h
	}
	if name == "localhost" {
		return true
	}
	addr, err := netip.ParseAddr(strings.Trim(name, "[]"))
	return err == nil && addr.IsLoopback()
}
