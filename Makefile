# Every target works on a clean checkout: what it needs is built into .bin/ and .tools/ first, from pinned versions.
# Logic lives in scripts/.
export PATH := $(CURDIR)/.bin:$(CURDIR)/.tools/bin:$(PATH)
export FUZZTIME ?= 20s
export BENCH FULL KEEP STORE CHAOS_S OLD NEW PACKAGES RUN
S3 ?= $(KILN_TEST_S3)
export KILN_TEST_S3 := $(S3)

BINARIES := .bin/kiln-registry .bin/kiln-push .bin/kiln-pull
PINS     := internal/tools/go.mod internal/tools/go.sum

.PHONY: all build demo test check generate conformance fuzz interop chaos bench bench-doc device attach gpu-check docs clean postgres $(BINARIES)

all: build

build: $(BINARIES) ## the three binaries, in .bin/

$(BINARIES): .bin/%:
	go build -trimpath -o $@ ./cmd/$*

S3_STORE = $(if $(filter s3,$(STORE)),.tools/bin/versitygw)

demo: build $(S3_STORE) ## the main job on embedded defaults; KEEP=1 stays up; STORE=s3 keeps the bytes in a bucket
	scripts/demo.sh

test: postgres .tools/bin/versitygw .tools/bin/oras $(filter .tools/bin/weed,.tools/bin/$(S3)) ## tests, and what they need; S3=weed: on that server
	scripts/test.sh

check: postgres .tools/bin/staticcheck .tools/bin/govulncheck .tools/bin/versitygw .tools/bin/oras ## gofmt, vet, staticcheck, imports, race, vulnerabilities
	scripts/check.sh

conformance: build .tools/bin/conformance ## OCI conformance, spec 1.1 and dev: passed, failed, skipped
	scripts/conformance.sh

generate: ## writes the assembly of identity/lanes/block
	go generate ./identity/lanes/block

fuzz: ## every fuzz target for FUZZTIME
	scripts/fuzz.sh

interop: build .tools/bin/oras .tools/bin/crane .tools/bin/regctl .tools/model/.stamp ## real clients on a real model
	scripts/interop.sh

chaos: .tools/bin/versitygw ## everything at once, for CHAOS_S seconds a part: what was acknowledged, and what was lost of it
	scripts/chaos.sh

# beside TABLES TOOLS are the tools, if one of the tables is to be measured.
beside = $(if $(filter $1,$(or $(BENCH),$1)),$2)
PEERS  = $(if $(S3_STORE),,$(call beside,registry pushes manifests,.tools/bin/registry .tools/bin/docker-registry))
OTHERS = $(if $(S3_STORE),,$(call beside,transfer pull,.tools/bin/oras .tools/bin/nginx .tools/huggingface/.stamp)) \
	$(if $(S3_STORE),,$(call beside,gpuload loaders,.tools/gpuload-peers/.stamp)) \
	$(if $(filter go,$(BENCH)),.tools/bin/benchstat)

bench: build $(S3_STORE) $(PEERS) $(OTHERS) ## ratio tables; BENCH=identity|registry|index|transfer|gpuload|go, FULL=1: long form; STORE=s3
	$(if $(filter go,$(BENCH)),scripts/bench-go.sh,go run ./internal/bench $(if $(FULL),-full) -bin .bin -tools .tools \
		-json .tools/bench $(if $(S3_STORE),-s3 $(S3_STORE)) $(PEERS:%=-peer %) $(BENCH))

bench-doc: ## what make bench FULL=1 measured last, put into doc/performance.md
	go run ./internal/bench -json .tools/bench -page doc/performance.md

device: ## loading into memory: the fault matrix under the race detector, then mutants of the code
	scripts/device.sh

gpu-check: ## on a machine with a GPU, in at most 5 minutes: what the device, the driver and loads do there, as a table
	scripts/gpu-check.sh

attach: build .tools/vllm/.stamp .tools/model/.stamp ## the Python client and the vLLM loader, on a real holder; RUN=PATTERN
	scripts/attach.sh

docs: ## runs every sh block of README.md and doc/ in a fresh copy of the checkout
	scripts/docs.sh

clean:
	rm -rf .bin .tools

.tools/bin/staticcheck: TOOL := honnef.co/go/tools/cmd/staticcheck
.tools/bin/govulncheck: TOOL := golang.org/x/vuln/cmd/govulncheck
.tools/bin/oras:        TOOL := oras.land/oras/cmd/oras
.tools/bin/crane:       TOOL := github.com/google/go-containerregistry/cmd/crane
.tools/bin/regctl:      TOOL := github.com/regclient/regclient/cmd/regctl
.tools/bin/benchstat:   TOOL := golang.org/x/perf/cmd/benchstat

.tools/bin/conformance: $(wildcard internal/tools/conformance/go.*)
	cd internal/tools/conformance && go build -trimpath -buildvcs=false -o ../../../$@ \
		github.com/opencontainers/distribution-spec/conformance

.tools/bin/versitygw: $(wildcard internal/tools/s3/go.*)
	cd internal/tools/s3 && go build -trimpath -buildvcs=false -o ../../../$@ \
		github.com/versity/versitygw/cmd/versitygw

postgres: ## PostgreSQL for the tests: the installed one, or Debian's in .tools/postgres
	scripts/postgres.sh

.tools/bin/registry: $(wildcard internal/tools/peers/go.*)
	cd internal/tools/peers && CGO_ENABLED=0 go build -trimpath -buildvcs=false -o ../../../$@ \
		github.com/distribution/distribution/v3/cmd/registry

.tools/bin/docker-registry .tools/bin/nginx: .tools/bin/%: scripts/debian.sh
	scripts/debian.sh $* $*

.tools/huggingface/.stamp: scripts/huggingface.sh internal/tools/huggingface/requirements.txt
	scripts/huggingface.sh

.tools/gpuload-peers/.stamp: scripts/gpuload-peers.sh internal/tools/gpuload-peers/requirements.txt
	scripts/gpuload-peers.sh

.tools/bin/weed: $(wildcard internal/tools/weed/go.*)
	cd internal/tools/weed && go build -trimpath -buildvcs=false -o ../../../$@ \
		github.com/seaweedfs/seaweedfs/weed

.tools/bin/%: $(PINS)
	cd internal/tools && go build -trimpath -buildvcs=false -o ../../$@ $(TOOL)

.tools/vllm/.stamp: scripts/vllm.sh internal/tools/vllm/requirements.txt
	scripts/vllm.sh

.tools/model/.stamp: scripts/model.sh
	scripts/model.sh
