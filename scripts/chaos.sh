#!/usr/bin/env bash
# Lets a registry do everything at once and looks at what it had acknowledged. Each part runs for about CHAOS_S
# seconds (60 if unset) and ends with a line "NAME: … lost N"; those lines come again last. Names of parts as arguments:
# only those.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
export CHAOS_S=${CHAOS_S:-60}
summary=$scratch/summary failed=0

# part COMMAND... runs a part and keeps the lines that say what came of it.
part() {
  run "$@" | tee "$scratch/part" || failed=1
  grep -E '^[a-z0-9]+: .* lost [0-9]+$' "$scratch/part" >>"$summary" || failed=1
}

# Pushers, deleters and pullers against a collector that gives no grace. In memory nothing waits for a disk, so that
# more of them meet.
chaos_collector() {
  [ -w /dev/shm ] && local -x TMPDIR=/dev/shm
  part go test -count=1 -v -run '^TestPushersAgainstCollector$' ./registry/upkeep
}

# The same with the bytes in a bucket.
chaos_s3() {
  [ -w /dev/shm ] && local -x TMPDIR=/dev/shm
  part go test -count=1 -v -run '^TestPushersAgainstCollectorOnS3$' ./registry/upkeep
}

(($#)) || set -- collector s3
for name; do
  "chaos_$name"
done
echo
cat "$summary"
awk '{ lost += $NF } END { print "lost = " lost + 0 }' "$summary"
exit "$failed"
