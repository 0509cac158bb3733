#!/usr/bin/env bash
# Unmodified clients against a running registry, on a real public model: kiln-push, kiln-pull, oras and crane. Every
# client must restore the same bytes, and whatever was pushed by whichever tool must be found under one aggregate.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
PATH=$root/.bin:$root/.tools/bin:$PATH
. "$root/scripts/lib.sh"
step() { printf '\n-- %s\n' "$*"; }

for tool in kiln-registry kiln-push kiln-pull oras crane python3; do
  command -v "$tool" >/dev/null || { echo "error: $tool is missing; run make interop" >&2; exit 1; }
done
port=$(free_port)
export KILN_REGISTRY=127.0.0.1:$port
export DOCKER_CONFIG=$scratch/docker ORAS_CACHE=
host=$KILN_REGISTRY passed=0
cd "$scratch"
cp -r "$root/.tools/model/all-minilm-l6-v2" model
mkdir taken # what kiln-push takes along: all but dot files
(cd model && find . -type f -not -name '.*' -exec cp --parents -t ../taken {} +)
start registry.log "$port" /readyz kiln-registry serve --addr "$host"

# same A B fails unless the two folders hold the same files with the same bytes.
same() { diff -r "$1" "$2" && echo "same bytes: $1 $2" && passed=$((passed + 1)); }

# found REPO fails unless the aggregate leads to REPO.
found() {
  kiln-pull find "$aggregate" >found
  grep -q "$1" found || { cat found; echo "error: $1 is not found under $aggregate" >&2; exit 1; }
  echo "found under $aggregate: $1"
  passed=$((passed + 1))
}

step "one aggregate, by kiln-push and by an independent script"
aggregate=$(kiln-push identify model | grep -Eo 'sha256:[0-9a-f]{64}' | head -n 1)
script=$(python3 "$root/scripts/aggregate.py" model)
[ "$aggregate" = "$script" ] || { echo "error: kiln-push says $aggregate, the script $script" >&2; exit 1; }
echo "$aggregate"
passed=$((passed + 1))

step "kiln-push base, kiln-pull pull"
run kiln-push base model "$host/real/minilm:v1"
found real/minilm
run kiln-pull pull "$host/real/minilm:v1" by-kiln
same taken by-kiln

step "oras pull"
run oras pull --plain-http --no-tty "$host/real/minilm:v1" -o by-oras
same taken by-oras

step "crane manifest, crane blob"
run crane --insecure manifest "$host/real/minilm:v1" >manifest.json
python3 - >layers <<'PY'
import json
for layer in json.load(open("manifest.json"))["layers"]:
    print(layer["digest"], layer["annotations"]["org.opencontainers.image.title"])
PY
while read -r digest name; do
  mkdir -p "by-crane/$(dirname "$name")"
  crane --insecure blob "$host/real/minilm@$digest" >"by-crane/$name"
done <layers
same taken by-crane

step "crane copy, into another repository"
run crane --insecure copy "$host/real/minilm:v1" "$host/copied/by-crane:v1"
found copied/by-crane

step "oras push of the same files"
(cd model && find . -type f -printf '%P\n' | LC_ALL=C sort >../names &&
  xargs oras push --plain-http --no-tty "$host/pushed/by-oras:v1" <../names)
found pushed/by-oras
run kiln-pull pull "$host/pushed/by-oras:v1" from-oras
same model from-oras
run kiln-push compare "$host/real/minilm:v1" "$host/pushed/by-oras:v1"
passed=$((passed + 1))

printf '\n%s passed, 0 failed\n' "$passed"
