package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

// wire makes the requests of the tests. The default client's connections are closed by every httptest.Server that is.
var wire = &http.Client{Transport: &http.Transport{}}

// The test binary is also the program: with this variable set it runs main.
const asProgram = "KILN_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	testscript.Main(testlanes.Use(tests3.M{M: m}), map[string]func(){"kiln-registry": main})
}

// tester is the test that a server belongs to.
type tester interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
	Cleanup(f func())
}

func program(ctx context.Context, dir string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	cmd.Dir = dir
	return cmd
}

// run runs the program to its end.
func runs(t *testing.T, dir string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	cmd := program(ctx, dir, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

// refused runs the program, which must fail with a code, one error line that has each of the words, and a hint.
func refused(t *testing.T, code int, words []string, dir string, args ...string) {
	t.Helper()
	got, stdout, stderr := runs(t, dir, args...)
	if got != code || stdout != "" {
		t.Errorf("%v: exit %d, want %d: %s%s", args, got, code, stdout, stderr)
	}
	for _, w := range append(words, "error: ", "hint: ") {
		if !strings.Contains(stderr, w) {
			t.Errorf("%v: no %q in:\n%s", args, w, stderr)
		}
	}
	if strings.Contains(stderr, "goroutine") || strings.Contains(stderr, "registry runs") {
		t.Errorf("%v: a stack trace, or a client's hint:\n%s", args, stderr)
	}
}

// process is a running server.
type process struct {
	t   tester
	cmd *exec.Cmd
	url string
	out *bufio.Reader // what it writes after its address
	log *bytes.Buffer
}

func serve(t tester, dir string, args ...string) *process {
	t.Helper()
	s := &process{
		t:   t,
		cmd: program(context.Background(), dir, append([]string{"serve", "--addr", "127.0.0.1:0"}, args...)...),
		log: new(bytes.Buffer),
	}
	return s.start()
}

// start returns when the server is ready.
func (s *process) start() *process {
	t := s.t
	t.Helper()
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	s.cmd.Stderr = s.log
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if s.cmd.ProcessState == nil {
			s.cmd.Process.Kill()
			s.cmd.Wait()
		}
	})
	s.out = bufio.NewReader(out)
	line, err := s.out.ReadString('\n')
	url, ok := strings.CutPrefix(strings.TrimSpace(line), "listening on ")
	if err != nil || !ok {
		s.cmd.Wait()
		t.Fatalf("%q, %v: %s", line, err, s.log)
	}
	s.url = url
	for deadline := time.Now().Add(10 * time.Second); ; {
		if res, err := wire.Get(url + api.PathReady); err == nil {
			res.Body.Close()
			if res.StatusCode == 200 {
				return s
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("never ready: %s", s.log)
		}
	}
}

func (s *process) kill() {
	s.t.Helper()
	if err := s.cmd.Process.Kill(); err != nil {
		s.t.Fatal(err)
	}
	s.cmd.Wait()
}

// stop ends the server with SIGTERM, which is no failure.
func (s *process) stop() {
	s.t.Helper()
	s.cmd.Process.Signal(syscall.SIGTERM)
	if err := s.cmd.Wait(); err != nil {
		s.t.Fatalf("%v: %s", err, s.log)
	}
}

func (s *process) do(status int, method, path string, body []byte, header ...string) (http.Header, []byte) {
	s.t.Helper()
	req, err := http.NewRequest(method, s.url+path, bytes.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := wire.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != status {
		s.t.Fatalf("%s %s: %d %v %s, %v", method, path, res.StatusCode, res.Header, b, err)
	}
	return res.Header, b
}

const manifestType = "application/vnd.oci.image.manifest.v1+json"

// push puts a base of one shard.
func (s *process) push(repo, tag, seed string, auth ...string) {
	s.t.Helper()
	shard := append([]byte{2, 0, 0, 0, 0, 0, 0, 0}, "{}"+seed...)
	blob := func(b []byte) string {
		d := identity.Sum(b)
		s.do(201, "POST", api.PathUploads(repo)+"?digest="+d.String(), b, auth...)
		return fmt.Sprintf(`"digest":%q,"size":%d`, d, len(b))
	}
	m := fmt.Sprintf(
		`{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.empty.v1+json",%s},"layers":[{"mediaType":%q,%s,`+
			`"annotations":{"org.opencontainers.image.title":"model.safetensors"}}]}`,
		blob([]byte("{}")),
		api.MediaTypeWeight,
		blob(shard),
	)
	s.do(201, "PUT", api.PathManifest(repo, tag), []byte(m), append([]string{"Content-Type", manifestType}, auth...)...)
}

func TestFirstStart(t *testing.T) {
	dir := t.TempDir()
	s := serve(t, dir)
	s.push("a/b", "v1", "1")
	for name, mode := range map[string]os.FileMode{".": 0o700 | os.ModeDir, "admin.sock": 0o600 | os.ModeSocket,
		"refs.log": 0o644, "index.db": 0o600} {
		if st, err := os.Stat(filepath.Join(dir, home.DefaultStore, name)); err != nil || st.Mode() != mode {
			t.Errorf("%s: %v, %v", name, st, err)
		}
	}
	_, online, _ := runs(t, dir, "export")
	s.stop()
	if strings.Count(online, "\n") != 2 || !strings.Contains(online, `"repository":"a/b"`) {
		t.Error(online)
	}
	if code, offline, stderr := runs(t, dir, "export"); code != 0 || offline != online {
		t.Errorf("%d: %s%s", code, offline, stderr)
	}
	s = serve(t, dir)
	s.do(200, "GET", api.PathManifest("a/b", "v1"), nil)
	// A second process on the same store ends at once and says who has it. IX-01
	refused(t, 75, []string{"in use", fmt.Sprint(s.cmd.Process.Pid)}, dir, "serve", "--addr", "127.0.0.1:0")
	if code, _, stderr := runs(t, dir, "reindex"); code != 0 {
		t.Error(stderr)
	}
	s.do(200, "GET", api.PathManifest("a/b", "v1"), nil)
	s.stop()
	if code, out, _ := runs(t, dir, "version"); code != 0 || out == "" {
		t.Error("version:", out)
	}
}

func TestStoreIsNeverTakenByMistake(t *testing.T) {
	dir := t.TempDir()
	other := filepath.Join(dir, "other")
	empty := filepath.Join(dir, "empty")
	if err := os.MkdirAll(other, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(empty, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(other, "thesis.tex"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	at := func(path string, more ...string) []string {
		return append([]string{"serve", "--addr", "127.0.0.1:0", "--store", path}, more...)
	}
	refused(t, 2, []string{"not a store", "--init"}, dir, at("missing")...)
	refused(t, 2, []string{"not a store", "empty", "--init"}, dir, at(empty)...)
	refused(t, 2, []string{"not a store", "thesis.tex"}, dir, at(other)...)
	refused(t, 2, []string{"not a store", "thesis.tex"}, dir, at(other, "--init")...)
	if found, _ := os.ReadDir(other); len(found) != 1 {
		t.Error("something was written into a foreign folder")
	}
	for _, path := range []string{"missing", empty} {
		serve(t, dir, "--store", path, "--init").stop()
		serve(t, dir, "--store", path).stop()
	}
	if err := os.Mkdir(filepath.Join(dir, home.DefaultStore), 0o755); err != nil {
		t.Fatal(err)
	}
	refused(
		t,
		2,
		[]string{"empty", "--init"},
		dir,
		"serve",
		"--addr",
		"127.0.0.1:0",
	) // the disk of the default folder is not mounted
	for _, sub := range []string{"export", "reindex"} {
		refused(t, 2, []string{"not a store"}, dir, sub, "--store", other)
	}
}

func TestUsage(t *testing.T) {
	dir := t.TempDir()
	for _, args := range [][]string{{"serve", "--addr", "0.0.0.0:0"}, {"serve", "--addr", ":5000"}, {"serve",
		"--addr", "192.0.2.1:5000"}} {
		refused(t, 2, []string{"everybody", "--insecure-open"}, dir, args...)
	}
	for _, args := range [][]string{{"serve", "--no-such-flag"}, {"serve", "x"}, {"nonsense"}, {"token", "create", "x"}} {
		refused(t, 2, nil, dir, args...)
	}
	for _, args := range [][]string{{"serve", "--log-level", "loud"}, {"serve", "--log-format", "xml"}, {"serve",
		"--tls-cert", "x"}} {
		if code, _, stderr := runs(t, dir, args...); code != 2 {
			t.Errorf("%v: %d: %s", args, code, stderr)
		}
	}
	if found, _ := os.ReadDir(dir); len(found) != 0 {
		t.Error("a refused command left something behind:", found)
	}
}

func TestTokens(t *testing.T) {
	dir := t.TempDir()
	code, secret, stderr := runs(
		t,
		dir,
		"token",
		"create",
		"ci",
		"--token-file",
		"t.yaml",
		"--repo",
		"team/**",
		"--allow",
		"pull,push",
		"--expires",
		"1h",
	)
	secret = strings.TrimSpace(secret)
	if code != 0 || !strings.HasPrefix(secret, "kiln_") {
		t.Fatal(code, secret, stderr)
	}
	b, err := os.ReadFile(filepath.Join(dir, "t.yaml"))
	if st, _ := os.Stat(filepath.Join(dir, "t.yaml")); err != nil || strings.Contains(string(b), secret) ||
		st.Mode() != 0o600 {
		t.Fatalf("%v: %s", err, b)
	}
	s := serve(t, dir, "--token-file", "t.yaml")
	s.push("team/model", "v1", "1", "Authorization", "Bearer "+secret)
	s.do(401, "GET", api.PathManifest("team/model", "v1"), nil)
	s.do(403, "GET", api.PathManifest("other/model", "v1"), nil, "Authorization", "Bearer "+secret)
	// A running server takes a new token at once.
	_, reader, _ := runs(t, dir, "token", "create", "reader", "--token-file", "t.yaml", "--repo", "**")
	s.do(200, "GET", api.PathManifest("team/model", "v1"), nil, "Authorization", "Bearer "+strings.TrimSpace(reader))
	s.stop()
	if code, _, stderr := runs(t, dir, "token", "create", "ci", "--token-file", "t.yaml", "--repo", "**"); code != 2 ||
		!strings.Contains(stderr, "already") {
		t.Error(code, stderr)
	}
	if code, _, stderr := runs(t, dir, "token", "create", "x", "--token-file", "t.yaml", "--repo", "**", "--allow",
		"admin"); code != 2 {
		t.Error(code, stderr)
	}
	if code, _, stderr := runs(t, dir, "serve", "--addr", "127.0.0.1:0", "--token-file", "missing.yaml"); code != 4 ||
		!strings.Contains(stderr, "missing.yaml") || !strings.Contains(stderr, "hint: kiln-registry token create") {
		t.Error(code, stderr)
	}
	if err := os.WriteFile(filepath.Join(dir, "bad.yaml"), []byte("version: 1\nadmin: yes\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := runs(t, dir, "serve", "--addr", "127.0.0.1:0", "--token-file", "bad.yaml"); code != 5 ||
		!strings.Contains(stderr, `bad.yaml: line 2: "admin" is unknown in the file: want version, anonymous, tokens`) {
		t.Error(code, stderr)
	}
}

// PU-05: an upload goes on after kill -9, at the last byte that was acknowledged or after it.
func TestKillInTheMiddleOfAnUpload(t *testing.T) {
	dir := t.TempDir()
	s := serve(t, dir)
	s.push("old/model", "v1", "1")
	body := bytes.Repeat([]byte("0123456789abcdef"), 50_000)
	d := identity.Sum(body)
	h, _ := s.do(202, "POST", api.PathUploads("a"), nil)
	at := h.Get("Location")
	chunk := len(body) / 5
	for i := range 3 {
		s.do(202, "PATCH", at, body[i*chunk:(i+1)*chunk], "Content-Range", fmt.Sprintf("%d-%d", i*chunk, (i+1)*chunk-1))
	}
	s.kill()
	s = serve(t, dir)
	s.do(200, "GET", api.PathManifest("old/model", "v1"), nil)
	h, _ = s.do(204, "GET", at, nil)
	if got, want := h.Get("Range"), fmt.Sprintf("0-%d", 3*chunk-1); got != want {
		t.Fatalf("Range %s, want %s", got, want)
	}
	s.do(201, "PUT", at+"?digest="+d.String(), body[3*chunk:], "Content-Range", fmt.Sprintf("%d-%d", 3*chunk, len(body)-1))
	s.kill()
	s = serve(t, dir)
	if _, got := s.do(200, "GET", api.PathBlob("a", d), nil); !bytes.Equal(got, body) {
		t.Fatal("other bytes")
	}
	s.stop()
}

func TestDamagedIndex(t *testing.T) { // IX-02, IX-04
	dir := t.TempDir()
	s := serve(t, dir)
	for i := range 20 {
		s.push(fmt.Sprintf("r%d", i%3), fmt.Sprintf("v%d", i), fmt.Sprint(i))
	}
	s.stop()
	_, want, _ := runs(t, dir, "export")
	path := filepath.Join(dir, home.DefaultStore, home.IndexFile)
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	rest := int(info.Size()) - 2*4096 // after the two pages that say where the root is: some of the others are free
	if _, err := f.WriteAt(bytes.Repeat([]byte{0xa5, 0x17, 0x00, 0xff}, rest/4), 2*4096); err != nil {
		t.Fatal(err)
	}
	f.Close()
	refused(t, 7, []string{"index.db", "damaged", "kiln-registry reindex --store"}, dir, "serve", "--addr", "127.0.0.1:0")
	refused(t, 7, []string{"reindex"}, dir, "export")
	if code, _, stderr := runs(t, dir, "reindex"); code != 0 {
		t.Fatal(stderr)
	}
	if _, got, _ := runs(t, dir, "export"); got != want {
		t.Fatalf("rows differ:\n%s\n---\n%s", want, got)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	s = serve(t, dir)
	if _, got, _ := runs(t, dir, "export"); got != want {
		t.Fatalf("rows differ:\n%s\n---\n%s", want, got)
	}
	s.stop()
	if !strings.Contains(s.log.String(), "brought level") || !strings.Contains(s.log.String(), "no index") {
		t.Error(s.log)
	}
}

// RG-16: what runs when the server is told to stop is finished, and it ends well.
func TestGracefulStop(t *testing.T) {
	dir := t.TempDir()
	s := serve(t, dir)
	body := bytes.Repeat([]byte("x"), 24<<20)
	d := identity.Sum(body)
	s.do(201, "POST", api.PathUploads("a")+"?digest="+d.String(), body)
	pull, err := wire.Get(s.url + api.PathBlob("a", d))
	if err != nil {
		t.Fatal(err)
	}
	defer pull.Body.Close()
	half := bytes.Repeat([]byte("a"), 512<<10) // what a store takes at once
	h, _ := s.do(202, "POST", api.PathUploads("a"), nil)
	pr, pw := io.Pipe()
	pushed := make(chan error, 1)
	go func() {
		req, err := http.NewRequest(
			"PUT",
			s.url+h.Get("Location")+"?digest="+identity.Sum(append(half, half...)).String(),
			pr,
		)
		if err != nil {
			pushed <- err
			return
		}
		res, err := wire.Do(req)
		if err == nil && res.StatusCode != 201 {
			err = fmt.Errorf("status %d", res.StatusCode)
		}
		pushed <- err
	}()
	pw.Write(half)
	for got := ""; got != fmt.Sprintf("0-%d", len(half)-1); { // until the request has arrived
		status, _ := s.do(204, "GET", h.Get("Location"), nil)
		got = status.Get("Range")
	}
	ended := make(chan error, 1)
	s.cmd.Process.Signal(syscall.SIGTERM)
	go func() { ended <- s.cmd.Wait() }()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); { // no new requests
		res, err := wire.Get(s.url + api.PathReady)
		if err != nil {
			break
		}
		res.Body.Close()
	}
	if n, err := io.Copy(io.Discard, pull.Body); err != nil || n != int64(len(body)) {
		t.Errorf("pull: %d bytes, %v", n, err)
	}
	pw.Write(half)
	pw.Close()
	if err := <-pushed; err != nil {
		t.Error("push:", err)
	}
	if err := <-ended; err != nil {
		t.Error(err, s.log)
	}
	serve(t, dir).stop()
}
