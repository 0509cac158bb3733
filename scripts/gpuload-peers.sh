#!/usr/bin/env bash
# Puts the loaders that ours is measured beside, at pinned versions, into the virtual environment .tools/gpuload-peers.
# Torch is left out: what is measured of runai-model-streamer is its library, through its own binding.
set -euo pipefail
cd "$(dirname "$0")/.."

rm -rf .tools/gpuload-peers
python3 -m venv .tools/gpuload-peers || {
  echo "error: python3 cannot make a virtual environment" >&2
  echo "hint: apt-get install python3-venv" >&2
  exit 1
}
.tools/gpuload-peers/bin/pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
  -r internal/tools/gpuload-peers/requirements.txt
touch .tools/gpuload-peers/.stamp
