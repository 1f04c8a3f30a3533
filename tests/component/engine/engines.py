"""The engine of this process, which is one rank of a world that has met."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from services.trainer.compute.engine import Engine
from services.trainer.compute.logprobs import LogprobHead


def engine_of(directory: Path, *, dtype: str = "float32", stage: int = 0, **more: Any) -> Engine:
    """On the CPU; more: as `Engine` takes it."""
    return Engine(model_path=str(directory), device="cpu", dtype=dtype, zero_stage=stage, **more)


@contextmanager
def heads_in_chunks(positions: int) -> Iterator[list[int]]:
    """Within it output heads compute so many positions at once; the list has how many each time."""
    forward, chunk = LogprobHead.forward, LogprobHead._chunk
    computed: list[int] = []

    def cut(head: LogprobHead, *given: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(head, "chunk_positions", positions)
            return forward(head, *given)

    def counted(head: LogprobHead, hidden: Tensor, *rest: Any) -> Tensor:
        computed.append(hidden.shape[0])
        return chunk(head, hidden, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LogprobHead, "forward", cut)
        patched.setattr(LogprobHead, "_chunk", counted)
        yield computed
