#!/usr/bin/env bash
# Unmodified clients against two running registries, on a real public model: kiln-push, kiln-pull, oras, crane, regctl
# and skopeo. Every client must restore the same bytes; whatever was pushed or copied by whichever tool must be found
# under one aggregate, and nowhere once a client has deleted it.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
PATH=$root/.bin:$root/.tools/bin:$PATH
. "$root/scripts/lib.sh"
step() { printf '\n-- %s\n' "$*"; }

for tool in kiln-registry kiln-push kiln-pull oras crane regctl python3; do
  command -v "$tool" >/dev/null || { echo "error: $tool is missing; run make interop" >&2; exit 1; }
done
if ! command -v skopeo >/dev/null; then
  echo "error: skopeo is not on PATH" >&2
  echo "hint: apt-get install skopeo" >&2
  exit 1
fi
here=127.0.0.1:$(free_port) there=127.0.0.1:$(free_port)
export KILN_REGISTRY=$here DOCKER_CONFIG=$scratch/docker ORAS_CACHE= REGCTL_CONFIG=$scratch/regctl.json
model=real/minilm:v1 note=application/vnd.example.note+json passed=0
cd "$scratch"
cp -r "$root/.tools/model/all-minilm-l6-v2" model
mkdir taken # what kiln-push takes along: all but dot files
(cd model && find . -type f -not -name '.*' -exec cp --parents -t ../taken {} +)
echo '{"score": 0.9}' >note.json
start here.log "${here#*:}" /readyz kiln-registry serve --addr "$here" --store "$scratch/here" --init
start there.log "${there#*:}" /readyz kiln-registry serve --addr "$there" --store "$scratch/there" --init

# The clients, told that the registries speak plain HTTP. What each does is printed by run.
oras() { command oras "$1" --plain-http --no-tty "${@:2}"; }
oras_copy() { command oras copy --from-plain-http --to-plain-http --no-tty "$@"; }
oras_delete() { command oras manifest delete --plain-http --force "$@"; }
crane() { command crane --insecure "$@"; }
skopeo_copy() { command skopeo copy --quiet --src-tls-verify=false --dest-tls-verify=false "$@"; }
regctl registry set --tls disabled --skip-check "$here"
regctl registry set --tls disabled --skip-check "$there"

pass() { echo "$*" && passed=$((passed + 1)); }
fail() { echo "error: $*" >&2 && exit 1; }

# same A B fails unless the two folders hold the same files with the same bytes.
same() { diff -r "$1" "$2" && pass "same bytes: $1 $2"; }

# finds REGISTRY REPO says whether the aggregate leads to a base in REPO; find exits with 4 if it leads nowhere.
finds() {
  kiln-pull find "$aggregate" --registry "$1" >finds.out 2>&1 || (($? == 4)) || fail "find: $(cat finds.out)"
  grep -Eq "^base +$1/$2@" finds.out
}

# found REGISTRY REPO fails unless the aggregate leads to a base in REPO.
found() {
  finds "$1" "$2" || fail "$2 is not found under $aggregate: $(cat finds.out)"
  pass "found under $aggregate: $2"
}

# copied REF fails unless REF in the other registry is the model as it is in this one, and is found there.
copied() {
  [ "$(crane digest "$there/$1")" = "$digest" ] || fail "$1 is not the manifest that was copied"
  found "$there" "${1%:*}"
}

# attached REF DIGEST fails unless regctl and oras list DIGEST among what is attached to REF, and only under its type.
attached() {
  regctl artifact list --format '{{range .Descriptors}}{{println .Digest}}{{end}}' "$1" >by-regctl.out
  oras discover --artifact-type "$note" "$1" >by-oras.out
  oras discover --artifact-type application/vnd.example.other "$1" >other.out
  grep -q "$2" by-regctl.out || fail "regctl does not list $2 on $1: $(cat by-regctl.out)"
  grep -q "$2" by-oras.out || fail "oras does not discover $2 on $1: $(cat by-oras.out)"
  ! grep -q "$2" other.out || fail "oras discovers $2 on $1 under another type: $(cat other.out)"
  pass "attached to $1: $2"
}

# deleted REF fails unless the other registry has neither REF nor the digest that it was, and finds neither.
deleted() {
  ! crane manifest "$there/$1" 2>/dev/null || fail "$1 is still served"
  ! crane manifest "$there/${1%:*}@$digest" 2>/dev/null || fail "$digest is still served from ${1%:*}"
  ! finds "$there" "${1%:*}" || fail "$1 is still found"
  pass "deleted: $1"
}

step "one aggregate, by kiln-push and by an independent script"
aggregate=$(kiln-push identify model | grep -Eo 'sha256:[0-9a-f]{64}' | head -n 1)
script=$(python3 "$root/scripts/aggregate.py" model)
[ "$aggregate" = "$script" ] || fail "kiln-push says $aggregate, the script $script"
pass "$aggregate"

