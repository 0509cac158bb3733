package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/internal/chaos/rig"
)

// rule says which durable changes of a server go wrong, and how: see the build tag chaos in cmd/kiln-registry.
type rule struct {
	lines string
	code  api.Code // what clients are told
}

// rules are tried one after another on one store.
var rules = []rule{
	{"full||", api.CodeStoreFull},
	{"full|write|uploads", api.CodeStoreFull},
	{"full|write|refs.log", api.CodeStoreFull},
	{"full|create|uploads", api.CodeStoreFull},
	{"full|index commit|", api.CodeStoreFull},
	{"short|write|refs.log", api.CodeInternal},
	{"short|write|.data", api.CodeInternal},
	{"short|write|.state", api.CodeInternal},
	{"short|write|refs.log\nlost|truncate|refs.log", api.CodeInternal},
	{"lost|sync|refs.log", api.CodeInternal},
	{"kept|sync|refs.log", api.CodeInternal},
	{"lost|sync|.data", api.CodeInternal},
	{"kept|sync|.data", api.CodeInternal},
	{"kept|write|.data", api.CodeInternal},
	{"lost|sync|.state", api.CodeInternal},
	{"lost|rename|blobs", api.CodeInternal},
	{"kept|rename|blobs", api.CodeInternal},
	{"lost|sync folder|blobs", api.CodeInternal},
	{"lost|sync folder|uploads", api.CodeInternal},
	{"lost|remove|uploads", api.CodeInternal},
	{"lost|index commit|", api.CodeInternal},
	{"kept|index commit|", api.CodeInternal},
	{"lost||", api.CodeInternal},
}

// breaking is a run in which changes of a server fail while a client goes on.
type breaking struct {
	site    *rig.Site
	rules   []rule
	c       *rig.Client
	k       *rig.Checker
	v       *rig.Server
	refused map[api.Code]int
}

func newBreaking(s *rig.Site, seed uint64) *breaking {
	c := rig.NewClient(1, seed)
	return &breaking{site: s, rules: rules, c: c, k: rig.NewChecker(s, []*rig.Client{c}), refused: map[api.Code]int{}}
}

// start starts the server, which looks for its rules in a file.
func (b *breaking) start(ctx context.Context) (err error) {
	if b.v, err = b.site.Start("CHAOS_FAULTS=" + b.file()); err != nil {
		return err
	}
	if err := b.v.Ready(ctx); err != nil {
		return err
	}
	b.c.Wire = b.v.Wire()
	return nil
}

func (b *breaking) file() string { return filepath.Join(b.site.Dir, "faults") }

// restart kills the server and compares what the next one shows.
func (b *breaking) restart(ctx context.Context) error {
	b.v.Kill()
	if err := b.start(ctx); err != nil {
		return err
	}
	b.k.Check(b.v, true)
	return b.k.Err()
}

// steps has the client do some things. While changes fail it may be refused, but never left without an answer.
func (b *breaking) steps(n int, faulty bool) error {
	b.c.Faulty = faulty
	clear(b.c.Codes)
	for i := 0; i < n || faulty && len(b.c.Codes) == 0 && i < maxSteps; i++ {
		if err := b.c.Step(); err != nil && !errors.Is(err, rig.ErrRefused) {
			return err
		}
	}
	for code, n := range b.c.Codes {
		b.refused[code] += n
	}
	return nil
}

// How many steps a client does: with changes that fail until it was refused once, as most rules are about some of them.
const (
	healthySteps = 25
	faultySteps  = 40
	maxSteps     = 1000
)

// one lets changes fail by a rule and then no more: clients are told, what is there is still served, and the server
// recovers by itself.
func (b *breaking) one(ctx context.Context, r rule) error {
	if err := os.WriteFile(b.file(), []byte(r.lines+"\n"), 0o600); err != nil {
		return err
	}
	if err := b.steps(faultySteps, true); err != nil {
		return err
	}
	if err := b.told(r); err != nil {
		return err
	}
	if err := b.serves(); err != nil {
		return err
	}
	if err := os.Remove(b.file()); err != nil {
		return err
	}
	if err := b.steps(healthySteps, false); err != nil {
		return fmt.Errorf("afterwards: %w", err)
	}
	return b.restart(ctx)
}

// told checks that clients learned what was the matter, and nothing else.
func (b *breaking) told(r rule) error {
	if len(b.c.Codes) == 0 {
		return errors.New("nobody noticed")
	}
	for code := range b.c.Codes {
		if code != r.code {
			return fmt.Errorf("clients were told %v, want %s alone: %s", b.c.Codes, r.code, b.c.Refusal)
		}
	}
	return nil
}

// serves checks that what was acknowledged is served while changes fail.
func (b *breaking) serves() error {
	for _, m := range b.c.Bodies() {
		if err := b.c.Pull(m, m.Digest.String()); err != nil {
			return fmt.Errorf("while changes fail: %w", err)
		}
	}
	return nil
}

// overtaken: changes that the store keeps and the index does not take are refused, and then the client asks for what is
// there already. That is acknowledged, and must hold also when the index hears of the refused ones at the next start.
func (b *breaking) overtaken(ctx context.Context) error {
	c := b.c
	m, err := c.Base("team/model", 1, "v1")
	if err != nil {
		return err
	}
	n, err := c.Base("team/model", 1)
	if err != nil {
		return err
	}
	if err := os.WriteFile(b.file(), []byte("lost|index commit|\n"), 0o600); err != nil {
		return err
	}
	c.Faulty = true
	for _, err := range []error{c.PutManifest(n, false, "v1"), c.DeleteManifest(m)} {
		if !errors.Is(err, rig.ErrRefused) {
			return fmt.Errorf("the index can't be written: %w", err)
		}
	}
	c.Faulty = false
	if err := os.Remove(b.file()); err != nil {
		return err
	}
	if err := c.PutManifest(m, false, "v1"); err != nil {
		return err
	}
	return b.restart(ctx)
}

func (c chaos) faults(ctx context.Context) error {
	return c.at("", func(s *rig.Site) error {
		b := newBreaking(s, c.seed)
		if c.some > 0 {
			at := int(c.seed % uint64(len(rules)))
			b.rules = slices.Concat(rules[at:], rules[:at])[:c.some]
		}
		err := b.all(ctx)
		fmt.Fprintf(c.out, "faults: rules %d, refused %s, acknowledged %d, lost %d\n", len(b.rules), told(b.refused),
			b.c.Acked, len(b.k.Lost))
		return err
	})
}

func told(codes map[api.Code]int) string {
	var text []string
	for _, code := range slices.Sorted(maps.Keys(codes)) {
		text = append(text, fmt.Sprintf("%d times %s", codes[code], code))
	}
	return strings.Join(text, " and ")
}

func (b *breaking) all(ctx context.Context) error {
	if err := b.start(ctx); err != nil {
		return err
	}
	defer func() { b.v.Kill() }()
	if err := b.steps(healthySteps, false); err != nil {
		return err
	}
	for _, r := range b.rules {
		if err := b.one(ctx, r); err != nil {
			return fmt.Errorf("rule %q: %w\n%s", r.lines, err, b.v.Log)
		}
	}
	if err := b.overtaken(ctx); err != nil {
		return err
	}
	b.k.Rebuild(ctx, b.v)
	return errors.Join(b.k.Err(), ctx.Err())
}
