#!/usr/bin/env bash
# The main job, end to end, on embedded defaults in a temporary folder: push a model, rename its shards, push it again,
# find both by their bytes, pull, verify, hold resident. KEEP=1 leaves both servers up until Ctrl-C.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
PATH=$root/.bin:$PATH
. "$root/scripts/lib.sh"
step() { printf '\n== %s\n' "$*"; }

port=$(free_port)
export KILN_REGISTRY=127.0.0.1:$port
cd "$scratch"

step "a registry on embedded defaults"
printf '\n$ export KILN_REGISTRY=%s\n$ kiln-registry serve --addr %s &\n' "$KILN_REGISTRY" "$KILN_REGISTRY"
start registry.log "$port" /readyz kiln-registry serve --addr "$KILN_REGISTRY"

step "a model of three shards, about 300 MB"
printf '\n$ go run ./internal/testmodel -size 300MB -shards 3 model\n'
(cd "$root" && go run ./internal/testmodel -size 300MB -shards 3 "$scratch/model")
run ls -l model
run kiln-push identify model
run kiln-push base model "$KILN_REGISTRY/demo/model:v1"

step "the same bytes under other names"
run cp -r model renamed
for n in 1 2 3; do
  run mv "renamed/model-0000$n-of-00003.safetensors" "renamed/weights-$n.safetensors"
done
run sed -i 's/model-0000\([123]\)-of-00003/weights-\1/' renamed/model.safetensors.index.json
run kiln-push compare model renamed
run kiln-push base renamed "$KILN_REGISTRY/lab/other-name:v7"

step "both, by the one aggregate"
aggregate=$(kiln-push identify model | grep -Eo 'sha256:[0-9a-f]{64}' | head -n 1)
run kiln-pull find "$aggregate" | tee found
grep -q demo/model found
grep -q lab/other-name found

step "pull one, verify it"
run kiln-pull pull "$aggregate" pulled --repo lab/other-name
run kiln-pull verify pulled --against "$aggregate"
run diff -r renamed pulled

step "hold it resident in memory"
resident=$(free_port)
printf '\n$ kiln-pull resident pulled --listen 127.0.0.1:%s --device host &\n' "$resident"
start resident.log "$resident" /health kiln-pull resident pulled --listen "127.0.0.1:$resident" --device host
printf '\nGET http://127.0.0.1:%s/health\n' "$resident"
fetch "http://127.0.0.1:$resident/health"
run kiln-push compare model "http://127.0.0.1:$resident/health"

if [ -n "${KEEP:-}" ]; then
  step "still up; Ctrl-C stops and removes everything"
  echo "registry   http://$KILN_REGISTRY/v1/bases"
  echo "resident   http://127.0.0.1:$resident/health"
  echo "folder     $scratch"
  wait
fi
step "done; stopping the servers and removing the temporary folder"
