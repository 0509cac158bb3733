package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

// stream is a body of size bytes that differs from every other number's: the number, then one block again and again.
type stream struct {
	block  []byte
	at     int64
	size   int64
	number uint64
}

var block = func() []byte {
	b := make([]byte, piece)
	rand.NewChaCha8([32]byte{}).Read(b)
	return b
}()

func newStream(number uint64, size int64) *stream { return &stream{block, 0, size, number} }

func (s *stream) Read(p []byte) (n int, err error) {
	if s.at == s.size {
		return 0, io.EOF
	}
	if s.at == 0 {
		n = copy(p[:min(len(p), 8)], binary.LittleEndian.AppendUint64(nil, s.number))
	} else {
		n = copy(p[:min(int64(len(p)), s.size-s.at)], s.block[s.at%piece:])
	}
	s.at += int64(n)
	return n, nil
}

func digestOf(number uint64, size int64) identity.Digest {
	h := identity.NewHash()
	io.CopyBuffer(onlyWriter{h}, newStream(number, size), make([]byte, piece)) // neither side can fail
	return identity.DigestOf(h)
}

type onlyWriter struct{ io.Writer }

// client sends what the tables measure, and nothing that a table does not name. It keeps its connections.
type client struct{ http.Client }

func newClient() *client {
	return &client{http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 16, WriteBufferSize: piece}}}
}

// do sends one request and wants the status; the body of the answer is read and dropped.
func (c *client) do(
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
	res, err := c.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	if res.StatusCode != want {
		text, _ := io.ReadAll(io.LimitReader(res.Body, 4096))
		return nil, fmt.Errorf("%s %s: %s: %s", method, url, res.Status, bytes.TrimSpace(text))
	}
	_, err = io.CopyBuffer(onlyWriter{io.Discard}, res.Body, make([]byte, piece))
	return res, err
}

// push uploads one blob in the way of kiln-push: POST, one streamed PATCH, PUT.
func (c *client) push(ctx context.Context, base, repo string, d identity.Digest, body io.Reader, size int64) error {
	res, err := c.do(ctx, "POST", base+"/v2/"+repo+"/blobs/uploads/", nil, 0, http.StatusAccepted,
		api.HeaderExpectDigest, d.String(), api.HeaderExpectSize, fmt.Sprint(size))
	if err != nil {
		return err
	}
	at, err := res.Request.URL.Parse(res.Header.Get("Location"))
	if err != nil {
		return err
	}
	res, err = c.do(ctx, "PATCH", at.String(), body, size, http.StatusAccepted,
		"Content-Type", "application/octet-stream")
	if err != nil {
		return err
	}
	if at, err = res.Request.URL.Parse(res.Header.Get("Location")); err != nil {
		return err
	}
	at.RawQuery = url.Values{"digest": {d.String()}}.Encode()
	_, err = c.do(ctx, "PUT", at.String(), nil, 0, http.StatusCreated)
	return err
}
