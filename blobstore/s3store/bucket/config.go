// Package bucket makes requests to one bucket of an S3-compatible object store: it finds credentials, tries again what
// may pass, has the server check what it stores, and says in words what is wrong. It knows nothing of what is kept
// there.
package bucket

import (
	"fmt"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/encrypt"
	"github.com/minio/minio-go/v7/pkg/s3utils"
)

// Config says where objects are and how to reach them. It holds no credentials: those come from the environment, the
// AWS credentials file, web identity, or the role of the container or the machine, in this order.
type Config struct {
	Bucket   string
	Prefix   string // keys begin with it and a slash; empty for the whole bucket
	Endpoint string // host or host:port
	Insecure bool   // plain HTTP
	Region   string // empty: what AWS_REGION says, else the server is asked
	CAFile   string // PEM file of certificates that are trusted besides the system's; empty for none
	// Public is the host or host:port by which clients reach the server, for links alone; empty: Endpoint, as it is.
	Public      string
	PublicPlain bool // plain HTTP there

	addressing minio.BucketLookupType
	sse        encrypt.ServerSide
}

const awsEndpoint = "s3.amazonaws.com"

// parameters of a store's URL.
var parameters = []string{"addressing", "ca-file", "endpoint", "public", "region", "sse"}

// Parse reads the URL of a store:
//
//	s3://bucket/prefix?endpoint=https://host:port&public=https://host:port&region=R&
//	addressing=auto|path|virtual&ca-file=PATH&sse=AES256|aws:kms[:KEY]
//
// All parameters may be left out: then it is a bucket of AWS. public is for links, where clients reach the server by
// another address than the registry does. An endpoint without a scheme is HTTPS. Credentials in the URL are refused, as
// it ends up in shell histories and logs.
func Parse(raw string) (c Config, err error) {
	u, err := url.Parse(raw)
	if err != nil || u.Scheme != "s3" {
		return c, fmt.Errorf("%q is not of the form s3://bucket/prefix?endpoint=https://host:port", redact(raw))
	}
	if u.User != nil {
		return c, fmt.Errorf("s3://%s: credentials do not belong into the URL of a store: "+
			"set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", u.Host)
	}
	c = Config{Bucket: u.Host, Prefix: strings.Trim(u.Path, "/")}
	if err := s3utils.CheckValidBucketNameStrict(c.Bucket); err != nil {
		return c, fmt.Errorf("s3://%s: not the name of a bucket: %w", u.Host, err)
	}
	if strings.Contains(c.Prefix, "//") || strings.Contains("/"+c.Prefix+"/", "/./") ||
		strings.Contains("/"+c.Prefix+"/", "/../") || s3utils.CheckValidObjectNamePrefix(c.Prefix) != nil {
		return c, fmt.Errorf("s3://%s/%s: not a prefix of keys", c.Bucket, c.Prefix)
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil || u.Fragment != "" {
		return c, fmt.Errorf("%s: its parameters are not of the form name=value&name=value", c)
	}
	for name, values := range query {
		switch {
		case !slices.Contains(parameters, name):
			return c, fmt.Errorf("%s: unknown parameter %s: there are %s", c, shown(name, values), strings.Join(parameters, ", "))
		case len(values) > 1:
			return c, fmt.Errorf("%s: parameter %q is there twice", c, name)
		}
	}
	return c, c.parameters(query)
}

func (c *Config) parameters(query url.Values) error {
	c.Region, c.CAFile = query.Get("region"), query.Get("ca-file")
	var err error
	if c.Endpoint, c.Insecure, err = c.endpoint("endpoint", query.Get("endpoint")); err != nil {
		return err
	}
	if c.Endpoint == "" {
		c.Endpoint = awsEndpoint
	}
	if c.Public, c.PublicPlain, err = c.endpoint("public", query.Get("public")); err != nil {
		return err
	}
	switch a := query.Get("addressing"); a {
	case "", "auto":
		c.addressing = minio.BucketLookupAuto
	case "path":
		c.addressing = minio.BucketLookupPath
	case "virtual":
		c.addressing = minio.BucketLookupDNS
	default:
		return fmt.Errorf("%s: addressing=%s: want auto, path or virtual", c, a)
	}
	switch kind, key, _ := strings.Cut(strings.TrimPrefix(query.Get("sse"), "aws:"), ":"); {
	case query.Get("sse") == "":
	case kind == "AES256" && key == "":
		c.sse = encrypt.NewSSE()
	case kind == "kms" && strings.HasPrefix(query.Get("sse"), "aws:"):
		sse, err := encrypt.NewSSEKMS(key, nil)
		if err != nil {
			return fmt.Errorf("%s: sse=%s: %w", c, query.Get("sse"), err)
		}
		c.sse = sse
	default:
		return fmt.Errorf("%s: sse=%s: want AES256, aws:kms or aws:kms:KEY", c, query.Get("sse"))
	}
	return nil
}

// Clients returns the host by which clients reach the server, and whether it speaks plain HTTP to them.
func (c Config) Clients() (host string, plain bool) {
	if c.Public == "" {
		return c.Endpoint, c.Insecure
	}
	return c.Public, c.PublicPlain
}

// endpoint reads a parameter that is the address of a server.
func (c *Config) endpoint(name, raw string) (host string, plain bool, err error) {
	if raw == "" {
		return "", false, nil
	}
	if !strings.Contains(raw, "://") {
		raw = "https://" + raw
	}
	u, err := url.Parse(raw)
	if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil ||
		strings.Trim(u.Path, "/") != "" || u.RawQuery != "" {
		return "", false, fmt.Errorf("%s: %s %q: want https://host:port", c, name, redact(raw))
	}
	return u.Host, u.Scheme == "http", nil
}

// shown returns the name of a parameter, if a value followed it: else it may be a secret itself.
func shown(name string, values []string) string {
	if strings.Join(values, "") == "" {
		return "(not shown)"
	}
	return strconv.Quote(name)
}

// redact drops what may be a secret from a URL that does not parse.
func redact(raw string) string {
	if at := strings.LastIndex(raw, "@"); at >= 0 {
		raw = raw[at+1:]
	}
	before, _, _ := strings.Cut(raw, "?")
	if u, err := url.Parse(before); err != nil || u.User != nil {
		return "(not shown)" // what looks like a port is perhaps a secret
	}
	return before
}

// String is s3://bucket/prefix.
func (c Config) String() string {
	return strings.TrimSuffix("s3://"+c.Bucket+"/"+c.Prefix, "/")
}

// region returns the region that requests are signed for; empty means that the server is asked for it.
func (c Config) region() string {
	for _, r := range []string{c.Region, os.Getenv("AWS_REGION"), os.Getenv("AWS_DEFAULT_REGION")} {
		if r != "" {
			return r
		}
	}
	return ""
}
