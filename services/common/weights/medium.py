"""Which medium a weight group uses: a pure function of where its members are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

Medium = Literal["gloo", "nccl"]


def choose_medium(gpus: Sequence[str]) -> Medium:
    """NCCL when every member has a GPU of its own, else gloo.

    NCCL refuses two ranks on one GPU, which is how trainer and sampler share a machine that has
    only one; adapters are small enough to go over the host then.

    Args:
        gpus: UUID of each member's GPU, "" for a member on a CPU.
    """
    own = "" not in gpus and all(count == 1 for count in Counter(gpus).values())
    return "nccl" if own else "gloo"
