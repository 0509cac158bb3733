package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/testregistry"
	"github.com/kiln-registry/kiln-registry/transfer"
)

// residentModel writes a folder with two shards, the index that names them, a file that is no part of the base, and a
// config.json.
func residentModel(t *testing.T) (dir string, m identity.Manifest) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "demo")
	if err := os.Mkdir(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	put := func(name string, b []byte) {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	var shards []identity.Shard
	for i, name := range []string{"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "other.safetensors"} {
		head := `{"t` + string(rune('a'+i)) + `":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}`
		b := append(binary.LittleEndian.AppendUint64(nil, uint64(len(head))), head...)
		b = append(b, bytes.Repeat([]byte{byte(i + 1)}, 16)...)
		put(name, b)
		if name != "other.safetensors" {
			shards = append(shards, identity.Shard{Filename: name, Size: uint64(len(b)), Digest: identity.Sum(b)})
		}
	}
	put("model.safetensors.index.json", []byte(`{"weight_map":{"ta":"model-00001-of-00002.safetensors","tb":"model-00002-of-00002.safetensors"}}`))
	put("config.json", []byte(`{"num_hidden_layers":3}`))
	m, err := identity.New(shards)
	if err != nil {
		t.Fatal(err)
	}
	return dir, m
}

// process is kiln-pull resident, run in this process until stop.
type process struct {
	announcement
	said func() string // what is on stderr; to be asked after stop
	stop func() error
	wait func() error // for an end that it comes to by itself
}

// startResident waits for the line that says where it answers.
func startResident(t *testing.T, args ...string) *process {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	out, w := io.Pipe()
	var stderr bytes.Buffer
	ended := make(chan error, 1)
	go func() {
		err := run(ctx, append([]string{"resident", "--json", "--listen", "127.0.0.1:0"}, args...), w, &stderr)
		w.Close()
		ended <- err
	}()
	p := &process{said: stderr.String, wait: sync.OnceValue(func() error { return <-ended })}
	p.stop = func() error {
		cancel()
		http.DefaultClient.CloseIdleConnections()
		return p.wait()
	}
	t.Cleanup(func() { p.stop() })
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if err := json.Unmarshal(lines.Bytes(), &p.announcement); err != nil {
			t.Fatalf("%v in %q", err, lines.Text())
		}
		if p.Event == "resident" {
			go io.Copy(io.Discard, out)
			return p
		}
	}
	t.Fatalf("ended without an answer: %v\n%s", p.stop(), stderr.String())
	return nil
}

func ask(t *testing.T, url string, into any) int {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(into); err != nil {
		t.Errorf("%s: %v", url, err)
	}
	return resp.StatusCode
}

func (p *process) identity(t *testing.T) *identity.Summary {
	t.Helper()
	var h api.Health
	if status := ask(t, p.URL+"/health", &h); status != http.StatusOK || h.Status != "ok" || h.Role != "resident" {
		t.Errorf("health: %d %+v", status, h)
	}
	return h.BaseWeightIdentity
}

func TestResidentFolder(t *testing.T) {
	t.Setenv("KILN_DEBUG_ENDPOINTS", "")
	dir, m := residentModel(t)
	p := startResident(t, dir, "--device", "host", "--expect", m.Aggregate.String())
	if p.Aggregate != m.Aggregate || p.Size != m.TotalSize || p.Shards != 2 || p.Tensors != 2 || p.Backend != "host" || p.Path != dir {
		t.Errorf("announced %+v", p.announcement)
	}
	if got := p.identity(t); got == nil || *got != m.Summary() {
		t.Errorf("identity %+v, want %+v", got, m.Summary())
	}
	var refused map[string]string
	if status := ask(t, p.URL+"/v1/debug/model-state", &refused); status != 403 || refused["enable_with"] == "" {
		t.Errorf("debug state: %d %v", status, refused)
	}
	if err := p.stop(); err != nil {
		t.Errorf("ended with %v", err)
	}
	if _, err := http.Get(p.URL + "/health"); err == nil {
		t.Error("still answers after it ended")
	}
}

