#!/usr/bin/env bash
# Checks that generated files are what their generator writes, byte for byte.
set -euo pipefail
cd "$(dirname "$0")/.."

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
go -C internal/tools run ./lanesgen "$fresh"
for file in "$fresh"/*; do
  if ! cmp "$file" "identity/lanes/block/${file##*/}"; then
    echo "error: identity/lanes/block is not what internal/tools/lanesgen writes" >&2
    echo "hint: make generate" >&2
    exit 1
  fi
done
