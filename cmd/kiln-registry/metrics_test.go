package main

import (
	"io"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
)

func TestMetricsAreServedWhereAsked(t *testing.T) {
	dir := t.TempDir()
	s := serve(t, dir)
	s.do(404, "GET", api.PathMetrics, nil)
	s.stop()

	s = serve(t, dir, "--metrics")
	s.push("secret/model", "v1", "1")
	_, b := s.do(200, "GET", api.PathMetrics, nil)
	for _, line := range []string{
		`kiln_http_request_duration_seconds_count{class="2xx",method="PUT",route="/v2/{name}/manifests/{ref}"} 1`,
		`store="folder"`, "kiln_index_duration_seconds_count{transaction=\"update\"}", "go_goroutines", "kiln_ready 1",
	} {
		if !strings.Contains(string(b), line) {
			t.Errorf("no %s in:\n%s", line, b)
		}
	}
	if strings.Contains(string(b), "secret") {
		t.Error("a repository is named")
	}
	s.stop()

	s = serve(t, dir, "--metrics-addr", "127.0.0.1:0")
	s.do(404, "GET", api.PathMetrics, nil)
	line, err := s.out.ReadString('\n')
	url, ok := strings.CutPrefix(strings.TrimSpace(line), "metrics on ")
	if err != nil || !ok {
		t.Fatalf("%q, %v", line, err)
	}
	for path, status := range map[string]int{"": 200, "/../v2/": 404} {
		res, err := wire.Get(url + path)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err != nil || res.StatusCode != status || status == 200 && !strings.Contains(string(b), "kiln_uploads_open 0") {
			t.Errorf("%s: %d %s, %v", path, res.StatusCode, b, err)
		}
	}
	s.stop()
	if _, err := wire.Get(url); err == nil {
		t.Error("the metrics outlive the server")
	}
}

func TestMetricsAddressIsChecked(t *testing.T) {
	dir := t.TempDir()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	refused(t, 2, []string{"--metrics-addr wants HOST:PORT"}, dir, "serve", "--addr", "127.0.0.1:0", "--metrics-addr", "x")
	if found, _ := os.ReadDir(dir); len(found) != 0 {
		t.Error("a refused command left something behind:", found)
	}
	refused(t, 2, []string{"already in use", "another port with --metrics-addr"}, dir, "serve", "--addr", "127.0.0.1:0",
		"--metrics-addr", taken.Addr().String())
}
