package registry_test

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/registry"
)

// A request comes to the same route by the ends of its path as it does where all routes are tried.
func TestRoutesByTheirEnds(t *testing.T) {
	var seen []registry.Served
	s := newServer(t)
	s.stop()
	s.with = func(c *registry.Config) { c.Observe = func(d registry.Served) { seen = append(seen, d) } }
	s.start()
	var words []string
	for _, path := range registry.Routes() {
		words = append(words, strings.Split(path, "/")...)
	}
	words = append(words, "x", "%2F", "a%20b", "%62ases", "..", "v2", "v1")
	random := rand.New(rand.NewPCG(3, 5))
	routes := map[string]bool{}
	ask := func(h http.Handler, method, path string) string {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(method, path, nil))
		last := seen[len(seen)-1]
		routes[last.Route] = true
		return fmt.Sprint(last.Route, w.Code, w.Header()["Allow"])
	}
	one := s.reg.OneRouter()
	for method, path := range registry.Routes() {
		for range 60 {
			elements := strings.Split(path, "/")
			for i, e := range elements[1:] {
				if strings.HasPrefix(e, "{") || random.IntN(8) == 0 {
					elements[i+1] = words[random.IntN(len(words))]
				}
			}
			if random.IntN(8) == 0 {
				elements = append(elements, words[random.IntN(len(words))])
			}
			at := "http://x" + strings.NewReplacer("{", "", "}", "", ":.+", "").Replace(strings.Join(elements, "/"))
			if random.IntN(8) == 0 {
				method = []string{"GET", "POST", "OPTIONS", "DELETE"}[random.IntN(4)]
			}
			if got, want := ask(s.reg, method, at), ask(one, method, at); got != want {
				t.Errorf("%s %s: %s, want %s", method, at, got, want)
			}
		}
	}
	if len(routes) < 20 {
		t.Error("only", len(routes), "routes were met")
	}
}
