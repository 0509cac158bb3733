package memkv

import (
	"sync"
	"testing"

	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/kvtest"
)

func TestConformance(t *testing.T) {
	var mu sync.Mutex
	disks := map[string]*Disk{}
	disk := func(place string) *Disk {
		mu.Lock()
		defer mu.Unlock()
		if disks[place] == nil {
			disks[place] = new(Disk)
		}
		return disks[place]
	}
	kvtest.Run(t, kvtest.Engine{
		Open: func(place string) (index.KV, error) {
			kv, err := disk(place).Open(1)
			if err != nil {
				return nil, err
			}
			return kv, nil
		},
		Copy: func(from, to string) error {
			c := disk(from).Copy()
			mu.Lock()
			defer mu.Unlock()
			disks[to] = c
			return nil
		},
	})
}
