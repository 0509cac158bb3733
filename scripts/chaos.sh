#!/usr/bin/env bash
# Lets a registry do everything at once, kills and breaks it, and looks at what it had acknowledged. A part that goes by
# time runs for about CHAOS_S seconds (60 if unset). Each ends with a line "NAME: … lost N"; those lines come again
# last, and their sums. Names of parts as arguments: only those.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
export CHAOS_S=${CHAOS_S:-60}
summary=$scratch/summary failed=0

# part COMMAND... runs a part and keeps the lines that say what came of it.
part() {
  run "$@" | tee "$scratch/part" || failed=1
  grep -E '^[a-z0-9-]+: .* lost [0-9]+$' "$scratch/part" >>"$summary" || failed=1
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

# break_it PARTS... runs parts of internal/chaos on real processes, whose registry is built with fault points.
break_it() {
  if [ ! -e "$scratch/bin" ]; then
    mkdir "$scratch/bin"
    go build -tags chaos -o "$scratch/bin/" ./cmd/kiln-registry
    go build -o "$scratch/bin/" ./cmd/kiln-pull ./internal/chaos
  fi
  [ -w /dev/shm ] && set -- -dir /dev/shm "$@" # kill -9 leaves what is in memory, and nothing waits for a disk there
  part "$scratch/bin/chaos" -bin "$scratch/bin" "$@"
}

# kill -9 at random instants.
chaos_kill() { break_it -limit "${CHAOS_S}s" kill; }

# The same with the bytes in a bucket: the registry is killed, and the S3 server is not.
chaos_kill-s3() {
  local root=$PWD PATH=$PWD/.tools/bin:$PATH
  cd "$scratch"
  start_s3 chaos
  cd "$root"
  break_it -limit "$((CHAOS_S / 3))s" -kills 60 -store "s3://chaos/store?endpoint=http://$s3" kill
}

# kill -9 right before and right after every durable change of a script of operations; of each fourth in a short run.
chaos_boundaries() { break_it -every "$((CHAOS_S < 60 ? 4 : 1))" boundaries; }

# Changes that fail, are lost, are cut short or find no space; a full disk; flipped bits.
chaos_faults() { break_it faults full flip; }

(($#)) || set -- collector s3 kill kill-s3 boundaries faults
for name; do
  "chaos_$name"
done
echo
cat "$summary"
awk '{ for (i = 1; i < NF; i++) sum[$i] += $(i + 1) }
  END { printf "kills = %d\nacknowledged = %d\n", sum["kills"], sum["acknowledged"]; print "lost = " sum["lost"] + 0 }' \
  "$summary"
exit "$failed"
