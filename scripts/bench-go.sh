#!/usr/bin/env bash
# Go benchmarks of two sides in turns, compared by benchstat: one core's SHA-256 with KILN_LANES=x1 beside the kernels
# chosen at run time, or, if OLD is set, the commit OLD beside NEW (else the working tree). PACKAGES and RUN choose what
# runs; FULL=1 runs each benchmark for a second.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD rounds=7 benchtime=${FULL:+1s}
. scripts/lib.sh
PATH=$root/.tools/bin:$PATH
read -ra packages <<<"${PACKAGES:-./identity/lanes ./blobstore/fsstore}"

# prepare SIDE TREE builds the tests of the packages of a source tree.
prepare() {
  local package
  mkdir -p "$scratch/$1"
  for package in "${packages[@]}"; do
    (cd "$2" && go test -c -o "$scratch/$1/${package//\//_}.test" "$package")
  done
}

# tree COMMIT checks it out into a folder of its own and prints that.
tree() {
  mkdir -p "$scratch/src/$1"
  git archive "$1" | tar -x -C "$scratch/src/$1"
  echo "$scratch/src/$1"
}

# measure SIDE TREE LANES adds one run of every benchmark to what the side has; LANES empty: chosen at run time.
measure() {
  local package
  for package in "${packages[@]}"; do
    (cd "$2/$package" && KILN_LANES=$3 "$scratch/$1/${package//\//_}.test" -test.run '^$' -test.bench "${RUN:-.}" \
      -test.benchmem -test.benchtime "${benchtime:-100ms}") >>"$scratch/$1.txt"
  done
}

if [ -n "${OLD:-}" ]; then
  a=$OLD b=${NEW:-tree} first=$(tree "$OLD") second=$root lanes=${KILN_LANES:-}
  [ -z "${NEW:-}" ] || second=$(tree "$NEW")
else
  a=x1 b=auto first=$root second=$root lanes=x1
fi
a=${a//\//_} b=${b//\//_}
prepare "$a" "$first"
prepare "$b" "$second"
echo "go: $(nproc) cores, $rounds rounds in turns, load $(cut -d' ' -f1-3 /proc/loadavg) before"
for ((i = 0; i < rounds; i++)); do
  if ((i % 2)); then
    measure "$b" "$second" "${OLD:+$lanes}"
    measure "$a" "$first" "$lanes"
  else
    measure "$a" "$first" "$lanes"
    measure "$b" "$second" "${OLD:+$lanes}"
  fi
done
(cd "$scratch" && benchstat "$a.txt" "$b.txt")
echo "load $(cut -d' ' -f1-3 /proc/loadavg) after"
