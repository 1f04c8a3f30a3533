#!/usr/bin/env bash
# Fails when the contract breaks what its baseline promised: of the public package nothing may go or be renamed; of the
# internal one, what is written must still be readable.
#   scripts/proto_breaking.sh [proto directory]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "${1:-$root/proto}"
"$root/.venv/bin/buf" breaking --against baseline.binpb
"$root/.venv/bin/buf" breaking --config buf.internal.yaml --against baseline.binpb
