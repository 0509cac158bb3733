package registry_test

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

// guard puts a token file before the server. Each token is "globs actions", by name; anonymous is one of the names.
func (s *server) guard(tokens map[string]string) (secrets map[string]string) {
	s.t.Helper()
	f := access.File{Version: access.FileVersion}
	secrets = map[string]string{}
	for name, spec := range tokens {
		globs, actions, _ := strings.Cut(spec, " ")
		r := access.Rule{Repositories: strings.Split(globs, ",")}
		for _, a := range strings.Split(actions, ",") {
			r.Actions = append(r.Actions, access.Action(a))
		}
		if name == "anonymous" {
			f.Anonymous = []access.Rule{r}
			continue
		}
		secret, sum := access.NewSecret()
		secrets[name] = secret
		f.Tokens = append(f.Tokens, access.Token{Name: name, SHA256: sum, Allow: []access.Rule{r}})
	}
	b, err := f.Marshal()
	path := filepath.Join(s.t.TempDir(), "tokens.yaml")
	if err = errors.Join(err, os.WriteFile(path, b, 0o600)); err != nil {
		s.t.Fatal(err)
	}
	if s.gate, err = access.Load(path, slog.New(slog.DiscardHandler)); err != nil {
		s.t.Fatal(err)
	}
	s.stop()
	s.start()
	return secrets
}

// Every route but those of health refuses a caller without a token, and one whose token is not for it; and does so
// before it says whether anything is there.
func TestEveryRouteAsksWhoCalls(t *testing.T) {
	s := newServer(t)
	agg, d := s.base("team/model", "v1", "m", "1")
	secrets := s.guard(
		map[string]string{"other": "other/* pull,push,delete", "reader": "team/model pull", "writer": "team/model push",
			"deleter": "team/model delete"},
	)
	open := map[string]bool{"/health": true, "/v1/health": true, "/readyz": true, "/metrics": true}
	general := map[string]bool{"/v2/": true, "/v1/bases": true, "/v1/openapi.yaml": true, "/v1/compare": true,
		"/v1/compatibility": true, "/v1/artifacts": true}
	needs := map[string]string{
		"GET":    "reader",
		"HEAD":   "reader",
		"POST":   "writer",
		"PATCH":  "writer",
		"PUT":    "writer",
		"DELETE": "deleter",
	}
	seen := 0
	for method, path := range registry.Routes() {
		seen++
		isUpload := strings.Contains(path, "uploads")
		url := strings.NewReplacer(
			"{name:.+}",
			"team/model",
			"{digest}",
			d.String(),
			"{ref}",
			"v1",
			"{id}",
			strings.Repeat("0", 32),
			"{aggregate}",
			agg.String(),
		).Replace(
			path,
		)
		s.token = ""
		a := s.do(method, url, nil)
		if open[path] {
			if a.status != 200 {
				t.Errorf("%s %s: open, but %v", method, path, a)
			}
			continue
		}
		if a.status != 401 || !strings.HasPrefix(a.header.Get("WWW-Authenticate"), `Basic realm=`) {
			t.Errorf("%s %s without a token: %v", method, path, a)
		}
		s.token = "kiln_nonsense"
		if a := s.do(method, url, nil); a.status != 401 {
			t.Errorf("%s %s with a wrong token: %v", method, path, a)
		}
		if general[path] {
			continue
		}
		need := needs[method]
		if isUpload {
			need = "writer"
		}
		for name, secret := range secrets {
			s.token = secret
			a := s.do(method, url, nil)
			base := strings.HasPrefix(path, "/v1/")
			switch {
			case base && name == "reader", !base && name == need:
				if a.status == 401 || a.status == 403 {
					t.Errorf("%s %s as %s: %v", method, path, name, a)
				}
			case base && name == "other": // may pull elsewhere: sees nothing of it
				if a.status != 404 && len(a.body) > 0 && !strings.Contains(string(a.body), `"artifacts":[]`) {
					t.Errorf("%s %s as %s: %v", method, path, name, a)
				}
			case a.status != 403:
				t.Errorf("%s %s as %s: %v, want 403", method, path, name, a)
			}
		}
	}
	if seen < 25 {
		t.Errorf("only %d rows of the route table were walked", seen)
	}
	s.token = secrets["reader"]
	s.want(200, "GET", "/v2/", nil)
}

