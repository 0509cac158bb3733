package registry

import (
	"iter"
	"net/http"
	"runtime"
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

// Waiting returns how many requests wait for memory, or for their turn.
func (r *Registry) Waiting() int64 {
	m := r.memory
	n := m.asked.Waiting() + m.listings.Waiting() + m.reads.Waiting()
	for _, p := range []parsing{m.questions, m.pushes} {
		n += p.arriving.Waiting() + p.bodies.Waiting() + p.documents.Waiting()
	}
	return int64(n)
}

// Turns is how many answers of one sort are made at a time for one caller.
func Turns() int {
	places := max(minPlaces, runtime.GOMAXPROCS(0))
	return places * placesPart / (placesPart + 1)
}

// How many questions, and listings, of one caller may wait for their turn.
const (
	MaxOfOne         = maxOfOne
	MaxListingsOfOne = maxListings / 4
)
