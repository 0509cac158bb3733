package adapters

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/artifact"
)

// adapterWeights is the digest of the weights of an adapter that was pushed.
func adapterWeights(p artifact.Pushed, w *world) identity.Digest {
	ref := must(client.ParseReference(p.Reference))
	for _, f := range must(transfer.Resolve(w.t.Context(), w.c, ref)).Files {
		if f.Name == documents.AdapterWeightsFile {
			return f.Digest
		}
	}
	panic("no weights")
}

// TestRefused: what can't be told to be an adapter of the base, whole, is not loaded, and leaves nothing.
func TestRefused(t *testing.T) {
	w := newWorld(t)
	s := w.set()
	before := memory(t)
	otherBase := filepath.Join(w.dir, "other")
	files(t, otherBase, map[string][]byte{"model.safetensors": weights(201, 300_000), "config.json": []byte("{}")})
	pushed := w.push(otherBase, "team/other")
	ref := client.Reference{Host: w.host, Repo: "team/other", Digest: pushed.Digest}
	other := must(transfer.Resolve(t.Context(), w.c, ref)).Base
	for name, tt := range map[string]struct {
		adapter string
		want    error
		text    string
	}{
		"no such digest":           {identity.Sum(nil).String(), ErrUnknown, ""},
		"no such name":             {"nobody", ErrUnknown, `calls itself "nobody"`},
		"no such tag":              {w.host + "/team/sql:none", ErrUnknown, ""},
		"no such folder":           {filepath.Join(w.dir, "none"), ErrUnknown, ""},
		"no tag":                   {w.host + "/team/sql", ErrName, "neither a tag nor a digest"},
		"a bad digest":             {"sha256:12", ErrName, ""},
		"zeros":                    {identity.Digest{}.String(), ErrName, ""},
		"empty":                    {"", ErrName, ""},
		"a path from here":         {"./sql", ErrName, "absolute"},
		"no registry named":        {"team/sql:x", ErrName, "names no registry"},
		"long":                     {strings.Repeat("x", 2000), ErrName, ""},
		"a base":                   {w.host + "/team/base:v1", ErrRefused, "no adapter"},
		"of another base":          {w.sent("far", 1, &other), ErrOtherBase, other.Aggregate.String()},
		"of another base, on disk": {w.adapter("far", 1, 500, &other), ErrOtherBase, other.Aggregate.String()},
		"states none":              {w.sent("none", 2, nil), ErrOtherBase, "states no base"},
		"states none, on disk":     {w.adapter("none", 2, 500, nil), ErrOtherBase, "states no base"},
		"of several":               {w.several(), ErrSeveral, "team/b"},
		"statements disagree":      {w.disputed(other.Aggregate), ErrOtherBase, "disagree"},
		"a statement contradicts":  {w.contradicted(other.Aggregate), ErrOtherBase, other.Aggregate.String()},
		"other weights":            {w.changed(), ErrRefused, "safetensors_hash"},
		"no weights":               {w.lacking(documents.AdapterWeightsFile), ErrRefused, ""},
		"no configuration":         {w.lacking(documents.AdapterConfigFile), ErrRefused, ""},
		"no safetensors":           {w.garbage(), ErrRefused, ""},
		"a large configuration":    {w.large(), ErrRefused, "more than"},
		"nobody answers":           {"127.0.0.1:1/team/sql:v1", ErrRegistry, ""},
	} {
		a, _, err := s.Load(t.Context(), tt.adapter)
		if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
		if strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: several lines: %v", name, err)
		}
	}
	if s.Generation() != 1 || len(s.List()) != 0 || s.used != 0 || len(s.slots) != 0 || memory(t) != before ||
		w.opens.Load() != 0 {
		t.Errorf("generation %d, %d slots, %d bytes counted, %d bytes held, %d before, %d targets", s.Generation(),
			len(s.slots), s.used, memory(t), before, w.opens.Load())
	}
}

// sent is a reference to an adapter of a base in the registry.
func (w *world) sent(name string, seed byte, base *identity.Manifest) string {
	return w.send(w.adapter(name, seed, 500, base), "team/"+name, artifact.Base{}).Reference
}

// several has two adapters of one name.
func (w *world) several() string {
	w.send(w.adapter("twin", 1, 500, &w.base), "team/a", artifact.Base{})
	w.send(w.adapter("twin", 2, 500, &w.base), "team/b", artifact.Base{})
	return "twin"
}

// disputed has statements that name two bases for an adapter that names none.
func (w *world) disputed(other identity.Aggregate) string {
	p := w.send(w.adapter("disputed", 3, 500, nil), "team/disputed", artifact.Base{})
	w.bind("team/disputed", p.Digest, w.base.Aggregate, "a")
	w.bind("team/disputed", p.Digest, other, "b")
	return p.Digest.String()
}

