package bucket

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/minio/minio-go/v7"
)

// signer signs links for the address by which clients reach the server. No request goes there. It is made by the first
// link, as only the server may know the region.
type signer struct {
	mu     sync.Mutex // guards client
	client *minio.Client
}

// Link returns a URL that gives an object, or a range of it, to whoever has it, as bytes of no special type, and until
// when: for ttl, or as long as credentials are good that end before. The signature covers the host, that of Clients.
func (b *Bucket) Link(ctx context.Context, key string, ttl time.Duration) (link string, until time.Time, err error) {
	client, err := b.signer(ctx)
	if err != nil {
		return "", until, b.explain(ctx, getObject, key, err)
	}
	creds, err := b.creds.GetWithContext(client.CredContext())
	if err != nil {
		return "", until, b.explain(ctx, getObject, key, err)
	}
	until = time.Now().Add(ttl).Truncate(time.Second)
	if end := creds.Expiration; !end.IsZero() && end.Before(until) {
		until = end
	}
	u, err := client.PresignedGetObject(ctx, b.Bucket, key, ttl.Truncate(time.Second), url.Values{
		"response-content-type": {"application/octet-stream"},
	})
	if err != nil {
		return "", until, fmt.Errorf("%s: sign a link: %w", b, err)
	}
	return u.String(), until, nil
}

func (b *Bucket) signer(ctx context.Context) (*minio.Client, error) {
	b.links.mu.Lock()
	defer b.links.mu.Unlock()
	if b.links.client != nil {
		return b.links.client, nil
	}
	region := b.region()
	if region == "" {
		inner, cancel := b.bounded(ctx, 0)
		defer cancel()
		var err error
		if region, err = b.core.GetBucketLocation(inner, b.Bucket); err != nil {
			return nil, err
		}
	}
	host, plain := b.Clients()
	client, err := minio.New(host, &minio.Options{
		Creds: b.creds, Secure: !plain, Region: region, BucketLookup: b.addressing,
		Transport: noRequests{},
	})
	if err == nil {
		b.links.client = client
	}
	return client, err
}

// noRequests is the transport of a client that only signs.
type noRequests struct{}

func (noRequests) RoundTrip(*http.Request) (*http.Response, error) {
	return nil, errors.New("the address of links is for clients alone")
}
