"""Compiles DeepSpeed's CPU collectives into PyTorch's extension cache, as the first trainer would.

With --check it compiles nothing, and exits 0 when the compiled library is there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

NAME = "deepspeed_shm_comm"


def build_folder() -> Path:
    """Where PyTorch keeps the library: see torch.utils.cpp_extension, which takes a second to import."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen is not None:
        return Path(chosen) / NAME
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return cache / "torch_extensions" / f"{python}_cpu" / NAME


def main() -> int:
    if "--check" in sys.argv[1:]:
        return 0 if (build_folder() / f"{NAME}.so").is_file() else 1
    # A compilation that was killed leaves this behind, and the next one would wait for it for ever.
    (build_folder() / "lock").unlink(missing_ok=True)
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder().load()
    return 0


if __name__ == "__main__":
    sys.exit(main())
