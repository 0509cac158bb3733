package pgkv

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/kvtest"
	"github.com/kiln-registry/kiln-registry/internal/testpg"
)

func TestMain(m *testing.M) { testpg.Main(m) }

// places are schemas of one database.
type places struct {
	url   string
	mu    sync.Mutex
	names map[string]string
}

func (p *places) schema(place string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.names[place] == "" {
		p.names[place] = "kiln_" + strings.ToLower(rand.Text()[:12])
	}
	return p.names[place]
}

func (p *places) open(place string) (index.KV, error) {
	kv, err := Open(context.Background(), p.url, Options{Schema: p.schema(place), Conns: 8})
	if err != nil {
		return nil, err
	}
	return kv, nil
}

func TestConformance(t *testing.T) {
	p := &places{url: testpg.Shared(t).Database(t), names: map[string]string{}}
	kvtest.Run(t, kvtest.Engine{
		Shared: true,
		Open:   p.open,
		Copy: func(from, to string) error {
			kv, err := p.open(to)
			if err != nil {
				return err
			}
			c, err := pgx.Connect(context.Background(), p.url)
			if err != nil {
				return err
			}
			_, err = c.Exec(context.Background(), "insert into "+p.schema(to)+".kv select * from "+p.schema(from)+".kv")
			return errors.Join(err, c.Close(context.Background()), kv.Close())
		},
	})
}
