#!/usr/bin/env bash
# Puts huggingface_hub, with all that it needs at pinned versions, into the virtual environment .tools/huggingface.
set -euo pipefail
cd "$(dirname "$0")/.."

rm -rf .tools/huggingface
python3 -m venv .tools/huggingface || {
  echo "error: python3 cannot make a virtual environment" >&2
  echo "hint: apt-get install python3-venv" >&2
  exit 1
}
.tools/huggingface/bin/pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
  -r internal/tools/huggingface/requirements.txt
touch .tools/huggingface/.stamp
