package main

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

const (
	chunks  = 16 // PATCHes of one blob
	pushers = 64 // of manifests, at once
	fillers = 16
	few     = 1000 // manifests of a repository
)

// contender is a registry that takes part: this one first, then its peers.
type contender struct {
	name  string
	start func(context.Context) (*rig.Server, error)
}

// contenders are this registry and its peers: registries of the distribution project, which sync to disk before they
// answer, as this one does. Without a peer there is nobody.
func (b *bench) contenders(ctx context.Context) ([]contender, error) {
	if len(b.peers) == 0 {
		return nil, nil
	}
	all := []contender{{"kiln-registry", b.startRegistry}}
	for _, bin := range b.peers {
		version, err := rig.VersionOf(ctx, bin)
		if err != nil {
			return nil, err
		}
		all = append(all, contender{filepath.Base(bin) + " " + version, func(ctx context.Context) (*rig.Server, error) {
			return rig.Distribution(ctx, bin, b.dir)
		}})
	}
	return all, nil
}

// inTurn runs work for every contender; which one goes first changes from round to round.
func inTurn(round, contenders int, work func(i int) error) error {
	for turn := range contenders {
		if err := work((round + turn) % contenders); err != nil {
			return err
		}
	}
	return nil
}

// series holds what was measured: one slice of rounds for each contender.
type series [][]float64

func newSeries(contenders int) series { return make(series, contenders) }

func (s series) add(contender int, v float64) { s[contender] = append(s[contender], v) }

// against is a row of ratios of this registry to each peer, taken inside a round: the median of the rounds for the peer
// against which it is the least favourable. better says which of two ratios is the more favourable one.
func (s series) against(all []contender, what, format string, better func(a, b float64) bool) row {
	r := row{what: what}
	texts := []string{}
	for i, c := range all {
		of := slices.Clone(s[i])
		middle, _ := median(of)
		texts = append(texts, fmt.Sprintf("%s "+format, c.name, middle))
		if i == 0 {
			continue
		}
		ratios := make([]float64, len(s[i]))
		for round := range ratios {
			ratios[round] = s[0][round] / s[i][round]
		}
		ratio, spread := median(ratios)
		if i == 1 || better(r.value, ratio) {
			r.value, r.notes = ratio, spread
		}
	}
	r.notes += "; " + strings.Join(texts, ", ")
	return r
}

func less(a, b float64) bool { return a < b }
func more(a, b float64) bool { return a > b }

