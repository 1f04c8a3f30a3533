#!/usr/bin/env bash
# Generates the Python packages tinsmith.v1 and tinsmith.internal.v1 from proto/, when proto/ changed.
set -euo pipefail
cd "$(dirname "$0")/.."
mapfile -t files < <(find proto -name '*.proto' | LC_ALL=C sort)
stamp=tinsmith/.generated-$(sha256sum "${files[@]}" scripts/proto.sh | sha256sum | cut -c1-16)
[ -e "$stamp" ] && exit 0
rm -rf tinsmith && mkdir tinsmith
PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m grpc_tools.protoc -Iproto \
  --python_out=. --grpc_python_out=. --mypy_out=quiet:. "${files[@]}"
touch "$stamp"
