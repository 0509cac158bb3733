package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kiln-registry/kiln-registry/internal/chaos/rig"
)

// clients is how many users a registry has in a run.
const clients = 6

// killing is a run in which a registry is killed at random instants while its clients go on.
type killing struct {
	site  *rig.Site
	rng   *rand.Rand
	kills int       // how many
	until time.Time // when to stop although there were fewer

	check   *rig.Checker
	clients []*rig.Client
	killed  int
	early   int // of those, before the server was ready
}

func newKilling(s *rig.Site, seed uint64, kills int, limit time.Duration) *killing {
	r := &killing{site: s, rng: rand.New(rand.NewPCG(seed, 0)), kills: kills, until: time.Now().Add(limit)}
	for i := range clients {
		r.clients = append(r.clients, rig.NewClient(i+1, seed))
		r.clients[i].Board = r.clients[0].Board
	}
	r.check = rig.NewChecker(s, r.clients)
	return r
}

// fullEvery is after how many kills everything is compared again, and not only what is new.
const fullEvery = 50

// run kills the server until there were enough kills or the time is over, and looks at the store at last.
func (r *killing) run(ctx context.Context) error {
	for r.killed < r.kills && time.Now().Before(r.until) && ctx.Err() == nil {
		if err := r.cycle(ctx); err != nil {
			return err
		}
		if err := r.check.Err(); err != nil {
			return err
		}
	}
	v, err := r.site.Start()
	if err != nil {
		return err
	}
	defer v.Kill()
	if err := v.Ready(ctx); err != nil {
		return err
	}
	r.check.Check(v, true)
	r.check.Rebuild(ctx, v)
	return errors.Join(r.check.Err(), ctx.Err())
}

// cycle starts the server, compares, lets the clients work and kills it.
func (r *killing) cycle(ctx context.Context) error {
	v, err := r.site.Start()
	if err != nil {
		return err
	}
	defer v.Kill()
	early := time.AfterFunc(time.Hour, v.Kill)
	if r.rng.IntN(10) == 0 {
		early.Reset(time.Duration(r.rng.IntN(60)) * time.Millisecond)
	}
	err = v.Ready(ctx)
	if !early.Stop() {
		<-v.Ended
		r.killed++
		r.early++
		return nil
	}
	if err != nil {
		return err
	}
	r.check.Check(v, r.killed%fullEvery == fullEvery-1)
	r.work(v, time.Duration(r.rng.IntN(150))*time.Millisecond)
	r.killed++
	return nil
}

// work lets all clients work and kills the server under them after a while.
func (r *killing) work(v *rig.Server, after time.Duration) {
	var killed atomic.Bool
	var wg sync.WaitGroup
	w := v.Wire()
	defer w.Close()
	for _, c := range r.clients {
		c.Wire = w
		wg.Go(func() {
			for !killed.Load() {
				err := c.Step()
				if err == nil {
					continue
				}
				if !errors.Is(err, rig.ErrNoAnswer) || !killed.Load() {
					r.check.Lose("client %d: %v", c.ID, err)
				}
				return
			}
		})
	}
	timer := time.AfterFunc(after, func() {
		killed.Store(true)
		v.Kill()
	})
	wg.Wait()
	timer.Stop()
	v.Kill()
}

// acked is how many changes were acknowledged.
func (r *killing) acked() (sum int) {
	for _, c := range r.clients {
		sum += c.Acked
	}
	return sum
}

func (r *killing) String() string {
	return fmt.Sprintf("kills %d, during a start %d, acknowledged %d, to be sent again %d, lost %d", r.killed, r.early,
		r.acked(), r.check.Again, len(r.check.Lost))
}
