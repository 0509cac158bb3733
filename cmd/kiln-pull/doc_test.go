package main

import (
	"bytes"
	"os"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity/resume"
)

// The resume request that the documentation shows is one, with every member but a provenance.
func TestDocumentedRequest(t *testing.T) {
	text, err := os.ReadFile("../../doc/api.md")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := bytes.Cut(text, []byte("```json\n"))
	example, _, ok := bytes.Cut(after, []byte("```"))
	if !ok {
		t.Fatal("no example")
	}
	q, err := resume.ParseRequest(example)
	if err != nil {
		t.Fatal(err)
	}
	if q.Training == "" || q.Adapter == "" || q.Seed == nil || q.EffectiveConfig == nil || q.Precision == nil ||
		q.Data == nil || q.TotalSteps == nil || q.Order == nil || q.Optimizer == nil || q.Scheduler == nil || q.RNG == nil ||
		q.State == nil || q.AuxiliaryState == nil {
		t.Errorf("%+v", q)
	}
}
