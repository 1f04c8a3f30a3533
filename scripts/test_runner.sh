#!/usr/bin/env bash
# The tests of what a sampler computes, on vLLM's V2 model runner, which needs Triton: its interpreter runs the
# kernels on numpy arrays, slowly and exactly. Triton goes into a directory of its own (1 GB; 200 MB are downloaded,
# once), in the version of requirements/gpu.lock, so that what `make setup` has installed stays what it is.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
pinned=$(grep -o '^triton==[0-9.]*' requirements/gpu.lock)
triton=$PWD/.triton/$pinned
if [ ! -e "$triton/.done" ]; then
  rm -rf .triton
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$triton" "$pinned"
  touch "$triton/.done"
fi
export PYTHONPATH=$PWD/tests/interpreter:$triton${PYTHONPATH:+:$PYTHONPATH}
export TRITON_INTERPRET=1 TINSMITH_MODEL_RUNNER=v2
[ $# -gt 0 ] || set -- tests/interpreter \
  tests/component/sampler/test_{sampler,answers,broadcasts,drafts,full,moves,streams,sampled_logprobs,parallel_workers,routed_experts}.py
exec "$python" -m pytest "$@"
