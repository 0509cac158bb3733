#!/usr/bin/env bash
# debian.sh PACKAGE PROGRAM puts a program of a Debian package into .tools/bin, for make bench: the one that is
# installed, or else the one of the package, which is taken apart and not installed, so that no service is started.
# Where there is neither, make bench goes on without it.
set -euo pipefail
cd "$(dirname "$0")/.."
package=$1 program=$2

mkdir -p .tools/bin
without=:$PATH: # that of the Makefile has .tools/bin, where the program of an earlier run may be
without=${without//:"$PWD/.tools/bin":/:} without=${without#:} without=${without%:}
if path=$(PATH=$without command -v "$program" || command -v "/usr/sbin/$program"); then
  ln -sf "$path" ".tools/bin/$program"
  exit
fi
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
if command -v dpkg-deb >/dev/null &&
  (cd "$parts" && apt-get -qq -o APT::Sandbox::User=root download "$package" && dpkg-deb -x ./*.deb .) &&
  ! ldd "$parts"/usr/*bin/"$program" 2>/dev/null | grep 'not found'; then
  cp "$parts"/usr/*bin/"$program" .tools/bin/
else
  echo "note: Debian's $package is left out of the comparison" >&2
  echo "hint: apt-get install $package, then make bench again" >&2
fi
