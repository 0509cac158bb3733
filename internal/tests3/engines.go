package tests3

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/kiln-registry/kiln-registry/internal/testenv"
)

// versitygw starts one process for each endpoint, all on one folder of buckets.
func versitygw(t testing.TB, s *Server, endpoints int, domain string) error {
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
			return startProcess(log, env, path, "--port", "127.0.0.1:"+port[0], "--region", s.Region, "--keep-alive",
				"--virtual-domain", domain, "posix", s.root)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// weed starts SeaweedFS: one process with all its parts, and one more S3 gateway for every further endpoint.
func weed(t testing.TB, s *Server, endpoints int, domain string) error {
	path, err := tool(testenv.Root(t), "weed", "make test S3=weed")
	if err != nil {
		return err
	}
	config, err := s.weedConfig()
	if err != nil {
		return err
	}
	// It logs to stderr only, keeps its sockets in our folder and tells nobody that it runs.
	common := []string{"-logtostderr=true", "-config_dir=" + s.dir}
	gateway := []string{"config=" + config, "autoCreateBucket=false", "port.iceberg=0", "port.lance=0"}
	gateway = append(gateway, "domainName="+domain)
	var filer string
	for i := range endpoints {
		log := filepath.Join(s.dir, fmt.Sprintf("log.%d", i))
		err := s.listen(8, func(p []string) (*process, error) {
			if i > 0 {
				args := append(common, "s3", "-ip.bind=127.0.0.1", "-port="+p[0], "-port.grpc="+p[1], "-filer="+filer,
					"-localSocket="+filepath.Join(s.dir, "s3-"+p[0]+".sock"))
				return startProcess(log, nil, path, append(args, flags("", gateway)...)...)
			}
			filer = "127.0.0.1:" + p[2] + "." + p[3]
			for i, part := range []string{"s3", "filer", "master", "volume"} {
				s.strays = append(s.strays, fmt.Sprintf("/tmp/seaweedfs-%s-grpc-%s.sock", part, p[2*i+1]))
			}
			args := append(common, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-dir="+s.dir,
				"-s3", "-s3.port="+p[0], "-s3.port.grpc="+p[1], "-s3.localSocket="+filepath.Join(s.dir, "s3.sock"),
				"-filer", "-filer.port="+p[2], "-filer.port.grpc="+p[3], "-filer.localSocket="+filepath.Join(s.dir, "filer.sock"),
				"-master.port="+p[4], "-master.port.grpc="+p[5], "-master.volumeSizeLimitMB=256", "-master.telemetry=false",
				"-volume.port="+p[6], "-volume.port.grpc="+p[7], "-volume.max=0",
				"-volume.preStopSeconds=0")
			return startProcess(log, nil, path, append(args, flags("s3.", gateway)...)...)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// flags puts a prefix before every NAME=VALUE.
func flags(prefix string, list []string) (out []string) {
	for _, f := range list {
		out = append(out, "-"+prefix+f)
	}
	return out
}

// weedConfig writes the credentials, and a rule that a bucket takes one volume at a time and not seven.
func (s *Server) weedConfig() (string, error) {
	growth := "[master.volume_growth]\ncopy_1 = 1\n"
	if err := os.WriteFile(filepath.Join(s.dir, "master.toml"), []byte(growth), 0o600); err != nil {
		return "", err
	}
	type object = map[string]any
	config, err := json.Marshal(object{"identities": []object{{
		"name":        "test",
		"credentials": []object{{"accessKey": s.AccessKey, "secretKey": s.SecretKey}},
		"actions":     []string{"Admin", "Read", "Write", "List", "Tagging"},
	}}})
	if err != nil {
		return "", err
	}
	path := filepath.Join(s.dir, "s3.json")
	return path, os.WriteFile(path, config, 0o600)
}
