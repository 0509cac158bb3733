package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/artifact"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

// madeCommands are the commands of the scripts about what is made from a base.
var madeCommands = map[string]func(*testscript.TestScript, bool, []string){
	"made": writeMade, "edit": edit, "without": without, "send": send, "serving": serving, "links": links, "relink": relink,
	"provenance": provenance, "foreign": foreign, "bind": bind, "many": many, "foretell": foretell, "derive": derive,
	"mistype": mistype,
}

// modelOf hashes a model folder; nil for one that is called none.
func modelOf(ts *testscript.TestScript, dir string) *identity.Manifest {
	if dir == "none" {
		return nil
	}
	f, err := folder.Open(ts.MkAbs(dir), folder.Options{})
	ts.Check(err)
	sum, err := f.Sum(context.Background(), nil)
	ts.Check(err)
	return &sum.Manifest
}

// writeMade writes an artifact that was made from the base in a folder, or from none where that is called none:
// made peft|adapter|checkpoint|bare|receipt|eval|rows|scores|many|manifest PATH BASE [SEED]
func writeMade(ts *testscript.TestScript, _ bool, args []string) {
	path, base, seed := ts.MkAbs(args[1]), modelOf(ts, args[2]), byte(1)
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
		id := strings.TrimSuffix(filepath.Base(path), ".json")
		ts.Check(os.WriteFile(path, testartifact.Eval(id, "demo", base), 0o644))
	case "rows":
		ts.Check(os.WriteFile(path, testartifact.Row("1", base), 0o644))
	case "scores":
		ts.Check(os.WriteFile(path, scores(strings.TrimSuffix(filepath.Base(path), ".json"), base, 1), 0o644))
	case "many":
		ts.Check(os.WriteFile(path, scores(strings.TrimSuffix(filepath.Base(path), ".json"), base, 50), 0o644))
	case "manifest":
		b, err := base.MarshalJSON()
		ts.Check(err)
		ts.Check(os.WriteFile(path, b, 0o644))
	default:
		ts.Fatalf("made: %q is nothing", args[0])
	}
}

// scores is an eval job with runs on the base, which passed 1 of 4 examples, and as many on an adapter, which passed 3.
func scores(id string, base *identity.Manifest, pairs int) []byte {
	run := func(adapter string, passed int) string {
		return fmt.Sprintf(`{"suite_name":"math","adapter":%s,"aggregation":{"kind":"single"},"metrics":{"num_examples":4,`+
			`"num_completions":4,"num_pass":%d,"num_fail":%d,"num_invalid":0,"num_error":0,"accuracy":%g,"latency":{}},`+
			`"aggregated_outcomes":[],"outcomes":[],"started_at":"2026-07-14T12:00:00Z",`+
			`"finished_at":"2026-07-14T12:00:01Z","suite_hash":"0123456789abcdef"}`, adapter, passed, 4-passed, float64(passed)/4)
	}
	job := string(testartifact.Eval(id, "sql", base))
	job = strings.Replace(job, `"finished_runs":[]`, `"finished_runs":[`+
		strings.TrimSuffix(strings.Repeat(run("null", 1)+`,`+run(`"sql"`, 3)+`,`, pairs), ",")+`]`, 1)
	return []byte(strings.Replace(job, `"error":null`, `"error":null,"effective_seed":"17"`, 1))
}

// edit replaces a text that occurs once in a file: edit FILE OLD NEW
func edit(ts *testscript.TestScript, _ bool, args []string) {
	text := ts.ReadFile(args[0])
	if n := strings.Count(text, args[1]); n != 1 {
		ts.Fatalf("%q is %d times in %s:\n%s", args[1], n, args[0], text)
	}
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(strings.Replace(text, args[1], args[2], 1)), 0o644))
}

// without takes the manifest of a base out of a document: without FILE BASE
func without(ts *testscript.TestScript, _ bool, args []string) {
	b, err := modelOf(ts, args[1]).MarshalJSON()
	ts.Check(err)
	edit(ts, false, []string{args[0], `,"base_weight_shard_manifest":` + string(b), ""})
}

