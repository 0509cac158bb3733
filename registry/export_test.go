package registry

import (
	"iter"
	"net/http"
	"strings"
)

// Routes yields method and path of each row of the route table.
func Routes() iter.Seq2[string, string] {
	return func(yield func(string, string) bool) {
		for _, r := range routes {
			for m := range strings.FieldsSeq(r.methods) {
				if !yield(m, r.path) {
					return
				}
			}
		}
	}
}

// OneRouter returns a router that tries all routes one after the other.
func (r *Registry) OneRouter() http.Handler { return routerOf(r, func(string) bool { return true }) }
