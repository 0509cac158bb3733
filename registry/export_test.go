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

// Waiting returns how many requests wait until they may parse something.
func (r *Registry) Waiting() int64 {
	n := r.memory.turns.Waiting()
	for _, p := range []parsing{r.memory.questions, r.memory.pushes} {
		n += p.arriving.Waiting() + p.bodies.Waiting() + p.documents.Waiting()
	}
	return n
}

// Turns is how many questions are answered at a time.
func (r *Registry) Turns() int { return cap(r.memory.places) }

// MaxOfOne is how many questions of one caller may wait for their turn.
const MaxOfOne = maxOfOne
