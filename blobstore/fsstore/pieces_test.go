package fsstore

import (
	"math/rand/v2"
	"sync"
	"testing"
)

// TestPieces: nobody has a piece that another one has, and no more are kept than idlePieces.
func TestPieces(t *testing.T) {
	p := pieces{mapped: map[*piece][]byte{}}
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 1))
			var mine []*piece
			for range 500 {
				if len(mine) > 0 && r.IntN(2) == 0 {
					b := mine[len(mine)-1]
					if b[0] != byte(g) || b[pieceSize-1] != byte(g) {
						t.Errorf("goroutine %d has a piece of %d and %d", g, b[0], b[pieceSize-1])
					}
					mine = mine[:len(mine)-1]
					p.put(b)
					continue
				}
				b := p.get()
				b[0], b[pieceSize-1] = byte(g), byte(g)
				mine = append(mine, b)
			}
			for _, b := range mine {
				p.put(b)
			}
		})
	}
	wg.Wait()
	if len(p.idle) != idlePieces || len(p.mapped) != idlePieces {
		t.Errorf("%d are kept, %d are mapped", len(p.idle), len(p.mapped))
	}
	p.drop()
	if len(p.idle) != 0 || len(p.mapped) != 0 {
		t.Errorf("%d are kept, %d are mapped after all were dropped", len(p.idle), len(p.mapped))
	}
	p.put(p.get())
}
