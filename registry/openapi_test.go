package registry

import (
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/kiln-registry/kiln-registry/api"
)

// The OpenAPI document has every route and method of the table, no others, and every reference in it leads somewhere.
func TestOpenAPIMatchesRoutes(t *testing.T) {
	var doc struct {
		Paths      map[string]map[string]any
		Components map[string]map[string]any
	}
	if err := yaml.Unmarshal(api.OpenAPI(), &doc); err != nil {
		t.Fatal(err)
	}
	documented := map[string]bool{}
	for path, item := range doc.Paths {
		for method := range item {
			if method != "parameters" {
				documented[strings.ToUpper(method)+" "+path] = true
			}
		}
	}
	for method, path := range Routes() {
		if method == "HEAD" {
			continue
		}
		key := method + " " + strings.ReplaceAll(path, "{name:.+}", "{name}")
		if !documented[key] {
			t.Errorf("%s is not documented", key)
		}
		delete(documented, key)
	}
	for key := range documented {
		t.Errorf("%s is documented, but no route", key)
	}
	for _, m := range regexp.MustCompile(`#/components/(\w+)/(\w+)`).FindAllStringSubmatch(string(api.OpenAPI()), -1) {
		if doc.Components[m[1]][m[2]] == nil {
			t.Errorf("%s leads nowhere", m[0])
		}
	}
}
