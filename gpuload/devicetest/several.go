package devicetest

import (
	"bytes"
	"slices"
	"sync"
	"testing"

	"github.com/kiln-registry/kiln-registry/gpuload"
)

// several loads onto all devices of a target that has more than one: each byte is read and hashed once, each device has
// what the placement gives it, and the handles say so.
func several(t *testing.T, s Subject) {
	m := newModel(t)
	for _, placed := range []struct {
		name    string
		by      gpuload.Placement
		devices func(all int) int // that have a shard
	}{
		{"spread", gpuload.Spread, func(int) int { return 1 }},
		{"replicate", gpuload.Replicate, func(all int) int { return all }},
	} {
		t.Run(placed.name, func(t *testing.T) {
			target := s.New(t)
			before := must(target.Devices(t.Context()))
			if len(before) < 2 {
				mustDo(t, target.Free())
				return
			}
			o := options()
			o.Placement = placed.by
			r := once(t, m, target, o)
			defer closed(t, r)
			handles, release, err := r.Lease()
			mustDo(t, err)
			defer release()
			after := must(target.Devices(t.Context()))
			spent := make([]int64, len(before))
			for i := range before {
				spent[i] = before[i].Free - after[i].Free
			}
			each := placed.devices(len(before))
			if len(handles) != each*len(m.files) {
				t.Fatalf("%d handles for %d shards, each on %d devices", len(handles), len(m.files), each)
			}
			for i, h := range handles {
				if h.Shard != i/each || i%each > 0 && h.Device <= handles[i-1].Device {
					t.Errorf("handle %d: shard %d on device %d", i, h.Shard, h.Device)
				}
				if got := s.Read(t, h); !bytes.Equal(got, m.data(m.names()[h.Shard])) {
					t.Errorf("handle %d: other bytes than those of shard %d", i, h.Shard)
				}
				d := slices.IndexFunc(before, func(d gpuload.Device) bool { return d.Index == h.Device })
				spent[d] -= (h.Size + before[d].Granularity - 1) / before[d].Granularity * before[d].Granularity
			}
			for i, n := range spent {
				if n != 0 || before[i].Free == after[i].Free {
					t.Errorf("device %d: %d bytes more than its handles have were taken", before[i].Index, n)
				}
			}
		})
	}
}

// once loads a model and checks that each byte was read and hashed once.
func once(t *testing.T, m *model, target gpuload.Target, o gpuload.Options) *gpuload.Resident {
	t.Helper()
	var mu sync.Mutex
	read, hashed := map[string]int64{}, map[string]int64{}
	o.Progress = func(shard string, done int64) {
		mu.Lock()
		defer mu.Unlock()
		if done < hashed[shard] {
			t.Errorf("%s: hashed to %d, then to %d", shard, hashed[shard], done)
		}
		hashed[shard] = done
	}
	src := counting(m.source(t), read)
	r, err := gpuload.Load(t.Context(), m.plan(t, src, m.want(t)), src, target, o)
	mustDo(t, err)
	for name, b := range m.files {
		if n := int64(len(b)); read[name] != n || hashed[name] != n {
			t.Errorf("%s: %d bytes read and %d hashed for %d", name, read[name], hashed[name], n)
		}
	}
	return r
}
