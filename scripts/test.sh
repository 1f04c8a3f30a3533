#!/usr/bin/env bash
# The whole suite: each folder of tests in a process of its own, so that what one of them does to its process (threads of
# the SDK, a crash) is not the others' trouble. All run, whatever fails; the quickest first.
set -uo pipefail
cd "$(dirname "$0")/.."
# pytest answers an interrupt itself: without this the next folder would begin.
trap 'exit 130' INT
parts=(unit helm component cluster abuse robustness ecosystem)
failed=()
for part in "${parts[@]}"; do
  echo "== tests/$part"
  .venv/bin/python -m pytest "tests/$part" -m "not long"
  status=$?
  [ $status -eq 0 ] || failed+=("tests/$part (exit $status)")
done
if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "all passed: ${parts[*]}"
