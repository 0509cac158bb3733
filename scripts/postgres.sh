#!/usr/bin/env bash
# Makes sure that there is a PostgreSQL for the tests: the one in the folder KILN_TEST_PG, or the one that is installed, or
# else the newest of Debian's, which is taken apart into .tools/postgres and not installed, so that no service is started.
set -euo pipefail
cd "$(dirname "$0")/.."
installed=${KILN_INSTALLED:-/usr} # to try the rest of this where there is one

has() { [ -x "$1/postgres" ] && [ -x "$1/initdb" ] && [ -x "$1/pg_basebackup" ]; }
for bin in ${KILN_TEST_PG:+"$KILN_TEST_PG"} "$installed"/lib/postgresql/*/bin .tools/postgres/usr/lib/postgresql/*/bin; do
  if has "$bin"; then
    exit
  fi
done

# wanted prints the packages that an installation would bring, as far as a server for tests needs them.
wanted() {
  apt-get install -s --no-install-recommends "postgresql-$1" 2>/dev/null | awk '/^Inst/ { print $2 }' |
    grep -E '^(postgresql-[0-9]+|postgresql-client-[0-9]+|lib.*)$' | grep -vE '^lib(llvm|.*-perl$)' || :
  printf '%s\n' "postgresql-$1" "postgresql-client-$1"
}
newest() { apt-cache search --names-only '^postgresql-[0-9]+$' | awk '{ print $1 }' | sort -t- -k2n | tail -1; }

parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
package=$(newest 2>/dev/null || :)
if [ -z "$package" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get -qq update
  package=$(newest)
fi
if [ -n "$package" ] && command -v dpkg-deb >/dev/null &&
  (cd "$parts" && wanted "${package#postgresql-}" | sort -u |
    xargs apt-get -qq -o APT::Sandbox::User=root download); then
  rm -rf .tools/postgres
  mkdir -p .tools/postgres
  for deb in "$parts"/*.deb; do
    dpkg-deb -x "$deb" .tools/postgres
  done
  bin=$(echo .tools/postgres/usr/lib/postgresql/*/bin)
  libs=$(echo .tools/postgres/usr/lib/*-linux-gnu)
  [ -d "$libs" ] && export LD_LIBRARY_PATH=$PWD/$libs
  if has "$bin" && "$bin/postgres" --version >/dev/null; then
    exit
  fi
  rm -rf .tools/postgres
fi
echo "error: the tests need PostgreSQL, which is neither installed nor to be had from Debian's packages here" >&2
echo "hint: apt-get install postgresql, or set KILN_TEST_PG to the folder with its initdb and postgres" >&2
exit 1
