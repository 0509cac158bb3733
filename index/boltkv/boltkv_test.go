package boltkv

import (
	"os"
	"testing"

	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/kvtest"
)

func engine() kvtest.Engine {
	return kvtest.Engine{
		Open: func(place string) (index.KV, error) {
			kv, err := Open(place, Options{Timeout: 1})
			if err != nil {
				return nil, err
			}
			return kv, nil
		},
		Copy: func(from, to string) error {
			b, err := os.ReadFile(from)
			if err != nil {
				return err
			}
			return os.WriteFile(to, b, 0o600)
		},
	}
}

func TestConformance(t *testing.T) { kvtest.Run(t, engine()) }
