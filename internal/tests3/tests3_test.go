package tests3

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getenv("KILN_TESTS3_HOLD") != "" { // we are the process that TestKilled kills
		os.Exit(hold())
	}
	goleak.VerifyTestMain(M{m})
}

// put stores b and fails the test when that fails.
func put(t *testing.T, c *minio.Client, bucket, key string, b []byte) {
	t.Helper()
	_, err := c.PutObject(t.Context(), bucket, key, bytes.NewReader(b), int64(len(b)), minio.PutObjectOptions{})
	if err != nil {
		t.Fatalf("put %s: %v", key, err)
	}
}

// get returns the bytes of an object.
func get(t *testing.T, c *minio.Client, bucket, key string) []byte {
	t.Helper()
	o, err := c.GetObject(t.Context(), bucket, key, minio.GetObjectOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	b, err := io.ReadAll(o)
	if err != nil {
		t.Fatalf("get %s: %v", key, err)
	}
	return b
}

func TestShared(t *testing.T) {
	s := Shared(t)
	if s != Shared(t) {
		t.Error("two calls, two servers")
	}
	var names [2]string
	for i := range names {
		t.Run("bucket", func(t *testing.T) {
			names[i] = s.Bucket(t)
			put(t, s.Client(t), names[i], "a/b", []byte("hello"))
			core := minio.Core{Client: s.Client(t)}
			if _, err := core.NewMultipartUpload(t.Context(), names[i], "open", minio.PutObjectOptions{}); err != nil {
				t.Error(err)
			}
		})
		if there, err := s.Client(t).BucketExists(t.Context(), names[i]); err != nil || there {
			t.Errorf("bucket %s after its test: there %v, error %v", names[i], there, err)
		}
	}
	if names[0] == names[1] {
		t.Errorf("two buckets called %s", names[0])
	}
}

func TestPair(t *testing.T) {
	s := NewPair(t)
	if len(s.Endpoints()) != 2 {
		t.Fatalf("endpoints %v, want two", s.Endpoints())
	}
	bucket := s.Bucket(t)
	put(t, s.Client(t), bucket, "a/b", []byte("hello"))
	other, err := s.client(s.Endpoints()[1])
	if err != nil {
		t.Fatal(err)
	}
	if got := get(t, other, bucket, "a/b"); string(got) != "hello" {
		t.Errorf("the second endpoint has %q", got)
	}
	dir, ok := s.Dir()
	if !ok {
		return
	}
	file := filepath.Join(dir, bucket, "a", "b")
	if b, err := os.ReadFile(file); err != nil || string(b) != "hello" {
		t.Fatalf("on disk %q, %v", b, err)
	}
	if err := os.WriteFile(file, []byte("jello"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := get(t, other, bucket, "a/b"); string(got) != "jello" {
		t.Errorf("after a change on disk the server answers %q", got)
	}
}

func TestVirtualHost(t *testing.T) {
	s := NewVirtualHost(t, "s3.kiln.test")
	bucket := s.Bucket(t)
	dial := func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, s.Endpoint())
	}
	through := http.ProxyURL(&url.URL{Scheme: "http", Host: NewProxy(t, s.Endpoint()).Endpoint()})
	for i, transport := range []*http.Transport{
		{DialContext: dial, DisableKeepAlives: true},
		{Proxy: through, DisableKeepAlives: true},
	} {
		c, err := minio.New("s3.kiln.test:9000", &minio.Options{
			Creds: credentials.NewStaticV4(s.AccessKey, s.SecretKey, ""), Region: s.Region, MaxRetries: 1,
			BucketLookup: minio.BucketLookupDNS, Transport: transport,
		})
		if err != nil {
			t.Fatal(err)
		}
		key := fmt.Sprint("a/", i)
		put(t, c, bucket, key, []byte(key))
		if got := get(t, s.Client(t), bucket, key); string(got) != key {
			t.Errorf("%s holds %q", key, got)
		}
	}
}

// hold starts a server, says where it listens and waits to be killed.
func hold() int {
	s, err := start(holder{}, 1, "")
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println(s.Endpoint())
	select {}
}

// holder stands for a test outside of one; only what start needs works.
type holder struct{ testing.TB }

func (holder) Helper()           {}
func (holder) Fatal(args ...any) { panic(fmt.Sprint(args...)) }

func TestKilled(t *testing.T) {
	t.Setenv("KILN_TEST_S3_ENDPOINT", "") // that one outlives everybody
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "KILN_TESTS3_HOLD=1", "TMPDIR="+t.TempDir())
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	endpoint := strings.TrimSpace(line)
	if _, _, bad := net.SplitHostPort(endpoint); err != nil || bad != nil {
		t.Fatalf("the process says %q, %v", line, err)
	}
	deadline := time.After(30 * time.Second)
	for tick := time.Tick(10 * time.Millisecond); ; {
		c, err := net.Dial("tcp", endpoint)
		if errors.Is(err, syscall.ECONNREFUSED) {
			return
		}
		if err == nil {
			c.Close()
		}
		select {
		case <-tick:
		case <-deadline:
			t.Fatalf("the server at %s outlives the process that started it", endpoint)
		}
	}
}

func TestRefuses(t *testing.T) {
	s := Shared(t)
	bad := *s
	bad.SecretKey = "another"
	if _, err := bad.Client(t).ListBuckets(t.Context()); err == nil {
		t.Error("a wrong secret is taken")
	}
	t.Setenv("KILN_TEST_S3_ENDPOINT", "")
	t.Setenv("KILN_TEST_S3", "gofakes3")
	if _, err := start(t, 1, ""); err == nil || !strings.Contains(err.Error(), "hint:") {
		t.Errorf("an unknown server: %v", err)
	}
	t.Setenv("KILN_TEST_S3_ENDPOINT", "localhost:9")
	t.Setenv("AWS_ACCESS_KEY_ID", "")
	if _, err := start(t, 1, ""); err == nil || !strings.Contains(err.Error(), "AWS_ACCESS_KEY_ID") {
		t.Errorf("an endpoint without credentials: %v", err)
	}
	_, err := tool(t.TempDir(), "versitygw", "make test")
	if err == nil || !strings.Contains(err.Error(), "hint: make test") {
		t.Errorf("a tool that was not built: %v", err)
	}
}
