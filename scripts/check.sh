#!/usr/bin/env bash
# Format, generated files, vet, staticcheck, the import table, every test under the race detector, and known
# vulnerabilities.
set -euo pipefail
cd "$(dirname "$0")/.."
step() { printf '\n-- %s\n' "$*"; }

step gofmt
unformatted=$(gofmt -l .)
if [ -n "$unformatted" ]; then
  printf 'error: not formatted:\n%s\nhint: gofmt -w FILE\n' "$unformatted" >&2
  exit 1
fi

step generated files
scripts/generated.sh

step go vet
go vet ./...

step staticcheck
staticcheck ./...

step import table
go test -count=1 . # its inputs are go list's, which the test cache does not see

step race tests
CGO_ENABLED=1 scripts/test.sh -race

step govulncheck
report=$(mktemp)
trap 'rm -f "$report"' EXIT
if govulncheck ./... >"$report" 2>&1; then
  cat "$report"
elif grep -q '^govulncheck: fetching vulnerabilities: ' "$report"; then
  echo "govulncheck did NOT run: its vulnerability database cannot be reached from here"
else
  cat "$report" >&2
  exit 1
fi
