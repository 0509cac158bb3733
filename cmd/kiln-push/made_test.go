package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
	"github.com/kiln-registry/kiln-registry/transfer/artifact"
)

// madeCommands are the commands of the scripts about what is made from a base.
var madeCommands = map[string]func(*testscript.TestScript, bool, []string){
	"made": writeMade, "many": many, "edit": edit, "without": without, "relink": relink, "unsent": unsent,
	"manifest": writeManifest, "reference": reference, "subject": subject, "layer": writeLayer,
}

// writeMade writes an artifact that was made from the base whose manifest is in a file, or from none where that is called
// none: made peft|adapter|checkpoint|bare|receipt|eval|row PATH BASE [SEED]
func writeMade(ts *testscript.TestScript, _ bool, args []string) {
	path, base, seed := ts.MkAbs(args[1]), (*identity.Manifest)(nil), byte(1)
	if args[2] != "none" {
		m, err := identity.Parse([]byte(strings.TrimSpace(ts.ReadFile(args[2]))))
		ts.Check(err)
		base = &m
	}
	if len(args) > 3 {
		seed = args[3][0]
	}
	known, err := testartifact.Write(args[0], path, seed, base)
	ts.Check(err)
	if known {
		return
	}
	switch args[0] {
	case "eval":
		ts.Check(os.WriteFile(path, testartifact.Eval("eval-1", "demo", base), 0o644))
	case "row":
		f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
		ts.Check(err)
		_, err = f.Write(testartifact.Row("1", base))
		ts.Check(err)
		ts.Check(f.Close())
	default:
		ts.Fatalf("made: %q is nothing", args[0])
	}
}

// many states that an artifact was made from a base, as often as that, by "a" for "run 0" and so on: many REF BASE TIMES
func many(ts *testscript.TestScript, _ bool, args []string) {
	ctx := context.Background()
	ref, err := client.ParseReference(args[0])
	ts.Check(err)
	n, err := strconv.Atoi(args[2])
	ts.Check(err)
	c, err := client.New(ref.Host, client.Options{})
	ts.Check(err)
	defer c.Close()
	f, err := artifact.FindManifest(ctx, c, ref)
	ts.Check(err)
	base, err := artifact.FindBase(ctx, args[1], func(string, bool) (*client.Client, error) { return c, nil })
	ts.Check(err)
	for i := range n {
		a, err := artifact.Bind(f, base, artifact.Words{By: "a", Reason: fmt.Sprint("run ", i), At: "2026-01-02T03:04:05Z"})
		ts.Check(err)
		_, err = a.Push(ctx, c, client.Reference{Host: ref.Host, Repo: ref.Repo}, nil)
		ts.Check(err)
	}
}

// edit replaces a text that occurs once in a file: edit FILE OLD NEW
func edit(ts *testscript.TestScript, _ bool, args []string) {
	text := ts.ReadFile(args[0])
	if n := strings.Count(text, args[1]); n != 1 {
		ts.Fatalf("%q is %d times in %s:\n%s", args[1], n, args[0], text)
	}
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(strings.Replace(text, args[1], args[2], 1)), 0o644))
}

// without takes the manifest of a base out of a document again: without FILE BASE
func without(ts *testscript.TestScript, _ bool, args []string) {
	edit(ts, false, []string{args[0], `,"base_weight_shard_manifest":` + strings.TrimSpace(ts.ReadFile(args[1])), ""})
}

// relink gives a file a second name: relink OLD NEW
func relink(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(os.Link(ts.MkAbs(args[0]), ts.MkAbs(args[1])))
}

// writes counts the requests that could change a registry.
type writes struct {
	http.Handler
	n atomic.Int64
}

func (w *writes) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.n.Add(1)
	}
	w.Handler.ServeHTTP(rw, r)
}

// unsent fails if anything was sent to the registry since the last unsent; with "!", if nothing was.
func unsent(ts *testscript.TestScript, neg bool, _ []string) {
	if n := ts.Value(writesKey{}).(*writes).n.Swap(0); (n > 0) != neg {
		ts.Fatalf("%d requests that change a registry", n)
	}
}

