#!/usr/bin/env bash
# Generates the Python package tinsmith.v1 from proto/, when proto/ changed.
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=tinsmith/.generated-$(cat proto/tinsmith/v1/*.proto | sha256sum | cut -c1-16)
[ -e "$stamp" ] && exit 0
rm -rf tinsmith && mkdir tinsmith
PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m grpc_tools.protoc -Iproto \
  --python_out=. --grpc_python_out=. --mypy_out=quiet:. proto/tinsmith/v1/*.proto
touch "$stamp"