step "kiln-push base, kiln-pull pull"
run kiln-push base model "$here/$model"
found "$here" real/minilm
digest=$(crane digest "$here/$model")
run kiln-pull pull "$here/$model" by-kiln
same taken by-kiln

step "oras pull"
run oras pull "$here/$model" -o by-oras
same taken by-oras

step "crane manifest, crane blob"
run crane manifest "$here/$model" >manifest.json
python3 - >layers <<'PY'
import json
for layer in json.load(open("manifest.json"))["layers"]:
    print(layer["digest"], layer["annotations"]["org.opencontainers.image.title"])
PY
while read -r blob name; do
  mkdir -p "by-crane/$(dirname "$name")"
  crane blob "$here/real/minilm@$blob" >"by-crane/$name"
done <layers
same taken by-crane

step "crane copy, into another repository"
run crane copy "$here/$model" "$here/copied/by-crane:v1"
found "$here" copied/by-crane

step "oras push of the same files"
(cd model && find . -type f -printf '%P\n' | LC_ALL=C sort >../names)
mapfile -t names <names
(cd model && oras push "$here/pushed/by-oras:v1" "${names[@]}")
found "$here" pushed/by-oras
run kiln-pull pull "$here/pushed/by-oras:v1" from-oras
same model from-oras
run kiln-push compare "$here/$model" "$here/pushed/by-oras:v1"
passed=$((passed + 1))

step "oras: attach, discover, copy to another registry with what is attached, delete"
run oras attach --artifact-type "$note" "$here/$model" note.json:application/json --format json >attach.json
referrer=$(grep -Eo 'sha256:[0-9a-f]{64}' attach.json | head -n 1)
attached "$here/$model" "$referrer"
run oras_copy --recursive "$here/$model" "$there/copied/by-oras:v1" >/dev/null
copied copied/by-oras:v1
attached "$there/copied/by-oras:v1" "$referrer"
run oras_delete "$there/copied/by-oras:v1"
deleted copied/by-oras:v1

step "crane: copy to another registry, delete"
run crane copy "$here/$model" "$there/copied/by-crane:v1"
copied copied/by-crane:v1
run crane delete "$there/copied/by-crane@$digest"
deleted copied/by-crane:v1

step "regctl: copy to another registry with what is attached, attach, discover, delete"
run regctl image copy --referrers "$here/$model" "$there/copied/by-regctl:v1"
copied copied/by-regctl:v1
attached "$there/copied/by-regctl:v1" "$referrer"
run regctl artifact put --subject "$there/copied/by-regctl:v1" --artifact-type "$note" --annotation by=regctl \
  --file note.json --file-media-type application/json --format '{{println .Manifest.GetDescriptor.Digest}}' >put.out
attached "$there/copied/by-regctl:v1" "$(cat put.out)"
run regctl artifact get --subject "$there/copied/by-regctl:v1" --filter-artifact-type "$note" \
  --filter-annotation by=regctl >note.out
cmp note.json note.out && pass "regctl gets what it attached"
run regctl tag delete "$there/copied/by-regctl:v1"
regctl manifest head "$there/copied/by-regctl@$digest" >/dev/null || fail "the manifest went with its tag"
run regctl manifest delete "$there/copied/by-regctl@$digest"
deleted copied/by-regctl:v1

step "skopeo: copy to another registry, inspect, delete"
run skopeo_copy --preserve-digests "docker://$here/$model" "docker://$there/copied/by-skopeo:v1"
copied copied/by-skopeo:v1
run skopeo inspect --tls-verify=false --raw "docker://$there/copied/by-skopeo:v1" >raw.json
cmp manifest.json raw.json && pass "skopeo and crane read the same manifest"
run skopeo delete --tls-verify=false "docker://$there/copied/by-skopeo:v1"
deleted copied/by-skopeo:v1

step "an ordinary image: pushed by crane in Docker's form, by skopeo in the OCI form, listed and inspected"
tar -cf layer.tar note.json
run crane append --new_layer layer.tar --new_tag "$here/image/plain:docker"
run skopeo_copy "docker://$here/image/plain:docker" oci:layout:v1
run skopeo_copy oci:layout:v1 "docker://$here/image/plain:oci"
regctl tag list "$here/image/plain" >tags.out
diff tags.out <(printf '%s\n' docker oci) && pass "regctl lists both tags"
for tag in docker oci; do
  skopeo inspect --tls-verify=false --format '{{range .Layers}}{{println .}}{{end}}' "docker://$here/image/plain:$tag" \
    >"$tag.layers"
done
cmp docker.layers oci.layers && pass "skopeo inspects both to the same layers"

printf '\n%s passed, 0 failed\n' "$passed"
