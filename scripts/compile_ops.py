"""Compiles DeepSpeed's CPU collectives, as the first trainer would, into this virtual environment.

Two checkouts that share PyTorch's own cache would each find the other's library out of date, and compile it
again at every start.

With --check it compiles nothing, and exits 0 when the compiled library is there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

NAME = "deepspeed_shm_comm"


def build_folder() -> Path:
    """Where PyTorch is told to keep the library."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(sys.prefix) / "torch_extensions") / NAME


def main() -> int:
    if "--check" in sys.argv[1:]:
        return 0 if (build_folder() / f"{NAME}.so").is_file() else 1
    os.environ["TORCH_EXTENSIONS_DIR"] = str(build_folder().parent)
    # A compilation that was killed leaves this behind, and the next one would wait for it for ever.
    (build_folder() / "lock").unlink(missing_ok=True)
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder().load()
    return 0


if __name__ == "__main__":
    sys.exit(main())
