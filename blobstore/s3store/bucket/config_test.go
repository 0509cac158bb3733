package bucket

import (
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/minio/minio-go/v7/pkg/encrypt"

	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

func TestParse(t *testing.T) {
	const aws = "s3.amazonaws.com"
	for raw, want := range map[string]Config{
		"s3://models":                                  {Bucket: "models", Endpoint: aws},
		"s3://models/":                                 {Bucket: "models", Endpoint: aws},
		"s3://models/a/b/?region=mars-1":               {Bucket: "models", Prefix: "a/b", Endpoint: aws, Region: "mars-1"},
		"s3://models?endpoint=s3.example.org":          {Bucket: "models", Endpoint: "s3.example.org"},
		"s3://models?endpoint=https://s3.example:9000": {Bucket: "models", Endpoint: "s3.example:9000"},
		"s3://models?endpoint=http://10.0.0.1:9000/":   {Bucket: "models", Endpoint: "10.0.0.1:9000", Insecure: true},
		"s3://models?ca-file=/etc/ca.pem":              {Bucket: "models", Endpoint: aws, CAFile: "/etc/ca.pem"},
		"s3://models/%C3%BC%20x":                       {Bucket: "models", Prefix: "ü x", Endpoint: aws},
	} {
		got, err := Parse(raw)
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v, want %+v", raw, got, err, want)
		}
	}
	for raw, want := range map[string]encrypt.Type{
		"s3://models?sse=AES256": encrypt.S3, "s3://models?sse=aws:kms": encrypt.KMS,
		"s3://models?sse=aws:kms:arn:aws:kms:eu-west-1:1:key/2": encrypt.KMS,
	} {
		if got, err := Parse(raw); err != nil || got.sse == nil || got.sse.Type() != want {
			t.Errorf("%s: %v, %v", raw, got.sse, err)
		}
	}
	if c, err := Parse("s3://models/a/b?region=x"); err != nil || c.String() != "s3://models/a/b" {
		t.Errorf("%s, %v", c, err)
	}
}

// TestParseRefuses: what is wrong is said, and what may be a secret is not.
func TestParseRefuses(t *testing.T) {
	for raw, says := range map[string]string{
		"":                                    "is not of the form s3://bucket/prefix",
		"models":                              "is not of the form",
		"http://models":                       "is not of the form",
		"s3://":                               "not the name of a bucket",
		"s3:///prefix":                        "not the name of a bucket",
		"s3://no":                             "not the name of a bucket",
		"s3://Upper":                          "not the name of a bucket",
		"s3://models:80":                      "not the name of a bucket",
		"s3://models/a//b":                    "not a prefix of keys",
		"s3://models/a/../b":                  "not a prefix of keys",
		"s3://models/./b":                     "not a prefix of keys",
		"s3://models/%zz":                     "is not of the form",
		"s3://models?endpont=x":               `unknown parameter "endpont": there are addressing, ca-file, endpoint`,
		"s3://models?region=a&region=b":       `parameter "region" is there twice`,
		"s3://models?region=%zz":              "parameters are not of the form",
		"s3://models?region=a;b":              "parameters are not of the form",
		"s3://models#part":                    "parameters are not of the form",
		"s3://models?addressing=dns":          "want auto, path or virtual",
		"s3://models?sse=aes256":              "want AES256, aws:kms or aws:kms:KEY",
		"s3://models?sse=AES256:key":          "want AES256",
		"s3://models?sse=kms":                 "want AES256",
		"s3://models?endpoint=ftp://x":        "want https://host:port",
		"s3://models?endpoint=http://":        "want https://host:port",
		"s3://models?endpoint=https://h/path": "want https://host:port",
		"s3://models?endpoint=https%3A%2F%2FKEY%3AHUSH%40h":       "want https://host:port",
		"s3://models?endpoint=https%3A%2F%2Fh%3Fsecret%3DHUSH":    "want https://host:port",
		"s3://KEY:HUSH@models/p":                                  "credentials do not belong into the URL",
		"s3://KEY:HUSH/2@models/p":                                "is not of the form",
		"s3://KEY:HUSH@models/%zz?x":                              "is not of the form",
		"s3://models?access-key=KEY&secret-key=HUSH":              "unknown parameter",
		"s3://models?AWS_SECRET_ACCESS_KEY=HUSH":                  "unknown parameter",
		"KEY:HUSH@models":                                         "is not of the form",
		"s3://models?endpoint=https://HUSH%40h/&region=eu-west-1": "want https://host:port",
	} {
		_, err := Parse(raw)
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", raw, err, says)
		}
		if err != nil && strings.Contains(err.Error(), "HUSH") {
			t.Errorf("%s: the secret is in %q", raw, err)
		}
	}
}

