#!/usr/bin/env bash
# Runs what loads do on a real device and prints a table last, within 5 minutes. Needs nothing but this checkout and go,
# or .bin/gpu-check as go built it elsewhere; python3, with or without torch, attaches too where it is there. Exit
# status: 1 if something does not hold that must. Flags are those of the program: -device, -dir, -bytes.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p .bin
if ! command -v go >/dev/null; then
  echo "note: there is no go here, taking .bin/gpu-check as it is" >&2
elif ! go build -trimpath -o .bin/gpu-check ./internal/gpucheck; then
  echo "note: it can't be built here, taking .bin/gpu-check as it is" >&2
fi
if [ ! -x .bin/gpu-check ]; then
  echo "error: no .bin/gpu-check" >&2
  echo "hint: build it on another machine: go build -o .bin/gpu-check ./internal/gpucheck" >&2
  exit 1
fi
exec timeout --kill-after=5 300 .bin/gpu-check "$@"
