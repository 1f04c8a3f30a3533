#!/usr/bin/env bash
# The suite, or the parts of it that are named: each folder of tests in processes of its own, so that what one of them
# does to its process (threads of the SDK, a crash) is not the others' trouble. All run, whatever fails. Tests that start
# nothing large run several at a time: mostly they wait, for processes, sockets and clocks. So do those of single
# services, of families and of clusters, as far as cores and memory go, with a share of the cores each: mostly they wait
# for one service to start, which is the work of one core. Parts that are one process with one cluster run beside each
# other instead, as far as that goes; what each of them says comes when it has ended.
set -uo pipefail
cd "$(dirname "$0")/.."
# Hundreds of processes import the same: only the first of them is to compile it.
unset PYTHONDONTWRITEBYTECODE
parts=(unit helm component families cluster robustness abuse ecosystem security)
[ $# -eq 0 ] || parts=("$@")
cores=$(nproc)
at_once=$((cores < 8 ? cores + 1 : 8))
# What is started beside each other takes up to 7 GiB.
memory=$(awk '/^MemTotal/ { print int($2 / 2 ^ 20 / 7) }' /proc/meminfo)
beside=$((cores < memory ? cores : memory))
beside=$((beside < 1 ? 1 : beside > 4 ? 4 : beside))
outputs=$(mktemp -d)
trap 'rm -rf "$outputs"' EXIT
# pytest answers an interrupt itself: without this the next folder would begin.
trap 'wait; exit 130' INT

# Runs the tests of a part that is one of so many processes, with further arguments for pytest, and notes whether they
# failed. Each process has its share of the cores: with more threads than cores they mostly wait for each other, busily.
# What the shell does not wait for ignores interrupts, unless it is told not to.
run() {
  local part=$1 processes=$2 status
  shift 2
  echo "== tests/$part"
  OMP_NUM_THREADS=$((cores > processes ? cores / processes : 1)) \
    env --default-signal=INT .venv/bin/python -m pytest "tests/$part" -m "not long" \
    --junitxml="$outputs/$part.xml" "$@"
  status=$?
  [ $status -eq 0 ] || echo "tests/$part (exit $status)" >>"$outputs/failed"
}

whole=()
for part in "${parts[@]}"; do
  case $part in
    unit | helm) run "$part" "$at_once" -n "$at_once" --dist worksteal ;;
    component | cluster | families) run "$part" "$beside" -n "$beside" --dist loadgroup --no-loadscope-reorder ;;
    *) whole+=("$part") ;;
  esac
done
[ ${#whole[@]} -gt 1 ] || beside=1
for part in "${whole[@]}"; do
  if [ "$beside" -eq 1 ]; then
    run "$part" 1
    continue
  fi
  while [ "$(jobs -rp | wc -l)" -ge "$beside" ]; do wait -n; done
  echo "-- tests/$part begins"
  { run "$part" "$beside" >"$outputs/$part" 2>&1; flock "$outputs" cat "$outputs/$part"; } &
done
wait
if [ -e "$outputs/failed" ]; then
  .venv/bin/python scripts/failed_tests.py "$outputs"/*.xml
  sed 's/^/FAILED: /' "$outputs/failed"
  exit 1
fi
echo "all passed: ${parts[*]}"
