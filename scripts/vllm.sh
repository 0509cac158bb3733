#!/usr/bin/env bash
# Puts vLLM for CPUs, and torch and all else that it needs at pinned versions, into the virtual environment .tools/vllm:
# about 2.4 GB to download and 6 GB on disk, most of it the CUDA libraries without which torch from PyPI can't start.
set -euo pipefail
cd "$(dirname "$0")/.."

rm -rf .tools/vllm .tools/vllm.cache
trap 'rm -rf .tools/vllm.cache' EXIT
python3 -m venv .tools/vllm || {
  echo "error: python3 cannot make a virtual environment" >&2
  echo "hint: apt-get install python3-venv" >&2
  exit 1
}
.tools/vllm/bin/pip install --quiet --disable-pip-version-check --no-deps uv==0.13.9
UV_CACHE_DIR=.tools/vllm.cache UV_HTTP_TIMEOUT=180 VIRTUAL_ENV=.tools/vllm .tools/vllm/bin/uv pip install --quiet \
  --no-deps --only-binary :all: -r internal/tools/vllm/requirements.txt
touch .tools/vllm/.stamp
