#!/usr/bin/env bash
# The suite, or the parts of it that are named: each folder of tests in processes of its own, so that what one of them
# does to its process (threads of the SDK, a crash) is not the others' trouble. All run, whatever fails; the quickest
# first. Tests that start nothing large run several at a time: mostly they wait, for processes, sockets and clocks.
# So do those of single services, of families and of clusters, as far as cores and memory go, with a share of the cores
# each: mostly they wait for one service to start, which is the work of one core.
set -uo pipefail
cd "$(dirname "$0")/.."
# Hundreds of processes import the same: the first of them is to compile it for all, whatever else is set.
unset PYTHONDONTWRITEBYTECODE
# pytest answers an interrupt itself: without this the next folder would begin.
trap 'exit 130' INT
parts=(unit helm security component families cluster abuse robustness ecosystem)
[ $# -eq 0 ] || parts=("$@")
cores=$(nproc)
at_once=$((cores < 8 ? cores + 1 : 8))
# What is started beside each other takes up to 7 GiB.
memory=$(awk '/^MemTotal/ { print int($2 / 2 ^ 20 / 7) }' /proc/meminfo)
beside=$((cores < memory ? cores : memory))
beside=$((beside < 1 ? 1 : beside > 4 ? 4 : beside))
failed=()
for part in "${parts[@]}"; do
  how=()
  threads=()
  case $part in
    unit | helm)
      how=(-n "$at_once" --dist worksteal)
      # With more threads than cores they mostly wait for each other, busily.
      threads=("OMP_NUM_THREADS=$((cores > at_once ? cores / at_once : 1))")
      ;;
    component | cluster | families)
      how=(-n "$beside" --dist loadgroup --no-loadscope-reorder)
      threads=("OMP_NUM_THREADS=$((cores / beside))")
      ;;
  esac
  echo "== tests/$part"
  env "${threads[@]}" .venv/bin/python -m pytest "tests/$part" -m "not long" "${how[@]}"
  status=$?
  [ $status -eq 0 ] || failed+=("tests/$part (exit $status)")
done
if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "all passed: ${parts[*]}"