// contradicted has a statement about an adapter, which names its base, that it is of another.
func (w *world) contradicted(other identity.Aggregate) string {
	dir := filepath.Join(w.dir, "contradicted")
	if err := testartifact.PEFT(dir, 7); err != nil {
		w.t.Fatal(err)
	}
	p := w.send(dir, "team/contradicted", artifact.Base{})
	w.bind("team/contradicted", p.Digest, other, "b")
	return p.Digest.String()
}

// changed is a folder whose weights are not those of its manifest.
func (w *world) changed() string {
	dir := w.adapter("changed", 4, 500, &w.base)
	files(w.t, dir, map[string][]byte{documents.AdapterWeightsFile: weights(5, 500)})
	return dir
}

// lacking is a folder without a file.
func (w *world) lacking(name string) string {
	dir := w.adapter("no-"+name, 6, 500, &w.base)
	if err := os.Remove(filepath.Join(dir, name)); err != nil {
		w.t.Fatal(err)
	}
	return dir
}

// garbage has weights that are none, under a manifest with their digest.
func (w *world) garbage() string {
	dir, text := filepath.Join(w.dir, "garbage"), []byte(strings.Repeat("no weights ", 100))
	config := testartifact.Config("x")
	m := documents.NewAdapterManifest("garbage", identity.Sum(text), identity.Sum(config), identity.Digest{}, w.base)
	files(w.t, dir, map[string][]byte{documents.AdapterWeightsFile: text, documents.AdapterConfigFile: config,
		documents.AdapterManifestFile: must(m.Document())})
	return dir
}

// large has a configuration that is longer than what is kept.
func (w *world) large() string {
	dir, text := filepath.Join(w.dir, "large"), weights(8, 500)
	config := testartifact.Config(strings.Repeat("x", MaxFile))
	m := documents.NewAdapterManifest("large", identity.Sum(text), identity.Sum(config), identity.Digest{}, w.base)
	files(w.t, dir, map[string][]byte{documents.AdapterWeightsFile: text, documents.AdapterConfigFile: config,
		documents.AdapterManifestFile: must(m.Document())})
	return dir
}

// TestDamaged: bytes that are others than the registry promised are not published, nor counted as a generation.
func TestDamaged(t *testing.T) {
	w := newWorld(t)
	s := w.set()
	before := memory(t)
	p := w.made("sql", 1, 50_000)
	d := adapterWeights(p, w)
	w.spoil.Store(&d)
	for range 3 {
		if _, _, err := s.Load(t.Context(), "sql"); !errors.Is(err, ErrRefused) || !errors.Is(err, gpuload.ErrMismatch) {
			t.Errorf("other bytes: %v", err)
		}
	}
	if s.Generation() != 1 || len(s.List()) != 0 || s.used != 0 || memory(t) != before {
		t.Errorf("generation %d, %d bytes counted, %d bytes held, %d before", s.Generation(), s.used, memory(t), before)
	}
	w.spoil.Store(nil)
	load(t, s, "sql")
	attached(t, s, p.Digest, data(1, 50_000))
}

// TestDevice: errors of the device are those of the device, and too little memory unloads what is not used.
func TestDevice(t *testing.T) {
	w := newWorld(t)
	w.made("a", 1, 500)
	w.made("b", 2, 500)
	small := false
	s := w.set(func(o *Options) {
		o.Target = func() (gpuload.Target, error) {
			if small {
				return scarce{new(hostmem.Target)}, nil
			}
			return new(hostmem.Target), nil
		}
	})
	load(t, s, "a")
	small = true
	if _, _, err := s.Load(t.Context(), "b"); !errors.Is(err, ErrNoRoom) || !errors.Is(err, gpuload.ErrMemory) {
		t.Errorf("no memory: %v", err)
	}
	if len(s.List()) != 0 || s.Generation() != 3 {
		t.Errorf("what nobody uses is still there: %+v, generation %d", s.List(), s.Generation())
	}
	broken := w.set(func(o *Options) {
		o.Target = func() (gpuload.Target, error) { return nil, errors.New("it fell off the bus") }
	})
	if _, _, err := broken.Load(t.Context(), "b"); !errors.Is(err, gpuload.ErrDevice) || errors.Is(err, ErrRegistry) {
		t.Errorf("no device: %v", err)
	}
	alone := w.set(func(o *Options) { o.Registry = "" })
	if _, _, err := alone.Load(t.Context(), "b"); !errors.Is(err, ErrName) {
		t.Errorf("no registry: %v", err)
	}
}

// scarce is a device with no memory left.
type scarce struct{ *hostmem.Target }

func (scarce) Devices(context.Context) ([]gpuload.Device, error) {
	return []gpuload.Device{{Name: "scarce", Backend: "host"}}, nil
}
