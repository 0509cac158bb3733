#!/usr/bin/env bash
# Runs every block marked sh of README.md and doc/, as a reader would: in a fresh copy of the checkout, the blocks of one
# file in their order in one shell. Servers that a block leaves in the background end with the file.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cases=${KILN_CASES:-$root/../shared/cases}
[ ! -d "$cases" ] || { KILN_CASES=$(cd "$cases" && pwd) && export KILN_CASES; }
scratch=$(mktemp -d)
copy=$scratch/checkout
trap 'chmod -R u+w "$scratch"; rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
mkdir "$copy" "$scratch/tmp"
cd "$root"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
  [ ! -e "$file" ] || printf '%s\0' "$file"
done | xargs -0 cp --parents -t "$copy"
cd "$copy"
export TMPDIR=$scratch/tmp PATH=$copy/.bin:$PATH
make build

blocks=0
while IFS= read -r file; do
  script=$(awk '/^```sh$/ { on = 1; next } /^```/ { on = 0 } on' "$file")
  [ -n "$script" ] || continue
  blocks=$((blocks + $(grep -c '^```sh$' "$file")))
  printf '\n== %s\n' "$file"
  env -u MAKEFLAGS -u MAKELEVEL bash -c "set -euo pipefail
    trap 'kill \$(jobs -p) 2>/dev/null || :; wait' EXIT
    PS4='\$ '; set -x
$script" </dev/null
done < <(find README.md doc -name '*.md' | LC_ALL=C sort)
printf '\n%s passed, 0 failed\n' "$blocks"
