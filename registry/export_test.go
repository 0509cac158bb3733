package registry

import (
	"iter"
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