func TestResidentDebug(t *testing.T) {
	dir, m := residentModel(t)
	for _, flag := range []string{"", "--debug-model-state"} {
		args := []string{dir}
		t.Setenv("KILN_DEBUG_ENDPOINTS", "yes")
		if flag != "" {
			t.Setenv("KILN_DEBUG_ENDPOINTS", "")
			args = append(args, flag)
		}
		p := startResident(t, args...)
		var body struct {
			Model struct {
				Manifest identity.Manifest `json:"base_weight_shard_manifest"`
				Layers   int               `json:"num_layers"`
				Served   string            `json:"served_model_id"`
			} `json:"model"`
		}
		status := ask(t, p.URL+"/v1/debug/model-state", &body)
		if status != 200 || body.Model.Manifest.Aggregate != m.Aggregate || body.Model.Layers != 3 || body.Model.Served != "demo" {
			t.Errorf("%q: %d %+v", flag, status, body)
		}
		if err := p.stop(); err != nil {
			t.Error(err)
		}
	}
}

func TestResidentSynthetic(t *testing.T) {
	p := startResident(t, "--synthetic")
	if p.Backend != "synthetic" || !p.Aggregate.IsZero() || p.identity(t) != nil {
		t.Errorf("announced %+v, identity %v", p.announcement, p.identity(t))
	}
	if err := p.stop(); err != nil {
		t.Error(err)
	}
}

