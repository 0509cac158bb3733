package api

import (
	_ "embed"
	"slices"
)

//go:embed openapi.yaml
var openAPI []byte

// OpenAPI returns the OpenAPI 3.1 document of the routes of a registry, in YAML.
func OpenAPI() []byte { return slices.Clone(openAPI) }
