#!/usr/bin/env bash
# Runs every fuzz target of the module, one after the other, for FUZZTIME each (default 20s).
set -euo pipefail
cd "$(dirname "$0")/.."

list=$(go test -list '^Fuzz' ./...)
targets=$(awk '/^Fuzz/ { names[++n] = $1 }
  /^ok / { for (i = 1; i <= n; i++) print $2, names[i]; n = 0 }' <<<"$list")
if [ -z "$targets" ]; then
  echo "error: no fuzz target found" >&2
  exit 1
fi
out=$(mktemp)
trap 'rm -f "$out"' EXIT

# fuzz PACKAGE TARGET. Inputs are made smaller by few tries: by default that takes a minute, longer than the whole run.
fuzz() {
  go test -run '^$' -fuzz "^$2\$" -fuzztime "${FUZZTIME:-20s}" -fuzzminimizetime 10x "$1" </dev/null 2>&1 | tee "$out"
}

while read -r pkg name; do
  printf '\n-- %s %s\n' "$pkg" "$name"
  # The go command calls it a failure too when a worker was not done as the time was up. Such a run found no failing
  # input, and is made once more.
  if ! fuzz "$pkg" "$name"; then
    grep -q 'context deadline exceeded' "$out" || exit 1
    ! grep -q 'Failing input' "$out" || exit 1
    fuzz "$pkg" "$name"
  fi
done <<<"$targets"
