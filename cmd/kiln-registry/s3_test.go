package main

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/minio/minio-go/v7"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

// bucketURL is a store in a new bucket that is reached at an endpoint. The credentials are in the environment.
func bucketURL(t *testing.T, s3 *tests3.Server, endpoint, more string) string {
	t.Helper()
	t.Setenv("AWS_ACCESS_KEY_ID", s3.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", s3.SecretKey)
	return "s3://" + s3.Bucket(t) + "/store?region=" + s3.Region + "&endpoint=" + endpoint + more
}

// A copy that is killed in the middle of a blob goes on in the middle of it.
func TestCopyIsKilled(t *testing.T) {
	s3 := tests3.Shared(t)
	proxy := tests3.NewProxy(t, s3.Endpoint())
	dst := bucketURL(t, s3, "http://"+proxy.Endpoint(), "")
	dir := t.TempDir()
	s := serve(t, dir)
	s.push("a", "v1", "1")
	large := bytes.Repeat([]byte("0123456789abcdef"), 9<<20) // 144 MiB
	s.do(201, "POST", api.PathUploads("a")+"?digest="+identity.Sum(large).String(), large)
	s.stop()
	gate := tests3.NewGate()
	stall := proxy.On(tests3.Nth(8, tests3.Is(tests3.UploadPart)), tests3.Stall(gate))
	cmd := program(t.Context(), dir, "copy-store", home.DefaultStore, dst, "--init")
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-gate.Reached():
	case <-t.Context().Done():
	}
	cmd.Process.Kill()
	cmd.Wait()
	stall.Off()
	before := proxy.Count(tests3.UploadPart)
	code, out, stderr := runs(t, dir, "copy-store", home.DefaultStore, dst)
	after := proxy.Count(tests3.UploadPart)
	if code != 0 || !strings.Contains(out, "holds all of") || after == before || after-before > 6 {
		t.Fatalf("%d: %s%s%s; %d parts before, %d after", code, &said, out, stderr, before, after)
	}
	_, want, _ := runs(t, dir, "export")
	if _, got, stderr := runs(t, dir, "export", "--store", dst); got != want || want == "" {
		t.Errorf("%s\n---\n%s%s", want, got, stderr)
	}
	if code, _, stderr := runs(t, dir, "copy-store", dst, "back", "--init"); code != 0 {
		t.Fatal(stderr)
	}
	d := identity.Sum(large)
	if b, err := os.ReadFile(filepath.Join(dir, "back/blobs/sha256", d.Hex()[:2], d.Hex())); err != nil ||
		!bytes.Equal(b, large) {
		t.Errorf("%d bytes are back, %v", len(b), err)
	}
	withinPolicy(t, proxy)
}

// withinPolicy checks that nothing was asked that the policy in doc/operating.md does not allow.
func withinPolicy(t *testing.T, proxy *tests3.Proxy) {
	t.Helper()
	allowed := []tests3.Op{tests3.GetObject, tests3.HeadObject, tests3.PutObject, tests3.DeleteObject,
		tests3.CreateMultipartUpload, tests3.UploadPart, tests3.CompleteMultipartUpload, tests3.AbortMultipartUpload,
		tests3.ListParts, tests3.ListObjects, tests3.ListMultipartUploads}
	for op, n := range proxy.Counts() {
		if !slices.Contains(allowed, op) {
			t.Errorf("%d requests of %s", n, op)
		}
	}
}

// While the bucket can't be reached clients are told to try again, and then all is as before.
func TestBucketGoesAway(t *testing.T) {
	s3 := tests3.Shared(t)
	proxy := tests3.NewProxy(t, s3.Endpoint())
	dir := t.TempDir()
	s := serve(t, dir, "--store", bucketURL(t, s3, "http://"+proxy.Endpoint(), ""), "--init")
	s.push("a", "v1", "1")
	gone := proxy.On(tests3.Any, tests3.Answer(503, "SlowDown"))
	body := []byte("more")
	h, answer := s.do(503, "POST", api.PathUploads("a")+"?digest="+identity.Sum(body).String(), body)
	if h.Get("Retry-After") == "" || !strings.Contains(string(answer), string(api.CodeUnavailable)) {
		t.Errorf("%v %s", h, answer)
	}
	gone.Off()
	s.push("a", "v2", "2")
	s.do(200, "GET", api.PathManifest("a", "v1"), nil)
	s.stop()
}

// The certificates of a private authority are named in the URL.
func TestBucketCertificates(t *testing.T) {
	s3 := tests3.Shared(t)
	proxy := tests3.NewTLSProxy(t, s3.Endpoint())
	dir := t.TempDir()
	at := bucketURL(t, s3, "https://"+proxy.Endpoint(), "")
	refused(t, 6, []string{"certificate", "ca-file"}, dir, "serve", "--addr", "127.0.0.1:0", "--store", at, "--init")
	ca := filepath.Join(dir, "ca.pem")
	if code, _, stderr := runs(t, dir, "export", "--store", at+"&ca-file="+url.QueryEscape(ca)); code != 4 {
		t.Error(code, stderr)
	}
	if err := os.WriteFile(ca, proxy.CA(), 0o600); err != nil {
		t.Fatal(err)
	}
	s := serve(t, dir, "--store", at+"&ca-file="+url.QueryEscape(ca), "--init")
	s.push("a", "v1", "1")
	s.stop()
}

// A server whose store another process took ends, and says so.
func TestStoreIsTaken(t *testing.T) {
	s3 := tests3.Shared(t)
	store := bucketURL(t, s3, "http://"+s3.Endpoint(), "")
	u, err := url.Parse(store)
	if err != nil {
		t.Fatal(err)
	}
	s := serve(t, t.TempDir(), "--store", store, "--init", "--drain-timeout", "1s")
	claim := []byte(`{"process":"another","host":"elsewhere","pid":1,"pid_space":""}`)
	claim = fmt.Appendf(claim, "\n%08x\n", crc32.Checksum(claim, crc32.MakeTable(crc32.Castagnoli)))
	_, err = s3.Client(t).PutObject(t.Context(), u.Host, "store/owner.json", bytes.NewReader(claim), int64(len(claim)),
		minio.PutObjectOptions{})
	if err != nil {
		t.Fatal(err)
	}
	err = s.cmd.Wait() // until it says again that it is alive
	if said := s.log.String(); s.cmd.ProcessState.ExitCode() != 75 || !strings.Contains(said, "another process took it") {
		t.Errorf("%v: %s", err, said)
	}
}
