package tests3

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/kiln-registry/kiln-registry/internal/testenv"
)

// versitygw starts one process for each endpoint, all on one folder of buckets.
func versitygw(t testing.TB, s *Server, endpoints int) error {
	path, err := tool(testenv.Root(t), "versitygw", "make test")
	if err != nil {
		return err
	}
	s.root = filepath.Join(s.dir, "buckets")
	if err := os.Mkdir(s.root, 0o700); err != nil {
		return err
	}
	env := []string{"ROOT_ACCESS_KEY=" + s.AccessKey, "ROOT_SECRET_KEY=" + s.SecretKey}
	for i := range endpoints {
		log := filepath.Join(s.dir, fmt.Sprintf("log.%d", i))
		err := s.listen(1, func(port []string) (*process, error) {
			return startProcess(log, env, path,
				"--port", "127.0.0.1:"+port[0], "--region", s.Region, "--keep-alive", "posix", s.root)
		})
		if err != nil {
			return err
		}
	}
	return nil
}
