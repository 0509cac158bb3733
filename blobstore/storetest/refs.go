package storetest

import (
	"fmt"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
)

// someRefs returns refs with every field in use, and refs with few.
func someRefs() []blobstore.Ref {
	manifest := random(20, 3000)
	d := identity.Sum(manifest)
	at := time.Date(2026, 2, 3, 4, 5, 6, 789, time.UTC)
	return []blobstore.Ref{
		{Repo: "team/model", Name: d.String(), Seq: 1, Digest: d, MediaType: "application/x", Manifest: manifest, Time: at},
		{Repo: "team/model", Name: "v1", Seq: 2, Digest: d, MediaType: "application/x", Time: at, Finding: "\x00é"},
		{Repo: "team/model", Name: "v1", Seq: 1<<64 - 1, Deleted: true, Time: at.Add(time.Hour)},
		{},
		{Repo: "other", Name: "é\x00\n", Manifest: []byte{0}, Time: time.Date(1, 1, 1, 0, 0, 0, 1, time.UTC)},
		{Repo: "other", Name: "big", Manifest: random(21, 4<<20)},
	}
}

func (e *env) sameRefs(what string, got, want []blobstore.Ref) {
	e.Helper()
	same := slices.EqualFunc(got, want, func(a, b blobstore.Ref) bool {
		ok := a.Time.Equal(b.Time)
		a.Time, b.Time = time.Time{}, time.Time{}
		return ok && reflect.DeepEqual(a, b)
	})
	if !same {
		e.Fatalf("%s: %d refs, want %d; or they differ", what, len(got), len(want))
	}
}

func testRefs(e *env) {
	all := someRefs()
	var after []blobstore.Position
	for i, r := range all {
		r.Manifest = slices.Clone(r.Manifest)
		p, err := e.st.Put(e.ctx, r)
		e.must(err)
		clear(r.Manifest) // the store must not care
		after = append(after, p)
		if i%2 == 1 {
			e.reopen(i%4 == 1)
		}
	}
	got, positions := e.since(0)
	e.sameRefs("all", got, all)
	for i := range all {
		if positions[i] < after[i] {
			e.Errorf("position %d is %d, Put said %d", i, positions[i], after[i])
		}
		rest, _ := e.since(positions[i])
		e.sameRefs("after a yielded position", rest, all[i+1:])
		rest, _ = e.since(after[i])
		e.sameRefs("after what Put returned", rest, all[i+1:])
	}
	for range e.st.Since(e.ctx, 0) {
		break
	}
	var failed error
	for _, err := range e.st.Since(e.ctx, positions[len(all)-1]+1<<30) {
		failed = err
	}
	e.want("refs after a position that never was", failed, blobstore.ErrRefsDamaged)
}

// testRefsTogether: a group comes back whole, and reading can stop and go on inside it.
func testRefsTogether(e *env) {
	all := someRefs()
	_, err := e.st.Put(e.ctx, all[:1]...)
	e.must(err)
	p, err := e.st.Put(e.ctx, all[1:5]...)
	e.must(err)
	_, err = e.st.Put(e.ctx, all[5:]...)
	e.must(err)
	e.reopen(true)
	got, positions := e.since(0)
	e.sameRefs("all", got, all)
	for i := range all {
		rest, _ := e.since(positions[i])
		e.sameRefs(fmt.Sprintf("after ref %d", i), rest, all[i+1:])
	}
	rest, _ := e.since(p)
	e.sameRefs("after the group", rest, all[5:])
	if _, err := e.st.Put(e.ctx); err != nil {
		e.Errorf("put of nothing: %v", err)
	}
}

// testRefsGroup: concurrent Puts are all kept, each Put's own refs stay together and in order.
func testRefsGroup(e *env) {
	const writers, rounds = 16, 12
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			var last blobstore.Position
			for i := range uint64(rounds) {
				repo := fmt.Sprintf("w%d", w)
				p, err := e.st.Put(e.ctx, blobstore.Ref{Repo: repo, Seq: 2 * i}, blobstore.Ref{Repo: repo, Seq: 2*i + 1})
				if err != nil || p <= last {
					e.Errorf("put: position %d after %d, %v", p, last, err)
				}
				last = p
			}
		})
	}
	wg.Wait()
	e.reopen(true)
	got, _ := e.since(0)
	next := map[string]uint64{}
	for i, r := range got {
		if r.Seq != next[r.Repo] {
			e.Fatalf("%s: seq %d, want %d", r.Repo, r.Seq, next[r.Repo])
		}
		if next[r.Repo]++; r.Seq%2 == 1 && got[i-1].Repo != r.Repo {
			e.Fatalf("%s: the refs of one Put are apart", r.Repo)
		}
	}
	if len(got) != writers*rounds*2 {
		e.Errorf("%d refs, want %d", len(got), writers*rounds*2)
	}
}
