package server

import (
	"net/netip"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/registry/redirect"
)

const (
	shortestLink = time.Minute
	longestLink  = 12 * time.Hour
)

// redirecting is who gets blobs from the object store itself.
type redirecting struct {
	on       bool
	networks []string
	smallest cli.Size
	ttl      time.Duration

	rules *redirect.Rules // set by check; nil: nobody
}

func (d *redirecting) bind(cmd *cobra.Command) {
	d.smallest = 1 << 20
	f := cmd.Flags()
	f.BoolVar(&d.on, "redirect", false, "send callers on to the bucket for the bytes of blobs, by links that end")
	f.StringSliceVar(&d.networks, "redirect-networks", nil,
		"callers that are sent on, as 10.0.0.0/8, by the address that their connection comes from; empty: all")
	f.Var(&d.smallest, "redirect-min-size", "size of the smallest blob for which callers are sent on, as 1MiB")
	f.DurationVar(&d.ttl, "redirect-ttl", 30*time.Minute, "how long such a link serves its blob")
}

func (d *redirecting) check(at home.Place, secure bool) error {
	if !d.on {
		if len(d.networks) > 0 {
			return cli.Usagef("--redirect-networks says who is sent on, and goes with --redirect")
		}
		return nil
	}
	host, plain := at.Bucket.Clients()
	switch {
	case at.Folder != "":
		return cli.Hint(cli.Usagef("--redirect: a store in a folder can be reached through the registry alone"),
			"--redirect is for a --store of the form s3://bucket/prefix")
	case secure && plain:
		return cli.Hint(cli.Usagef("--redirect: callers that speak HTTPS would be sent to http://%s", host),
			"put public=https://host:port into the URL of --store, the address by which callers reach the bucket")
	case d.ttl < shortestLink || d.ttl > longestLink:
		return cli.Usagef("--redirect-ttl %s: want %s to %s", d.ttl, shortestLink, longestLink)
	}
	rules := redirect.Rules{TTL: d.ttl, MinSize: int64(d.smallest)}
	for _, text := range d.networks {
		network, err := netip.ParsePrefix(text)
		if err != nil || network != network.Masked() || network.Addr().Is4In6() {
			return cli.Hint(cli.Usagef("--redirect-networks %.80q: not a network", text),
				"want an address and the number of bits that count, the others 0, as 10.0.0.0/8 or 2001:db8::/32")
		}
		rules.Networks = append(rules.Networks, network)
	}
	d.rules = &rules
	return nil
}
