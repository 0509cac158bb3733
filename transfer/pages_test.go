package transfer_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/transfer"
)

// TestPages: a listing is read to its end, and one that has none is an error. The cursor after page n is what next makes
// of n; a page whose cursor is negative is the last, and held is what is on every page.
func TestPages(t *testing.T) {
	a := identity.Aggregate{1}
	count := func(n int) string { return strconv.Itoa(n + 1) }
	for name, tt := range map[string]struct {
		next  func(n int) string
		held  []api.Held
		pages int    // that are read without an error
		want  string // of the error; empty: none
	}{
		"three pages": {func(n int) string { return []string{"1", "2", ""}[n] }, []api.Held{{Repository: "r"}}, 3, ""},
		"empty end":   {func(int) string { return "" }, nil, 1, ""},
		"empty pages": {count, nil, 0, "an empty page"},
		"one cursor":  {func(int) string { return "0" }, []api.Held{{}}, 1, "twice"},
		"a circle":    {func(n int) string { return strconv.Itoa((n + 1) % 3) }, []api.Held{{}}, 3, "twice"},
		"no end":      {count, []api.Held{{}}, 9_999, "more than 10000 pages"},
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			n, _ := strconv.Atoi(r.URL.Query().Get("after"))
			var page any = api.Base{
				Identity: identity.Summary{Aggregate: a}, Packagings: []api.Packaging{{Manifests: tt.held}}, Next: tt.next(n),
			}
			if strings.HasSuffix(r.URL.Path, "/artifacts") {
				list := api.ArtifactList{Next: tt.next(n)}
				for _, h := range tt.held {
					list.Artifacts = append(list.Artifacts, api.Artifact{Held: h})
				}
				page = list
			}
			_ = json.NewEncoder(w).Encode(page)
		}))
		c, err := client.New(strings.TrimPrefix(srv.URL, "http://"), client.Options{})
		if err != nil {
			t.Fatal(err)
		}
		check := func(what string, pages int, err error) {
			if pages != tt.pages || (err == nil) != (tt.want == "") ||
				err != nil && (!errors.Is(err, client.ErrListing) || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("%s of %s: %d pages, %v", what, name, pages, err)
			}
		}
		n, last := 0, error(nil)
		for _, err := range c.BasePages(t.Context(), a) {
			if last = err; err == nil {
				n++
			}
		}
		check("bases", n, last)
		n = 0
		for _, err := range c.ArtifactPages(t.Context(), a, client.Filter{}, 1) {
			if last = err; err == nil {
				n++
			}
		}
		if tt.held == nil && tt.want != "" { // a page of what passes a filter may be empty
			tt.pages, tt.want = 9_999, "more than 10000 pages"
		}
		check("artifacts", n, last)
		if tt.want != "" && tt.pages < 9_999 {
			if _, err := transfer.ResolveAggregate(t.Context(), c, a, "none"); !errors.Is(err, client.ErrListing) {
				t.Errorf("pull of %s: %v", name, err)
			}
		}
		c.Close()
		srv.Close()
	}
}

// TestLineagePages: the pages of what an artifact was made from follow those of what names it.
func TestLineagePages(t *testing.T) {
	d := identity.Sum(nil)
	link := func(how string) []api.Link { return []api.Link{{Relation: api.RelationDerived, How: how}} }
	answers := map[string]api.Lineage{
		"":   {Parents: link("a"), Children: link("x"), Next: "c2", NextParents: "p2"},
		"c2": {Children: link("y")},
		"p2": {Parents: link("b"), NextParents: "p3"},
		"p3": {Parents: link("c")},
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		page := answers[r.URL.Query().Get("after")]
		page.Artifact.Digest = d
		_ = json.NewEncoder(w).Encode(page)
	}))
	defer srv.Close()
	c, err := client.New(strings.TrimPrefix(srv.URL, "http://"), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	got := ""
	for page, err := range c.LineagePages(t.Context(), d, "") {
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range append(page.Parents, page.Children...) {
			got += l.How
		}
	}
	if got != "axybc" {
		t.Error(got)
	}
}
