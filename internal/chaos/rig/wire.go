package rig

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// Wire sends requests to the server that runs now.
type Wire struct {
	url    string
	client *http.Client
	admin  *http.Client // speaks to the administration socket
}

// requestLimit is how long an answer may take: nothing here is large.
const requestLimit = 30 * time.Second

// Wire returns a wire to the server, which is ready.
func (v *Server) Wire() *Wire {
	return &Wire{v.URL, &http.Client{
		Transport: &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true}, Timeout: requestLimit,
	}, socketClient(v.state)}
}

// Close closes its connections.
func (w *Wire) Close() { w.client.CloseIdleConnections() }

// Answer is an answer to a request.
type Answer struct {
	Status int
	header http.Header
	Body   []byte
	Broken error // the body ended too early
}

// Code returns the code of an error's answer; empty if it has none.
func (a Answer) Code() api.Code {
	var e api.Errors
	if json.Unmarshal(a.Body, &e) != nil || len(e.Errors) == 0 {
		return ""
	}
	return e.Errors[0].Code
}

func (a Answer) String() string { return fmt.Sprintf("%d %.200s", a.Status, a.Body) }

// do sends a request and reads the answer. An error says that none came. header is pairs of name and value.
func (w *Wire) do(method, path string, body []byte, header ...string) (a Answer, err error) {
	req, err := http.NewRequest(method, w.url+path, bytes.NewReader(body))
	if err != nil {
		return a, err
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := w.client.Do(req)
	if err != nil {
		return a, err
	}
	defer res.Body.Close()
	a = Answer{Status: res.StatusCode, header: res.Header}
	a.Body, a.Broken = io.ReadAll(res.Body)
	return a, nil
}

// JSON reads a document, which must be there.
func (w *Wire) JSON(path string, v any) error {
	a, err := w.do("GET", path, nil)
	if err == nil {
		err = a.Broken
	}
	if err != nil {
		return err
	}
	if a.Status != http.StatusOK {
		return fmt.Errorf("GET %s: %s", path, a)
	}
	return json.Unmarshal(a.Body, v)
}

// socketClient speaks to the administration socket in a state folder.
func socketClient(state string) *http.Client {
	return &http.Client{Timeout: requestLimit, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", filepath.Join(state, "admin.sock"))
		},
	}}
}

// export reads all manifests and tags of the server.
func (w *Wire) export() (rows []index.Row, err error) {
	res, err := w.admin.Get("http://registry/export")
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("export: %s", res.Status)
	}
	dec := json.NewDecoder(res.Body)
	for {
		var r index.Row
		if err := dec.Decode(&r); err == io.EOF {
			return rows, nil
		} else if err != nil {
			return rows, fmt.Errorf("export: %w", err)
		}
		rows = append(rows, r)
	}
}

// Operate has the server do something by its administration socket. An error that is errNoAnswer says that it may have
// been done, or a part of it.
func (w *Wire) Operate(path string) error {
	res, err := w.admin.Post("http://registry"+path, "", nil)
	if err != nil {
		return fmt.Errorf("%w to %s: %w", ErrNoAnswer, path, err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	switch {
	case err != nil:
		return fmt.Errorf("%w to %s to the end: %w", ErrNoAnswer, path, err)
	case res.StatusCode != http.StatusOK || bytes.Contains(b, []byte(`"error":`)):
		return fmt.Errorf("%s: %s %s", path, res.Status, b)
	}
	return nil
}

// Collect removes all blobs that nothing refers to, however young.
func (w *Wire) Collect() error {
	return w.Operate("/collect?" + upkeep.Terms{MaxShare: 1, Force: true}.Query().Encode())
}

// Scrub reads all blobs, and sets aside those that are damaged.
func (w *Wire) Scrub() error { return w.Operate("/scrub?" + upkeep.Order{}.Query().Encode()) }