func TestResidentText(t *testing.T) {
	t.Setenv(cuda.EnvLibrary, filepath.Join(t.TempDir(), "none"))
	dir, m := residentModel(t)
	ctx, cancel := context.WithCancel(t.Context())
	out, w := io.Pipe()
	var stderr bytes.Buffer
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, []string{"resident", dir, "--listen", "127.0.0.1:0"}, w, &stderr) }()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || !strings.Contains(line, m.Aggregate.String()) || !strings.Contains(line, "http://127.0.0.1:") {
		t.Errorf("%q, %v", line, err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	for _, want := range []string{"limit: ", "device: host memory (auto"} {
		if !strings.Contains(stderr.String(), want) {
			t.Errorf("stderr %q lacks %q", stderr.String(), want)
		}
	}
}

func TestResidentRefused(t *testing.T) {
	t.Setenv(cuda.EnvLibrary, filepath.Join(t.TempDir(), "none"))
	dir, m := residentModel(t)
	other := m.Aggregate
	other[0] ^= 1
	empty := t.TempDir()
	for _, tt := range []struct {
		args []string
		code int
		text string
	}{
		{nil, cli.CodeUsage, "--synthetic"},
		{[]string{dir, "--synthetic"}, cli.CodeUsage, "--synthetic"},
		{[]string{dir, "--device", "cuda:0"}, cli.CodeDevice, "no CUDA device"},
		{[]string{dir, "--require-gpu"}, cli.CodeDevice, "no CUDA device"},
		{[]string{dir, "--device", "host", "--require-gpu"}, cli.CodeUsage, "--require-gpu"},
		{[]string{dir, "--device", "disk"}, cli.CodeUsage, "cuda:N"},
		{[]string{dir, "--device", "cuda:x"}, cli.CodeUsage, "cuda:N"},
		{[]string{dir, "--device", "host:0"}, cli.CodeUsage, "cuda:N"},
		{[]string{dir, "--device", "host,cuda:0"}, cli.CodeUsage, "cuda:N"},
		{[]string{dir, "--device", "cuda:0,"}, cli.CodeUsage, "cuda:N"},
		{[]string{dir, "--device", "cuda:1,cuda:0,cuda:1"}, cli.CodeUsage, "cuda:1 is named twice"},
		{[]string{dir, "--device", "cuda:0,cuda:1"}, cli.CodeDevice, "no CUDA device"},
		{[]string{dir, "--device", "cuda"}, cli.CodeDevice, "no CUDA device"},
		{[]string{dir, "--placement", "x"}, cli.CodeUsage, "want spread or replicate"},
		{[]string{dir, "--device", "host", "--placement", "replicate"}, cli.CodeUsage, "host is one device"},
		{[]string{dir, "--placement", "replicate"}, cli.CodeUsage, "auto is one device"},
		{[]string{dir, "--max-pinned", "10"}, cli.CodeUsage, "--max-pinned 10: too few"},
		{[]string{dir, "--listen", "0.0.0.0:0"}, cli.CodeUsage, "other machines"},
		{[]string{dir, "--expect", other.String()}, cli.CodeNo, m.Aggregate.String()},
		{[]string{dir, "--expect", identity.Aggregate{}.String()}, cli.CodeUsage, "no base"},
		{[]string{dir, "--expect", "sha256:x"}, cli.CodeUsage, "--expect"},
		{[]string{dir, "--max-buffer", "10"}, cli.CodeUsage, "too few"},
		{[]string{dir, "--max-buffer", "1MiB", "--max-pinned", "1MiB"}, cli.CodeUsage, "the same"},
		{[]string{dir, "--max-pinned", "64MiB", "--device", "cuda:0"}, cli.CodeDevice, "no CUDA device"},
		{[]string{dir, "--max-buffer", "-1"}, cli.CodeUsage, "--max-buffer"},
		{[]string{dir, "--drain-timeout", "-1s"}, cli.CodeUsage, "--drain-timeout"},
		{[]string{dir, "--dir", "foo"}, cli.CodeUsage, "--dir"},
		{[]string{dir, "--repo", "a/b"}, cli.CodeUsage, "--repo"},
		{[]string{"--synthetic", "--dir", "foo"}, cli.CodeUsage, "--dir"},
		{[]string{dir, "--token-file", filepath.Join(dir, "config.json")}, cli.CodeBadInput, "token file"},
		{[]string{dir, "--token-file", filepath.Join(empty, "none")}, cli.CodeNotFound, "none"},
		{[]string{empty}, cli.CodeBadInput, "no_shards"},
		{[]string{filepath.Join(empty, "none")}, cli.CodeNotFound, "none"},
		{[]string{"nothing"}, cli.CodeUsage, "nothing"},
		{[]string{dir, "--listen", "nonsense"}, cli.CodeUsage, "listen"},
	} {
		args := append([]string{"resident", "--listen", "127.0.0.1:0"}, tt.args...)
		var stdout, stderr bytes.Buffer
		err := run(t.Context(), args, &stdout, &stderr)
		if err == nil || cli.Code(err) != tt.code || !strings.Contains(err.Error(), tt.text) || stdout.Len() > 0 {
			t.Errorf("%q: %v (code %d), want code %d and %q; stdout %q", tt.args, err, cli.Code(err), tt.code, tt.text, stdout.String())
		}
	}
}

func TestResidentPulled(t *testing.T) {
	dir, m := residentModel(t)
	server := httptest.NewServer(testregistry.New(t))
	t.Cleanup(server.Close)
	host := strings.TrimPrefix(server.URL, "http://")
	ref, err := client.ParseReference(host + "/team/demo:v1")
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New(host, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := transfer.Push(t.Context(), c, dir, ref, transfer.PushOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	for _, args := range [][]string{{ref.String()}, {m.Aggregate.String(), "--registry", host}} {
		for range 2 { // the second time it is there already
			p := startResident(t, args...)
			if got := p.identity(t); got == nil || *got != m.Summary() {
				t.Errorf("%q: identity %+v", args, got)
			}
			if err := p.stop(); err != nil {
				t.Error(err)
			}
		}
	}
	pulled := filepath.Join(t.TempDir(), "pulled")
	p := startResident(t, ref.String(), "--dir", pulled)
	if p.Path != pulled {
		t.Errorf("pulled to %s, want %s", p.Path, pulled)
	}
	if err := p.stop(); err != nil {
		t.Error(err)
	}
	damaged(t, pulled, m)
	if err := run(t.Context(), []string{"resident", m.Aggregate.String(), "--repo", "no/such", "--registry", host,
		"--listen", "127.0.0.1:0"}, io.Discard, io.Discard); cli.Code(err) != cli.CodeNotFound {
		t.Errorf("%v (code %d), want code %d", err, cli.Code(err), cli.CodeNotFound)
	}
}

// damaged flips a byte of a pulled folder, which its record must bring to light.
func damaged(t *testing.T, pulled string, m identity.Manifest) {
	t.Helper()
	name := filepath.Join(pulled, m.Shards[1].Filename)
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)-1] ^= 1
	if err := errors.Join(os.Remove(name), os.WriteFile(name, b, 0o666)); err != nil {
		t.Fatal(err)
	}
	err = run(t.Context(), []string{"resident", pulled, "--listen", "127.0.0.1:0"}, io.Discard, io.Discard)
	if cli.Code(err) != cli.CodeNo || !strings.Contains(err.Error(), m.Shards[1].Filename) ||
		!strings.Contains(err.Error(), m.Shards[1].Digest.String()) {
		t.Errorf("%v (code %d), want code %d and the blame on %s", err, cli.Code(err), cli.CodeNo, m.Shards[1].Filename)
	}
}
