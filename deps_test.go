package kiln

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/kiln-registry/kiln-registry"

// imports is the import table of the design: what each package may import of ours, and which other modules. Tests are
// free. A new package starts with a row here and a reason in doc/decisions.
var imports = map[string]string{
	"identity":                 "internal/strictjson; github.com/minio/sha256-simd",
	"identity/documents":       "identity internal/strictjson",
	"identity/lanes":           "identity identity/lanes/block",
	"identity/lanes/block":     "; github.com/klauspost/cpuid/v2",
	"identity/resume":          "identity identity/documents internal/strictjson",
	"identity/safetensors":     "identity internal/strictjson",
	"internal/strictjson":      "",
	"internal/durable":         "; golang.org/x/sys",
	"api":                      "identity; github.com/opencontainers/image-spec github.com/opencontainers/go-digest",
	"api/answer":               "api identity/resume",
	"api/client":               "api identity internal/strictjson; oras.land/oras-go/v2",
	"blobstore":                "identity identity/lanes",
	"blobstore/fsstore":        "blobstore identity identity/lanes internal/durable; golang.org/x/sys",
	"blobstore/s3store":        "blobstore blobstore/s3store/bucket identity identity/lanes",
	"blobstore/s3store/bucket": "blobstore identity; github.com/minio/minio-go/v7",
	"blobstore/memstore":       "blobstore identity identity/lanes",
	"blobstore/storetest":      "blobstore identity identity/lanes",
	"index":                    "api identity index/extsort",
	"index/extsort":            "",
	"index/boltkv":             "index; go.etcd.io/bbolt",
	"index/memkv":              "index",
	"index/pgkv":               "index; github.com/jackc/pgx/v5",
	"index/kvtest":             "index",
	"registry/access":          "api identity; go.yaml.in/yaml/v3",
	"registry/classify":        "api identity identity/documents identity/safetensors internal/strictjson; github.com/opencontainers/image-spec",
	"registry/claims":          "api identity identity/documents index registry/access registry/classify",
	"registry/answers":         "api api/answer blobstore identity identity/documents identity/resume index internal/strictjson registry/access registry/classify",
	"registry/bounds":          "; golang.org/x/sys",
	"registry/prune":           "api blobstore identity index registry/access registry/classify; github.com/opencontainers/image-spec",
	"registry/ranges":          "api",
	"registry/redirect":        "api blobstore identity",
	"registry/upkeep":          "api blobstore identity identity/lanes index",
	"registry":                 "api blobstore identity identity/safetensors index internal/durable internal/strictjson registry/access registry/answers registry/claims registry/bounds registry/classify registry/prune registry/ranges registry/redirect registry/upkeep; github.com/gorilla/mux github.com/opencontainers/image-spec github.com/opencontainers/go-digest",
	"registry/metrics":         "api blobstore identity index registry registry/upkeep; github.com/prometheus/client_golang",
	"transfer":                 "api api/client identity identity/lanes identity/safetensors internal/durable transfer/cache transfer/fetch transfer/folder transfer/hashing transfer/staging; golang.org/x/sync golang.org/x/sys github.com/opencontainers/image-spec github.com/opencontainers/go-digest",
	"transfer/artifact":        "api api/client identity identity/documents identity/safetensors internal/durable transfer transfer/folder; golang.org/x/sync",
	"transfer/made":            "api api/client identity identity/documents identity/resume identity/safetensors transfer transfer/artifact transfer/folder transfer/staging",
	"transfer/cache":           "identity identity/lanes internal/durable transfer/hashing transfer/staging",
	"transfer/fetch":           "api api/client identity identity/lanes internal/durable transfer/staging; golang.org/x/sync",
	"transfer/folder":          "api identity identity/documents identity/safetensors internal/durable transfer/hashing transfer/staging; golang.org/x/sys",
	"transfer/hashing":         "identity/lanes; golang.org/x/sys",
	"transfer/staging":         "identity identity/lanes internal/durable transfer/hashing; golang.org/x/sys",
	"gpuload":                  "identity identity/lanes identity/safetensors api; golang.org/x/sync golang.org/x/sys",
	"gpuload/hostmem":          "gpuload identity; golang.org/x/sys",
	"gpuload/cuda":             "gpuload; github.com/ebitengine/purego",
	"gpuload/cuda/fakecuda":    "; github.com/ebitengine/purego",
	"gpuload/adapters":         "api api/client gpuload gpuload/remote identity identity/documents identity/safetensors transfer transfer/artifact transfer/folder transfer/made",
	"gpuload/remote":           "api/client gpuload identity",
	"gpuload/devicetest":       "gpuload identity identity/safetensors",
	"gpuload/attach":           "gpuload identity identity/safetensors internal/localsock internal/strictjson; golang.org/x/sys",
	"gpuload/resident":         "api gpuload gpuload/adapters gpuload/attach identity internal/localsock internal/strictjson registry/access",
	"gpuload/resident/metrics": "gpuload/resident; github.com/prometheus/client_golang",
	"internal/localsock":       "; golang.org/x/sys",
	"internal/sdnotify":        "",
}