func TestListingsShowOnlyWhatMayBePulled(t *testing.T) {
	s := newServer(t)
	agg, _ := s.base("secret/model", "v1", "s", "1", "2")
	hidden, hiddenDigest := s.base("secret/only", "v1", "s", "3")
	s.base("open/model", "v1", "o", "2", "1")
	secrets := s.guard(
		map[string]string{"open": "open/** pull,push", "secret": "secret/** pull,push", "anonymous": "open/model pull"},
	)
	s.token = ""
	s.want(401, "GET", "/v2/", nil) // so that clients show who they are
	s.want(200, "GET", api.PathManifest("open/model", "v1"), nil)
	for _, who := range []string{"", secrets["open"]} {
		s.token = who
		list := get[api.BaseList](s, api.PathBases+"?limit=1")
		if len(list.Bases) != 1 || list.Bases[0].Aggregate != agg || list.Next != "" {
			t.Errorf("%+v", list)
		}
		base := get[api.Base](s, api.PathBase(agg))
		if len(base.Packagings) != 1 || len(base.Packagings[0].Manifests) != 1 ||
			base.Packagings[0].Manifests[0].Repository != "open/model" ||
			base.Next != "" {
			t.Errorf("%+v", base)
		}
		if m := get[identity.Manifest](s, api.PathBaseManifest(agg)); m.Shards[0].Filename != "o-0.safetensors" {
			t.Errorf("%+v", m)
		}
		for _, path := range []string{api.PathBase(hidden), api.PathBaseManifest(hidden),
			api.PathBaseManifest(agg) + "?repo=secret/model"} {
			if a := s.do("GET", path, nil); a.status != 404 {
				t.Errorf("%s: %v", path, a)
			}
		}
		body := fmt.Sprintf(`{"a":{"aggregate_sha256":%q},"b":{"aggregate_sha256":%q}}`, agg, hidden)
		if a := s.do("POST", api.PathCompare, []byte(body)); a.status != 404 {
			t.Error(a)
		}
		body = fmt.Sprintf(`{"a":{"aggregate_sha256":%q},"b":{"reference":"secret/only:v1"}}`, agg)
		if a := s.do("POST", api.PathCompare, []byte(body)); a.status != 401 && a.status != 403 {
			t.Error(a)
		}
	}
	// A mount takes nothing from where the caller may not pull, and nothing from nowhere.
	s.token = secrets["open"]
	d := identity.Sum(safetensors("3"))
	for _, q := range []string{"?mount=" + d.String(), "?mount=" + d.String() + "&from=secret/only"} {
		s.want(202, "POST", api.PathUploads("open/new")+q, nil)
	}
	s.want(201, "POST", api.PathUploads("open/new")+"?mount="+identity.Sum(safetensors("1")).String(), nil)
	// A base that the caller may not pull counts as not held; one may be named all the same.
	m := s.manifest("open/lora", []desc{}, map[string]any{"artifactType": api.ArtifactTypeAdapter,
		"subject":     desc{"mediaType": manifestType, "digest": hiddenDigest.String(), "size": 1},
		"annotations": map[string]string{api.AnnotationAggregate: agg.String()}})
	if a := s.put("open/lora", "v1", m); a.status != 201 {
		t.Error("a hidden subject was looked at:", a)
	}
	m = s.manifest("open/lora", []desc{}, map[string]any{"artifactType": api.ArtifactTypeAdapter,
		"annotations": map[string]string{api.AnnotationAggregate: hidden.String()}})
	if a := s.put("open/lora", "v2", m); a.status != 201 {
		t.Fatal(a)
	}
	list := get[api.ArtifactList](s, api.PathArtifacts(hidden))
	if len(list.Artifacts) != 1 || list.Artifacts[0].Binding.Held {
		t.Errorf("%+v", list)
	}
	s.token = secrets["secret"]
	if list := get[api.ArtifactList](s, api.PathArtifacts(hidden)); len(list.Artifacts) != 1 ||
		list.Artifacts[0].Kind != api.KindBase {
		t.Errorf("%+v", list)
	}
}

func TestUploadBelongsToItsCaller(t *testing.T) {
	s := newServer(t)
	secrets := s.guard(map[string]string{"one": "a/** pull,push", "two": "a/** pull,push"})
	s.token = secrets["one"]
	at := s.begin("a/b")
	s.token = secrets["two"]
	for _, method := range []string{"GET", "PATCH", "PUT", "DELETE"} {
		if a := s.do(method, at+"?digest="+identity.Sum(nil).String(), nil); method != "GET" &&
			a.code() != api.CodeBlobUploadUnknown ||
			a.status != 404 {
			t.Errorf("%s: %v", method, a)
		}
	}
	s.token = secrets["one"]
	if a := s.want(204, "GET", at, nil); !slices.Contains([]string{"0-0"}, a.header.Get("Range")) {
		t.Error(a)
	}
}
