package rig

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

// Piece is how many bytes are read and written at a time, as the product does it.
const Piece = 256 << 10

// stream is a body of size bytes that differs from every other number's: the number, then one block again and again.
type stream struct {
	at     int64
	size   int64
	number uint64
}

var block = func() []byte {
	b := make([]byte, Piece)
	rand.NewChaCha8([32]byte{}).Read(b)
	return b
}()

// Stream is a blob of size bytes that no other number has.
func Stream(number uint64, size int64) io.Reader { return &stream{0, size, number} }

func (s *stream) Read(p []byte) (n int, err error) {
	if s.at == s.size {
		return 0, io.EOF
	}
	if s.at == 0 {
		n = copy(p[:min(len(p), 8)], binary.LittleEndian.AppendUint64(nil, s.number))
	} else {
		n = copy(p[:min(int64(len(p)), s.size-s.at)], block[s.at%Piece:])
	}
	s.at += int64(n)
	return n, nil
}

// DigestOf is that of Stream.
func DigestOf(number uint64, size int64) identity.Digest {
	h := identity.NewHash()
	io.CopyBuffer(onlyWriter{h}, Stream(number, size), make([]byte, Piece)) // neither side can fail
	return identity.DigestOf(h)
}

type onlyWriter struct{ io.Writer }

// Client sends what the tables measure, and nothing that a table does not name. It keeps its connections.
type Client struct{ http.Client }

// NewClient is a client for up to 64 requests at a time.
func NewClient() *Client {
	return &Client{http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, WriteBufferSize: Piece}}}
}

// Do sends one request and wants the status; the body of the answer is read and dropped.
func (c *Client) Do(
	ctx context.Context, method, url string, body io.Reader, size int64, want int, header ...string,
) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		return nil, err
	}
	req.ContentLength = size
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := c.Client.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	if res.StatusCode != want {
		text, _ := io.ReadAll(io.LimitReader(res.Body, 4096))
		return nil, fmt.Errorf("%s %s: %s: %s", method, url, res.Status, bytes.TrimSpace(text))
	}
	_, err = io.CopyBuffer(onlyWriter{io.Discard}, res.Body, make([]byte, 32<<10))
	return res, err
}

const octets = "application/octet-stream"

// Push uploads one blob in the way of kiln-push: POST that announces it, one streamed PATCH, PUT.
func (c *Client) Push(ctx context.Context, base, repo string, d identity.Digest, body io.Reader, size int64) error {
	at, err := c.open(ctx, base, repo, api.HeaderExpectDigest, d.String(), api.HeaderExpectSize, fmt.Sprint(size))
	if err != nil {
		return err
	}
	if at, err = c.patch(ctx, at, body, size); err != nil {
		return err
	}
	return c.put(ctx, at, d, nil, 0)
}

// PushWhole uploads one blob by POST and one PUT.
func (c *Client) PushWhole(ctx context.Context, base, repo string, d identity.Digest, body io.Reader, size int64) error {
	at, err := c.open(ctx, base, repo)
	if err != nil {
		return err
	}
	return c.put(ctx, at, d, body, size)
}

// PushChunks uploads one blob by POST, count PATCHes of equal size and PUT, and returns how long the PUT took.
func (c *Client) PushChunks(
	ctx context.Context, base, repo string, d identity.Digest, body io.Reader, size, count int64,
) (time.Duration, error) {
	at, err := c.open(ctx, base, repo)
	if err != nil {
		return 0, err
	}
	for range count {
		if at, err = c.patch(ctx, at, io.LimitReader(body, size/count), size/count); err != nil {
			return 0, err
		}
	}
	began := time.Now()
	err = c.put(ctx, at, d, nil, 0)
	return time.Since(began), err
}

// PushManifest puts a manifest under a tag.
func (c *Client) PushManifest(ctx context.Context, base, repo, tag string, body []byte) error {
	_, err := c.Do(ctx, "PUT", base+api.PathManifest(repo, tag), bytes.NewReader(body), int64(len(body)),
		http.StatusCreated, "Content-Type", "application/vnd.oci.image.manifest.v1+json")
	return err
}

func (c *Client) open(ctx context.Context, base, repo string, header ...string) (*url.URL, error) {
	res, err := c.Do(ctx, "POST", base+api.PathUploads(repo), nil, 0, http.StatusAccepted, header...)
	return location(res, err)
}

func (c *Client) patch(ctx context.Context, at *url.URL, body io.Reader, size int64) (*url.URL, error) {
	res, err := c.Do(ctx, "PATCH", at.String(), body, size, http.StatusAccepted, "Content-Type", octets)
	return location(res, err)
}

func (c *Client) put(ctx context.Context, at *url.URL, d identity.Digest, body io.Reader, size int64) error {
	query := at.Query()
	query.Set("digest", d.String())
	at.RawQuery = query.Encode()
	_, err := c.Do(ctx, "PUT", at.String(), body, size, http.StatusCreated, "Content-Type", octets)
	return err
}

// location is where an upload goes on.
func location(res *http.Response, err error) (*url.URL, error) {
	if err != nil {
		return nil, err
	}
	return res.Request.URL.Parse(res.Header.Get("Location"))
}
