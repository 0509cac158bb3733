#!/usr/bin/env bash
# The main job, end to end, on embedded defaults in a temporary folder: push a model, rename its shards, push it again,
# find both by their bytes, pull, verify, and in the end hold resident and attach. KEEP=1 leaves the servers up until
# Ctrl-C. STORE=s3 keeps the bytes in a bucket of a local S3 server, and makes the index anew from that bucket alone.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
PATH=$root/.bin:$root/.tools/bin:$PATH
. "$root/scripts/lib.sh"
step() { printf '\n== %s\n' "$*"; }

port=$(free_port)
export KILN_REGISTRY=127.0.0.1:$port
cd "$scratch"

store=() # where the registry keeps things; nothing is its default
serve() {
  printf '\n$ kiln-registry serve --addr %s%s &\n' "$KILN_REGISTRY" "${*:+ $*}"
  start registry.log "$port" /readyz kiln-registry serve --addr "$KILN_REGISTRY" "$@"
  registry=${pids[-1]}
}
case ${STORE:-} in
  '')
    step "a registry on embedded defaults"
    ;;
  s3)
    step "an S3 server with an empty bucket, and a registry on it"
    s3=$(free_port)
    mkdir -p s3/kiln
    export AWS_ACCESS_KEY_ID=demo AWS_SECRET_ACCESS_KEY=$RANDOM$RANDOM$RANDOM
    unset AWS_SESSION_TOKEN AWS_REGION AWS_DEFAULT_REGION
    printf '\n$ export AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=…\n$ versitygw --port 127.0.0.1:%s posix s3 &\n' "$s3"
    start s3.log "$s3" /health env ROOT_ACCESS_KEY=$AWS_ACCESS_KEY_ID ROOT_SECRET_KEY=$AWS_SECRET_ACCESS_KEY \
      versitygw --port "127.0.0.1:$s3" --health /health --keep-alive --quiet posix s3
    store=(--store "s3://kiln/demo?endpoint=http://127.0.0.1:$s3")
    ;;
  *)
    echo "error: STORE=$STORE: want s3, or nothing for a folder" >&2
    exit 2
    ;;
esac
printf '\n$ export KILN_REGISTRY=%s\n' "$KILN_REGISTRY"
serve ${store[@]+"${store[@]}" --init}

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

step "what a training run made from those bytes"
kiln-push identify --quiet --json model >base.json
printf '\n$ go run ./internal/testrun -base base.json run\n'
(cd "$root" && go run ./internal/testrun -base "$scratch/base.json" "$scratch/run")
exact=run/sql-checkpoint-step-00000001.kiln-checkpoint
archival=run/old-checkpoint-step-00000001.kiln-checkpoint
run kiln-push adapter run/sql "$KILN_REGISTRY/demo/sql:v1"
run kiln-push adapter run/plain "$KILN_REGISTRY/lab/plain:v1" --base "$KILN_REGISTRY/lab/other-name:v7"
run kiln-push checkpoint "$exact" "$KILN_REGISTRY/demo/sql:step-1"
run kiln-push checkpoint "$archival" "$KILN_REGISTRY/demo/old:step-1" --legacy
run kiln-push eval run/eval.json "$KILN_REGISTRY/demo/sql-eval:v1"

step "all of it, by the one aggregate"
run kiln-pull find "$aggregate" | tee found
for made in demo/sql lab/plain demo/old demo/sql-eval; do
  grep -q "$made" found
done
run kiln-pull find "$KILN_REGISTRY/demo/sql:v1" --tree
run kiln-pull find "$aggregate" --table

step "may a run go on from a checkpoint exactly?"
run kiln-pull check-resume "$exact" --base model --request run/request.json --provenance run/provenance.json
step "no: the same bytes under other file names, other bytes, a checkpoint without the digests of the shards"
no kiln-pull check-resume "$exact" --base pulled --request run/request.json --provenance run/provenance.json
printf '\n$ go run ./internal/testmodel -size 1MB -seed 2 other\n'
(cd "$root" && go run ./internal/testmodel -size 1MB -seed 2 "$scratch/other")
no kiln-pull check-resume "$exact" --base other --request run/request.json --provenance run/provenance.json
no kiln-pull check-resume "$archival" --base model --request run/request.json --provenance run/provenance.json

if [ "${STORE:-}" = s3 ]; then
  step "kill the registry, lose its machine, make the index anew from the bucket"
  run kiln-registry export "${store[@]}" >before
  run kill -9 "$registry"
  wait "$registry" 2>/dev/null || :
  run rm -r kiln-state
  run kiln-registry reindex "${store[@]}"
  run kiln-registry export "${store[@]}" >after
  run diff -s before after
  serve "${store[@]}"
  run kiln-pull find "$aggregate"
fi

step "hold it resident, straight from the registry, on a GPU if there is one"
resident=$(free_port)
socket=$scratch/resident.sock
hold=(kiln-pull resident "$aggregate" --repo demo/model --device auto --socket "$socket" --listen "127.0.0.1:$resident")
printf '\n$ %s &\n' "${hold[*]}"
start resident.log "$resident" /health "${hold[@]}"
cat resident.log
printf '\nGET http://127.0.0.1:%s/health\n' "$resident"
fetch "http://127.0.0.1:$resident/health"
run kiln-push compare model "http://127.0.0.1:$resident/health"

step "attach to that memory from another process, by the aggregate and no other"
run kiln-pull attach "$aggregate" --socket "$socket" --check
printf '\n$ python3 gpuload/attach/kiln_attach.py %s --socket %s --check\n' "$aggregate" "$socket"
python3 "$root/gpuload/attach/kiln_attach.py" "$aggregate" --socket "$socket" --check
no kiln-pull attach "$(kiln-push identify --quiet other | head -n 1)" --socket "$socket" --check

step "load an adapter of that base beside it"
run kiln-pull adapter load "$aggregate" "$KILN_REGISTRY/demo/sql:v1" --socket "$socket"
run kiln-pull adapter list "$aggregate" --socket "$socket" | tee list
adapter=$(grep -Eo 'sha256:[0-9a-f]{64}' list | head -n 1)
run kiln-pull attach "$aggregate" --adapter "$adapter" --socket "$socket" --check
printf '\n$ python3 gpuload/attach/kiln_attach.py %s --adapter %s --socket %s --check\n' "$aggregate" "$adapter" "$socket"
python3 "$root/gpuload/attach/kiln_attach.py" "$aggregate" --adapter "$adapter" --socket "$socket" --check

if [ -n "${KEEP:-}" ]; then
  step "still up; Ctrl-C stops and removes everything"
  echo "registry   http://$KILN_REGISTRY/v1/bases"
  echo "resident   http://127.0.0.1:$resident/health"
  echo "folder     $scratch"
  wait
fi
step "done; stopping the servers and removing the temporary folder"