// TestVirtualHost: the bucket goes into the host name, where it is asked for.
func TestVirtualHost(t *testing.T) {
	const domain = "s3.kiln.test"
	server := tests3.NewVirtualHost(t, domain)
	alone(t)
	t.Setenv("AWS_ACCESS_KEY_ID", server.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", server.SecretKey)
	s := &site{T: t, ctx: t.Context(), server: server, bucket: server.Bucket(t)}
	hosts := map[string]bool{}
	b := s.dial("s3://"+s.bucket+"/p?addressing=virtual&endpoint=http://"+domain, Options{
		Transport: func(rt http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				r = r.Clone(r.Context())
				r.Host, r.URL.Host = r.URL.Host, server.Endpoint() // as a resolver would do
				hosts[r.Host] = true
				return rt.RoundTrip(r)
			})
		},
	})
	_, err := b.Put(s.ctx, b.Key("x"), []byte("y"), Condition{Absent: true})
	s.must(err)
	o, err := b.Get(s.ctx, b.Key("x"), 10, nil)
	if err != nil || string(o.Body) != "y" {
		t.Errorf("%q, %v", o.Body, err)
	}
	if !hosts[s.bucket+"."+domain] || len(hosts) != 1 {
		t.Errorf("requests went to %v", hosts)
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// TestAddress: where requests go, without sending any.
func TestAddress(t *testing.T) {
	alone(t)
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", wrongSecret)
	const aws = "s3.dualstack.eu-west-1.amazonaws.com"
	for url, want := range map[string]string{
		"s3://models/p?region=eu-west-1":                                    "https://models." + aws + "/p/x",
		"s3://models/p?region=eu-west-1&addressing=path":                    "https://" + aws + "/models/p/x",
		"s3://models/p?region=r&endpoint=http://127.0.0.1:1":                "http://127.0.0.1:1/models/p/x",
		"s3://models/p?region=r&endpoint=s3.example.org":                    "https://s3.example.org/models/p/x",
		"s3://models/p?region=r&endpoint=s3.example.org&addressing=virtual": "https://models.s3.example.org/p/x",
		"s3://models/a%20b?region=r&endpoint=s3.example.org":                "https://s3.example.org/models/a%20b/x",
	} {
		got := ""
		b, err := try(url, Options{Tries: 1, Transport: func(http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				got = r.URL.String()
				return nil, os.ErrDeadlineExceeded
			})
		}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.Get(t.Context(), b.Key("x"), 1, nil); err == nil || got != want {
			t.Errorf("%s goes to %s, want %s (%v)", url, got, want, err)
		}
	}
}

// TestEncryption: the header is on every request that begins an object.
func TestEncryption(t *testing.T) {
	s := newSite(t)
	for sse, want := range map[string][2]string{
		"AES256": {"AES256", ""}, "aws:kms": {"aws:kms", ""}, "aws:kms:a-key": {"aws:kms", "a-key"}, "": {"", ""},
	} {
		var got [][2]string
		p := tests3.NewProxy(t, s.server.Endpoint())
		p.On(tests3.Is(tests3.PutObject, tests3.CreateMultipartUpload), func(http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				got = append(got, [2]string{r.Header.Get("X-Amz-Server-Side-Encryption"),
					r.Header.Get("X-Amz-Server-Side-Encryption-Aws-Kms-Key-Id")})
				tests3.Answer(403, "AccessDenied")(nil).ServeHTTP(w, r) // the server of the tests has no keys
			})
		})
		b := s.dial("s3://"+s.bucket+"?addressing=path&endpoint=http://"+p.Endpoint()+"&sse="+sse, Options{})
		_, put := b.Put(s.ctx, "x", nil, Condition{})
		_, begun := b.Begin(s.ctx, "x")
		s.says("put", put, "s3:PutObject")
		s.says("begin", begun, "s3:PutObject")
		if len(got) != 2 || got[0] != want || got[1] != want {
			t.Errorf("sse=%s: %q, want twice %q", sse, got, want)
		}
	}
}
