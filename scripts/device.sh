#!/usr/bin/env bash
# Loads into memory: the fault matrix of every target under the race detector, then mutants of the code, each of which
# a suite must notice. Ends with what was counted.
set -euo pipefail
cd "$(dirname "$0")/.."

out=$(mktemp)
trap 'rm -f "$out" "$out".*' EXIT

# run ARGUMENT...: go test, of which failures and packages are shown.
run() {
  local code=0
  go test -v "$@" >"$out.run" 2>&1 || code=$?
  grep -E '^(ok|FAIL|panic:|# )|--- FAIL|_test\.go:|DATA RACE' "$out.run" || true
  cat "$out.run" >>"$out"
  return "$code"
}

CGO_ENABLED=1 run -race ./gpuload/...
run -tags mutants ./gpuload/devicetest
echo
grep -oE '(faults|mutants): .*' "$out"
