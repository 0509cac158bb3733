package bucket

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/kiln-registry/kiln-registry/blobstore"
)

const (
	// roleLimit bounds how long the machine or the container is asked for its role's credentials, and nearLimit how long
	// it may take to reach it: it is near, or not there.
	roleLimit = 5 * time.Second
	nearLimit = time.Second
	// renewPause is how long credentials that are still good are used before renewing them is tried again.
	renewPause = 30 * time.Second
)

// source is where credentials may come from.
type source struct {
	name string
	credentials.Provider
}

// sources returns where credentials may come from, in the order in which they are asked. Web identity is asked over the
// same transport as the server. Besides the variables that minio-go knows, these are heard, as by the SDKs of AWS:
// AWS_ENDPOINT_URL_STS, AWS_EC2_METADATA_SERVICE_ENDPOINT and AWS_EC2_METADATA_DISABLED.
func sources(region string, transport http.RoundTripper) []source {
	list := []source{
		{"environment", &credentials.EnvAWS{}},
		{"environment", &credentials.EnvMinio{}},
		{"credentials file", &credentials.FileAWSCredentials{}},
	}
	role := &credentials.IAM{Region: region, Client: &http.Client{Transport: near(), Timeout: roleLimit}}
	switch {
	case os.Getenv("AWS_WEB_IDENTITY_TOKEN_FILE") != "":
		role.Client.Transport, role.Endpoint = transport, os.Getenv("AWS_ENDPOINT_URL_STS")
		return append(list, source{"web identity", role})
	case os.Getenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") != "",
		os.Getenv("AWS_CONTAINER_CREDENTIALS_FULL_URI") != "":
		return append(list, source{"role of the container", role})
	case strings.EqualFold(os.Getenv("AWS_EC2_METADATA_DISABLED"), "true"):
		return list
	}
	role.Endpoint = strings.TrimSuffix(os.Getenv("AWS_EC2_METADATA_SERVICE_ENDPOINT"), "/")
	return append(list, source{"role of the machine", role})
}

// near reaches what is on the same machine or next to it, and so never through a proxy.
func near() *http.Transport {
	return &http.Transport{DialContext: (&net.Dialer{Timeout: nearLimit}).DialContext, DisableKeepAlives: true}
}

// providers asks one source after the other, and stays with the first that has credentials. Unlike the chain of
// minio-go it does not go on without credentials when there are none, says why each had none, and goes on with
// credentials that are still good while they can't be renewed. credentials.Credentials calls it once at a time.
type providers struct {
	all     []source
	current *source
	last    credentials.Value
	retry   time.Time // not before; zero: when current says so
}

var errNoCredentials = errors.New("no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, " +
	"or use a credentials file, web identity or an instance role")

// Retrieve implements credentials.Provider.
func (p *providers) Retrieve() (credentials.Value, error) { return p.RetrieveWithCredContext(nil) }

// RetrieveWithCredContext implements credentials.Provider.
func (p *providers) RetrieveWithCredContext(cc *credentials.CredContext) (credentials.Value, error) {
	if p.current != nil {
		return p.renew(cc)
	}
	why := errNoCredentials
	for i := range p.all {
		v, err := p.all[i].RetrieveWithCredContext(cc)
		if err == nil && v.AccessKeyID != "" && v.SecretAccessKey != "" {
			p.current, p.last = &p.all[i], v
			return v, nil
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			why = fmt.Errorf("%w (%s: %w)", why, p.all[i].name, err)
		}
	}
	return credentials.Value{}, why
}

func (p *providers) renew(cc *credentials.CredContext) (credentials.Value, error) {
	v, err := p.current.RetrieveWithCredContext(cc)
	if err == nil && (v.AccessKeyID == "" || v.SecretAccessKey == "") {
		err = errors.New("there are none any more")
	}
	if err == nil {
		p.last, p.retry = v, time.Time{}
		return v, nil
	}
	if now := time.Now(); p.last.Expiration.IsZero() || p.last.Expiration.After(now) {
		p.retry = now.Add(renewPause)
		return p.last, nil
	}
	return credentials.Value{}, fmt.Errorf("%w: its credentials have expired, and renewing them from the %s failed: %w",
		blobstore.ErrUnavailable, p.current.name, err)
}

// IsExpired implements credentials.Provider.
func (p *providers) IsExpired() bool {
	return p.current == nil || p.current.IsExpired() && time.Now().After(p.retry)
}
