package tests3

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/minio/minio-go/v7"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(M{m}) }

// put stores b and fails the test when that fails.
func put(t *testing.T, c *minio.Client, bucket, key string, b []byte) {
	t.Helper()
	if _, err := c.PutObject(t.Context(), bucket, key, bytes.NewReader(b), int64(len(b)), minio.PutObjectOptions{}); err != nil {
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

func TestRefuses(t *testing.T) {
	s := Shared(t)
	bad := *s
	bad.SecretKey = "another"
	if _, err := bad.Client(t).ListBuckets(t.Context()); err == nil {
		t.Error("a wrong secret is taken")
	}
	t.Setenv("KILN_TEST_S3_ENDPOINT", "")
	t.Setenv("KILN_TEST_S3", "gofakes3")
	if _, err := start(t, 1); err == nil || !strings.Contains(err.Error(), "hint:") {
		t.Errorf("an unknown server: %v", err)
	}
	t.Setenv("KILN_TEST_S3_ENDPOINT", "localhost:9")
	t.Setenv("AWS_ACCESS_KEY_ID", "")
	if _, err := start(t, 1); err == nil || !strings.Contains(err.Error(), "AWS_ACCESS_KEY_ID") {
		t.Errorf("an endpoint without credentials: %v", err)
	}
	if _, err := tool(t.TempDir(), "versitygw", "make test"); err == nil || !strings.Contains(err.Error(), "hint: make test") {
		t.Errorf("a tool that was not built: %v", err)
	}
}
