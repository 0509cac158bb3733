#!/usr/bin/env bash
# Checks that what the tests need is there, says how to get what is missing, and runs them: those of PACKAGES if it is
# set, with the kernel of SHA-256 that KILN_LANES names if it is set.
set -euo pipefail
cd "$(dirname "$0")/.."

cases=${KILN_CASES:-../shared/cases}
if [ ! -f "$cases/make_cases.py" ]; then
  echo "error: no shared test cases at $cases" >&2
  echo "hint: set KILN_CASES to the folder that holds make_cases.py and identity-vectors.json" >&2
  exit 1
fi
export KILN_CASES
KILN_CASES=$(cd "$cases" && pwd)
if ! command -v python3 >/dev/null; then
  echo "error: the shared test cases are built by python3, which is not on PATH" >&2
  echo "hint: apt-get install python3" >&2
  exit 1
fi
go test "$@" ${PACKAGES:-./...}