// largePushes sends large blobs to a new server of each contender in every round, in one PUT and in chunks.
func (b *bench) largePushes(ctx context.Context) ([]row, error) {
	all, err := b.contenders(ctx)
	if err != nil || all == nil {
		return nil, err
	}
	whole, chunked, final, memory := newSeries(len(all)), newSeries(len(all)), newSeries(len(all)), newSeries(len(all))
	for round := range b.rounds {
		err := inTurn(round, len(all), func(i int) error {
			p, err := b.pushLarge(ctx, all[i], uint64(round))
			whole.add(i, p.whole)
			chunked.add(i, p.chunked)
			final.add(i, p.final)
			memory.add(i, p.memory)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	last := final.against(all, "", "%.1f ms", less)
	last.what, last.value, last.unit = fmt.Sprintf("the last PUT after %d PATCHes", chunks), middle(final[0]), " ms"
	return []row{
		whole.against(all, "push by POST and PUT: server CPU / best peer's", "%.2f s", less).atMost(0.85),
		chunked.against(all, fmt.Sprintf("push by %d PATCHes: server CPU / best peer's", chunks), "%.2f s", less).atMost(0.85),
		last.atMost(20),
		memory.against(all, "peak RSS of both pushes / best peer's", "%.1f MiB", less).atMost(1),
	}, nil
}

// middle is the median of vs.
func middle(vs []float64) float64 {
	m, _ := median(slices.Clone(vs))
	return m
}

type largePush struct{ whole, chunked, final, memory float64 }

// pushLarge measures one contender: processor seconds, the last PUT in milliseconds, memory in MiB.
func (b *bench) pushLarge(ctx context.Context, c contender, number uint64) (p largePush, err error) {
	s, err := c.start(ctx)
	if err != nil {
		return p, err
	}
	defer s.Stop()
	if err := b.pushParts(ctx, s, "bench/large"); err != nil { // the first request costs a little more
		return p, err
	}
	one, two := 2*number, 2*number+1
	d, e := rig.DigestOf(one, b.size), rig.DigestOf(two, b.size)
	p.whole, err = s.During(func() error {
		return b.client.PushWhole(ctx, s.URL, "bench/large", d, rig.Stream(one, b.size), b.size)
	})
	if err != nil {
		return p, err
	}
	p.chunked, err = s.During(func() error {
		took, err := b.client.PushChunks(ctx, s.URL, "bench/large", e, rig.Stream(two, b.size), b.size, chunks)
		p.final = took.Seconds() * 1e3
		return err
	})
	if err != nil {
		return p, err
	}
	p.memory, err = s.PeakRSS()
	return p, err
}

// pushParts puts the blobs of the manifests into a repository.
func (b *bench) pushParts(ctx context.Context, s *rig.Server, repo string) error {
	for _, blob := range [][]byte{emptyConfig, tinyShard()} {
		err := b.client.PushWhole(ctx, s.URL, repo, identity.Sum(blob), bytes.NewReader(blob), int64(len(blob)))
		if err != nil {
			return err
		}
	}
	return nil
}

const manifests = "bench/manifests"

// filling is a server and how many manifests its repository holds.
type filling struct {
	*rig.Server
	held int
}

// manifestRates measures how many manifests a second go into a repository that holds a thousand, and into one that holds
// b.pushes.
func (b *bench) manifestRates(ctx context.Context) ([]row, error) {
	all, err := b.contenders(ctx)
	if err != nil || all == nil {
		return nil, err
	}
	var repositories []*filling // with few manifests, one for each contender, and then with many
	for _, held := range []int{few, b.pushes} {
		for _, c := range all {
			f, err := b.stock(ctx, c, held)
			if err != nil {
				return nil, err
			}
			defer f.Stop()
			repositories = append(repositories, f)
		}
	}
	one, err := b.rates(ctx, repositories, 1, window)
	if err != nil {
		return nil, err
	}
	n := len(all)
	together, err := b.rates(ctx, repositories[n:], pushers, 5*window)
	if err != nil {
		return nil, err
	}
	onTop := func(n int) string { return fmt.Sprintf("manifests a second on top of %d: ", n) }
	crowd := slices.Clone(one.rate[n:])
	crowd[0] = together.rate[0]
	many := fmt.Sprintf("%d pushers", pushers)
	return []row{
		one.rate[:n].against(all, onTop(few)+"one pusher / best peer's", "%.0f", more).atLeast(1),
		one.rate[n:].against(all, onTop(b.pushes)+"one pusher / best peer's", "%.0f", more).atLeast(1),
		series{one.rate[n], one.rate[0]}.against([]contender{{name: fmt.Sprint(b.pushes)}, {name: fmt.Sprint(few)}},
			fmt.Sprintf("one pusher on top of %d / on top of %d", b.pushes, few), "%.0f", more).atLeast(1 / 1.15),
		crowd.against(all, onTop(b.pushes)+many+" / best peer's one", "%.0f", more).atLeast(5),
		together.rate.against(all, onTop(b.pushes)+many+" / best peer's "+many, "%.0f", more).atLeast(5),
		one.cpu[n:].against(all, "server CPU a manifest: one pusher / best peer's", "%.2f ms", less),
		together.cpu.against(all, "server CPU a manifest: "+many+" / best peer's", "%.2f ms", less),
	}, nil
}

// pace is how many manifests a second went in, and what one cost in milliseconds of the server's processor time.
type pace struct{ rate, cpu series }

// stock starts a contender and fills its repository.
func (b *bench) stock(ctx context.Context, c contender, held int) (*filling, error) {
	s, err := c.start(ctx)
	if err != nil {
		return nil, err
	}
	f := &filling{s, 0}
	if err = b.pushParts(ctx, s, manifests); err == nil {
		_, err = b.pushMany(ctx, f, fillers, held)
	}
	if err != nil {
		s.Stop()
		return nil, err
	}
	return f, nil
}

// rates measures, in turns, how many more manifests a second so many pushers put into each repository.
func (b *bench) rates(ctx context.Context, repositories []*filling, pushers, count int) (pace, error) {
	p := pace{newSeries(len(repositories)), newSeries(len(repositories))}
	for round := range 2 * b.rounds {
		err := inTurn(round, len(repositories), func(i int) error {
			var took time.Duration
			cpu, err := repositories[i].During(func() (err error) {
				took, err = b.pushMany(ctx, repositories[i], pushers, count)
				return err
			})
			p.rate.add(i, float64(count)/took.Seconds())
			p.cpu.add(i, cpu*1e3/float64(count))
			return err
		})
		if err != nil {
			return p, err
		}
	}
	return p, nil
}

// pushMany pushes the next count manifests, so many at a time, and returns how long it took.
func (b *bench) pushMany(ctx context.Context, s *filling, pushers, count int) (time.Duration, error) {
	bodies := make([][]byte, max(0, count))
	for i := range bodies {
		bodies[i] = manifest(s.held + i)
	}
	var group errgroup.Group
	group.SetLimit(pushers)
	began := time.Now()
	for i, body := range bodies {
		tag := fmt.Sprint("v", s.held+i)
		group.Go(func() error { return b.client.PushManifest(ctx, s.URL, manifests, tag, body) })
	}
	err := group.Wait()
	s.held += len(bodies)
	return time.Since(began), err
}
