#!/usr/bin/env bash
# Puts Debian's docker-registry into .tools/bin, for make bench: the one that is installed, or else the one of the
# package, which is taken apart and not installed, so that no service is started. Where there is neither, make bench
# goes on without it.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p .tools/bin
if path=$(command -v docker-registry); then
  ln -s "$path" .tools/bin/docker-registry
  exit
fi
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
if command -v dpkg-deb >/dev/null &&
  (cd "$parts" && apt-get -qq -o APT::Sandbox::User=root download docker-registry && dpkg-deb -x ./*.deb .); then
  cp "$parts/usr/bin/docker-registry" .tools/bin/
else
  echo "note: Debian's docker-registry is left out of the comparison" >&2
  echo "hint: apt-get install docker-registry, then make bench again" >&2
fi