// send puts an artifact into the registry, for which a base may be named, and its digest into NAME: send KIND PATH REF
// NAME [BASE]
func send(ts *testscript.TestScript, _ bool, args []string) {
	ctx := context.Background()
	ref, err := client.ParseReference(args[2])
	ts.Check(err)
	dial := func(host string, _ bool) (*client.Client, error) { return client.New(host, client.Options{}) }
	o := artifact.Options{Legacy: true}
	if len(args) > 4 {
		o.Base, err = artifact.FindBase(ctx, args[4], dial)
		ts.Check(err)
	}
	a, err := artifact.Read(ctx, api.Kind(args[0]), ts.MkAbs(args[1]), o)
	ts.Check(err)
	pushArtifact(ts, a, ref, args[3])
}

func pushArtifact(ts *testscript.TestScript, a *artifact.Artifact, ref client.Reference, name string) {
	c, err := client.New(ref.Host, client.Options{})
	ts.Check(err)
	defer c.Close()
	pushed, err := a.Push(context.Background(), c, ref, nil)
	ts.Check(err)
	ts.Setenv(name, pushed.Digest.String())
}

// foreign puts one file into the registry without a word of what it is, as other tools do: foreign FILE REF
func foreign(ts *testscript.TestScript, _ bool, args []string) {
	ctx := context.Background()
	ref, err := client.ParseReference(args[1])
	ts.Check(err)
	c, err := client.New(ref.Host, client.Options{})
	ts.Check(err)
	defer c.Close()
	text := []byte(ts.ReadFile(args[0]))
	d, n := identity.Sum(text), int64(len(text))
	u := transfer.NewUploader(c, ref.Repo, nil)
	ts.Check(u.Send(ctx, transfer.Blob{Name: args[0], Digest: d, Size: n, Source: transfer.Bytes(text)}))
	_, _, err = u.Put(ctx, transfer.Artifact{Type: "application/vnd.unknown.artifact.v1",
		Layers: []transfer.Layer{{Name: args[0], Kind: folder.Doc, Digest: d, Size: n}}}, ref.Tag)
	ts.Check(err)
}

// related finds an artifact and a base in its registry.
func related(ts *testscript.TestScript, artifactRef, baseName string) (client.Reference, artifact.Found, artifact.Base) {
	ctx := context.Background()
	ref, err := client.ParseReference(artifactRef)
	ts.Check(err)
	c, err := client.New(ref.Host, client.Options{})
	ts.Check(err)
	defer c.Close()
	f, err := artifact.FindManifest(ctx, c, ref)
	ts.Check(err)
	base, err := artifact.FindBase(ctx, baseName, func(string, bool) (*client.Client, error) { return c, nil })
	ts.Check(err)
	return ref, f, base
}

// bind states that an artifact was made from a base: bind REF BASE [REASON]
func bind(ts *testscript.TestScript, _ bool, args []string) {
	ref, f, base := related(ts, args[0], args[1])
	reason := "b"
	if len(args) > 2 {
		reason = args[2]
	}
	a, err := artifact.Bind(f, base, artifact.Words{By: "a", Reason: reason, At: "2026-01-02T03:04:05Z"})
	ts.Check(err)
	pushArtifact(ts, a, client.Reference{Host: ref.Host, Repo: ref.Repo}, "STATEMENT")
}

// foretell states that an artifact was made from a base in a repository that does not hold it yet: foretell REF REPO BASE
func foretell(ts *testscript.TestScript, _ bool, args []string) {
	ref, f, base := related(ts, args[0], args[2])
	f.Annotations = nil // who says it has not seen the artifact
	a, err := artifact.Bind(f, base, artifact.Words{By: "a", Reason: "b", At: "2026-01-02T03:04:05Z"})
	ts.Check(err)
	pushArtifact(ts, a, client.Reference{Host: ref.Host, Repo: args[1]}, "STATEMENT")
}

// many states it as often as that: many REF BASE TIMES
func many(ts *testscript.TestScript, neg bool, args []string) {
	n, err := strconv.Atoi(args[2])
	ts.Check(err)
	for i := range n {
		bind(ts, neg, []string{args[0], args[1], fmt.Sprint("run ", i)})
	}
}

// derive states that a base was made from another one: derive TARGET SOURCE HOW REPOSITORY
func derive(ts *testscript.TestScript, _ bool, args []string) {
	var bases []artifact.Base
	for _, text := range args[:2] {
		b, err := artifact.FindBase(context.Background(), text, nil)
		ts.Check(err)
		bases = append(bases, b)
	}
	ref, err := client.ParseReference(args[3])
	ts.Check(err)
	words := artifact.Words{By: "a", Reason: "b", At: "2026-01-02T03:04:05Z"}
	a, err := artifact.Derive(bases[0], bases[1:], documents.How(args[2]), "", ref, words)
	ts.Check(err)
	pushArtifact(ts, a, ref, "STATEMENT")
}