// anyOurs are the prefixes whose packages may import whatever of ours they wire together; the value lists the modules.
var anyOurs = map[string]string{
	"cmd/":              "github.com/spf13/cobra github.com/vbauerster/mpb/v8 go.yaml.in/yaml/v3 golang.org/x/term golang.org/x/sys",
	"internal/chaos":    "golang.org/x/sys",
	"internal/bench":    "golang.org/x/sync golang.org/x/sys",
	"internal/gpucheck": "github.com/ebitengine/purego golang.org/x/sync golang.org/x/sys",
	"internal/cli":      "github.com/spf13/cobra github.com/spf13/pflag github.com/vbauerster/mpb/v8 go.yaml.in/yaml/v3 golang.org/x/term",
}

type pkg struct {
	ImportPath string
	Standard   bool
	Imports    []string
}

func list(t *testing.T, args ...string) (pkgs []pkg) {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-json=ImportPath,Standard,Imports"}, args...)...)
	out, err := cmd.Output()
	if err != nil {
		var x *exec.ExitError
		if errors.As(err, &x) {
			t.Fatalf("go list %v: %v\n%s", args, err, x.Stderr)
		}
		t.Fatal(err)
	}
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := dec.Decode(&p); err == io.EOF {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
}

func TestImportTable(t *testing.T) {
	pkgs := list(t, "./...")
	if len(pkgs) < 5 {
		t.Fatalf("go list found only %d packages", len(pkgs))
	}
	for _, p := range pkgs {
		name := strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")
		if name == "" || strings.HasPrefix(name, "internal/test") {
			continue
		}
		row, ok := imports[name]
		any := false
		for prefix, modules := range anyOurs {
			if strings.HasPrefix(name, prefix) {
				row, ok, any = "; "+modules, true, true
			}
		}
		if !ok {
			t.Errorf("%s has no row in the import table", name)
			continue
		}
		ours, modules, _ := strings.Cut(row, ";")
		for _, imp := range p.Imports {
			switch rel, isOurs := strings.CutPrefix(imp, module+"/"); {
			case isOurs && !any && !slices.Contains(strings.Fields(ours), rel):
				t.Errorf("%s imports %s, which its row does not allow", name, rel)
			case !isOurs && strings.Contains(strings.Split(imp, "/")[0], ".") && !within(imp, strings.Fields(modules)):
				t.Errorf("%s imports %s, which its row does not allow", name, imp)
			}
		}
	}
}

func within(imp string, modules []string) bool {
	return slices.ContainsFunc(modules, func(m string) bool { return imp == m || strings.HasPrefix(imp, m+"/") })
}

// TestPure keeps the identity packages free of files, network and clock.
func TestPure(t *testing.T) {
	for _, p := range list(t, "./identity/...") {
		for _, bad := range []string{"os", "net", "net/http", "time", "os/exec", "syscall"} {
			if slices.Contains(p.Imports, bad) {
				t.Errorf("%s imports %s", p.ImportPath, bad)
			}
		}
	}
}

// TestLinked checks what must never be linked into a binary.
func TestLinked(t *testing.T) {
	never := map[string][]string{
		"./cmd/kiln-registry": {"github.com/ebitengine/purego"},
		"./cmd/kiln-pull":     {module + "/index", "go.etcd.io/bbolt", "github.com/minio/minio-go/v7", "github.com/jackc/pgx/v5", "github.com/gorilla/mux"},
		"./cmd/kiln-push":     {"github.com/ebitengine/purego", "go.etcd.io/bbolt", "github.com/minio/minio-go/v7", "github.com/jackc/pgx/v5", "github.com/gorilla/mux"},
	}
	for cmd, bad := range never {
		for _, p := range list(t, "-deps", cmd) {
			if within(p.ImportPath, bad) {
				t.Errorf("%s links %s", cmd, p.ImportPath)
			}
		}
	}
	for _, p := range list(t, "-deps", "-tags", "nogpu", "./cmd/kiln-pull") {
		if within(p.ImportPath, never["./cmd/kiln-registry"]) {
			t.Errorf("kiln-pull without GPUs links %s", p.ImportPath)
		}
	}
}

// TestOtherBuilds compiles the binaries for the other processor, and without GPUs.
func TestOtherBuilds(t *testing.T) {
	for _, args := range [][]string{{"GOARCH=arm64"}, {"GOARCH=amd64", "GOFLAGS=-tags=nogpu"}} {
		cmd := exec.Command("go", "build", "./cmd/...")
		cmd.Env = append(append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux"), args...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%q: %v\n%s", args, err, out)
		}
	}
}
