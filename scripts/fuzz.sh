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
while read -r pkg name; do
  printf '\n-- %s %s\n' "$pkg" "$name"
  go test -run '^$' -fuzz "^$name\$" -fuzztime "${FUZZTIME:-20s}" "$pkg" </dev/null
done <<<"$targets"