// serving writes what a server with a model answers to a health check and, with an execution provenance, as its debug
// state: serving BASE|none [PROVENANCE]
func serving(ts *testscript.TestScript, _ bool, args []string) {
	answer := api.Health{Status: "ok", Role: "resident"}
	m := modelOf(ts, args[0])
	if m != nil {
		s := m.Summary()
		answer.BaseWeightIdentity = &s
	}
	ts.Check(os.RemoveAll(ts.MkAbs("resident")))
	put := func(name string, v any) {
		b, err := json.Marshal(v)
		ts.Check(err)
		ts.Check(os.MkdirAll(filepath.Dir(ts.MkAbs(name)), 0o755))
		ts.Check(os.WriteFile(ts.MkAbs(name), b, 0o644))
	}
	if len(args) > 1 {
		p, err := documents.ParseProvenance([]byte(strings.TrimSpace(ts.ReadFile(args[1]))))
		ts.Check(err)
		answer.ExecutionIdentity = &api.ExecutionIdentity{Provenance: p.Digest.String()}
		put("resident/v1/debug/model-state", map[string]any{"model": map[string]any{
			"base_weight_shard_manifest": m, "execution_provenance": json.RawMessage(p.Raw),
		}})
	}
	put("resident/health", answer)
}

// links checks that every file below a folder has one name and nothing shared is writable through another: links DIR
func links(ts *testscript.TestScript, _ bool, args []string) {
	n := 0
	ts.Check(filepath.Walk(ts.MkAbs(args[0]), func(path string, fi os.FileInfo, err error) error {
		if err == nil && fi.Mode().IsRegular() {
			n++
			if names := fi.Sys().(*syscall.Stat_t).Nlink; names != 1 {
				ts.Fatalf("%s has %d names", path, names)
			}
		}
		return err
	}))
	if n == 0 {
		ts.Fatalf("no files in %s", args[0])
	}
}

// relink gives a file a second name: relink OLD NEW
func relink(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(os.Link(ts.MkAbs(args[0]), ts.MkAbs(args[1])))
}

// provenance puts an execution provenance into the auxiliary state of a checkpoint, and makes the request of the same
// run: provenance FILE CHECKPOINT REQUEST
func provenance(ts *testscript.TestScript, _ bool, args []string) {
	request, err := testartifact.Provenance(ts.MkAbs(args[1]), []byte(strings.TrimSpace(ts.ReadFile(args[0]))))
	ts.Check(err)
	ts.Check(os.WriteFile(ts.MkAbs(args[2]), request, 0o644))
}

// mistype puts a folder into a repository that holds nothing else of it, with one file under another media type: mistype
// DIR REF FILE TYPE
func mistype(ts *testscript.TestScript, _ bool, args []string) {
	ctx := context.Background()
	ref, err := client.ParseReference(args[1])
	ts.Check(err)
	c, err := client.New(ref.Host, client.Options{})
	ts.Check(err)
	defer c.Close()
	pushed, err := transfer.Push(ctx, c, ts.MkAbs(args[0]), ref, transfer.PushOptions{})
	ts.Check(err)
	m, err := c.Manifest(ctx, ref.Repo, ref.Tag)
	ts.Check(err)
	var doc v1.Manifest
	ts.Check(json.Unmarshal(m.Bytes, &doc))
	for i, l := range doc.Layers {
		if name, err := api.LayerName(l.Annotations); err == nil && name == args[2] {
			doc.Layers[i].MediaType = args[3]
		}
	}
	b, err := json.Marshal(doc)
	ts.Check(err)
	_, err = c.PutManifest(ctx, ref.Repo, ref.Tag, m.MediaType, b)
	ts.Check(err)
	req, err := http.NewRequest(http.MethodDelete, "http://"+ref.Host+api.PathManifest(ref.Repo, pushed.Digest.String()), nil)
	ts.Check(err)
	resp, err := http.DefaultClient.Do(req)
	ts.Check(err)
	ts.Check(resp.Body.Close())
	if resp.StatusCode != http.StatusAccepted {
		ts.Fatalf("delete %s: %s", pushed.Digest, resp.Status)
	}
}
