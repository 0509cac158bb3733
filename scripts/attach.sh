#!/usr/bin/env bash
# The Python client of resident weights, and the vLLM loader: against kiln-pull resident in host memory and on the
# stand-in for the CUDA driver, and against a holder that lies. Ends with what was counted. RUN=PATTERN: only those.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/lib.sh"
export PATH=$root/.bin:$PATH PYTHONPATH=$root/gpuload/attach:$root/scripts/attach PYTHONDONTWRITEBYTECODE=1
export TMPDIR=$scratch FAKE_CUDA=$scratch/libfakecuda.so MODEL=$root/.tools/model/all-minilm-l6-v2

gcc -O1 -Wall -Werror -shared -fPIC -pthread -o "$FAKE_CUDA" "$root/gpuload/cuda/fakecuda/c/fakecuda.c"
mkdir "$scratch/package"
cp "$root"/gpuload/attach/*.py "$root/gpuload/attach/pyproject.toml" "$scratch/package"
VIRTUAL_ENV=$root/.tools/vllm "$root/.tools/vllm/bin/uv" pip install --quiet --no-cache --no-deps --no-build-isolation \
  --reinstall "$scratch/package"
cd "$root/scripts/attach"
"$root/.tools/vllm/bin/python" -W error::ResourceWarning -X faulthandler -m unittest ${RUN:+-k "$RUN"} -v 2>&1