type writesKey struct{}

// descriptor and fetched are what is looked at of manifests.
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Annotations map[string]string `json:"annotations"`
}

type fetched struct {
	ArtifactType string            `json:"artifactType"`
	Config       descriptor        `json:"config"`
	Layers       []descriptor      `json:"layers"`
	Subject      *descriptor       `json:"subject"`
	Annotations  map[string]string `json:"annotations"`
}

// fetch gets a manifest, and returns where its repository is.
func fetch(ts *testscript.TestScript, s string) (m fetched, repo string) {
	ref, err := client.ParseReference(s)
	ts.Check(err)
	repo = "http://" + ref.Host + "/v2/" + ref.Repo
	ts.Check(json.Unmarshal(get(ts, repo+"/manifests/"+ref.Name()), &m))
	return m, repo
}

func get(ts *testscript.TestScript, url string) []byte {
	resp, err := http.Get(url)
	ts.Check(err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	ts.Check(err)
	if resp.StatusCode != http.StatusOK {
		ts.Fatalf("%s: %s: %s", url, resp.Status, b)
	}
	return b
}

// reference sets a variable, in capitals, to the reference that the last command printed, and one with _DIGEST behind its
// name to the digest of that: reference NAME
func reference(ts *testscript.TestScript, _ bool, args []string) {
	_, after, ok := strings.Cut(ts.ReadFile("stdout"), "reference ")
	if !ok {
		ts.Fatalf("no reference was printed")
	}
	name := strings.ToUpper(args[0])
	ts.Setenv(name, strings.TrimSpace(after))
	_, digest, _ := strings.Cut(strings.TrimSpace(after), "@")
	ts.Setenv(name+"_DIGEST", digest)
}

// subject checks that a manifest is listed as a referrer of its subject, whose digest SUBJECT becomes: subject REF
func subject(ts *testscript.TestScript, _ bool, args []string) {
	m, repo := fetch(ts, args[0])
	if m.Subject == nil {
		ts.Fatalf("%s has no subject", args[0])
	}
	_, digest, _ := strings.Cut(args[0], "@")
	if list := get(ts, repo+"/referrers/"+m.Subject.Digest); !strings.Contains(string(list), digest) {
		ts.Fatalf("%s is no referrer of %s: %s", digest, m.Subject.Digest, list)
	}
	ts.Setenv("SUBJECT", m.Subject.Digest)
}

// writeLayer writes the first layer of a manifest into the file "layer": layer REF
func writeLayer(ts *testscript.TestScript, _ bool, args []string) {
	m, repo := fetch(ts, args[0])
	ts.Check(os.WriteFile(ts.MkAbs("layer"), get(ts, repo+"/blobs/"+m.Layers[0].Digest), 0o644))
}

// writeManifest writes what a manifest says into the file "manifest", one fact a line: manifest REF
func writeManifest(ts *testscript.TestScript, _ bool, args []string) {
	m, _ := fetch(ts, args[0])
	var b strings.Builder
	fmt.Fprintf(&b, "type %s\nconfig %s\n", m.ArtifactType, m.Config.MediaType)
	for _, l := range m.Layers {
		if l.Annotations["org.opencontainers.image.title"] != l.Annotations["org.cncf.model.filepath"] {
			ts.Fatalf("layer with two names: %v", l.Annotations)
		}
		fmt.Fprintf(&b, "layer %s %s\n", l.MediaType, l.Annotations["org.cncf.model.filepath"])
	}
	if m.Subject != nil {
		fmt.Fprintf(&b, "subject %s\n", m.Subject.Digest)
	}
	fmt.Fprintf(&b, "kind %s\n", m.Annotations["dev.kiln.kind"])
	fmt.Fprintf(&b, "aggregate %s\n", m.Annotations["dev.kiln.base-model-content.v1"])
	ts.Check(os.WriteFile(ts.MkAbs("manifest"), []byte(b.String()), 0o644))
}
