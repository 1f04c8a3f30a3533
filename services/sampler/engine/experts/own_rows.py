"""The scheduler's part of vLLM's own way of telling experts, which it has for all requests or none.

vLLM names the blocks of rows that workers keep as it names those of keys and values, and keeps the first of
a name. So a request may be told rows that another computed, which began alike; of a sequence whose weights
changed also under the name of those that it had before. Where a row is asked for that is kept no longer,
vLLM ends the engine, and so it does where a request that it gave up begins again with the same step, as
updates of all weights have it. Here the names are of requests, each of which has a number of its own
whenever it begins. As nobody else finds a request's rows, workers hear of those alone that ask.

vLLM means it so: a row belongs to what was before its token, as keys and values do (vllm-project/vllm#45635).
No report was found.

Invariants: a row that leaves is what the routers chose in the step that computed the token, in this very
request. Nothing leaves of a request that does not ask, nor is kept of it.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector, PackedBlockHashes

from services.sampler.worker.prompt_scores import ROUTED_KEY, asked
from services.sampler.worker.v2.routed_experts import StepMetadata

_NAME = struct.Struct(">QQ")
"""Of a block: the number of its request, and its own in it."""


class OwnRows(AuxOutputSchedulerConnector):
    """In the place of vLLM's.

    Args:
        block: tokens whose rows a worker keeps together.
    """

    def __init__(self, block: int) -> None:
        super().__init__()
        self._block = block
        self._fresh = itertools.count()
        self._given: dict[str, tuple[int, int]] = {}
        """Of a request that workers know, its number, and how many of its blocks have names."""
        self._ended: list[str] = []

    def build_connector_meta(self, scheduler_output: Any, requests: Mapping[str, Any]) -> StepMetadata:
        """What workers are told with a step: of its requests that ask, the first token whose row is to leave,
        and the names of blocks that it fills; and of these those that have ended."""
        starts, names = {}, {}
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = requests[name]
            if not asked(request.sampling_params, ROUTED_KEY):
                continue
            starts[name] = _start(request)
            # Before the step: tokens of drafts count, which may not hold; then a block has its name early.
            if packed := self._named(name, (request.num_computed_tokens + count) // self._block):
                names[name] = packed
        anew = tuple(name for name in self._ended if name in starts)
        rest = tuple(name for name in self._ended if name not in starts)
        self._ended = []
        return StepMetadata(self._generation, starts, names, rest, anew)

    def take_output(self, request: Any, output: Any) -> np.ndarray | None:
        """Rows [n, layers, top_k] that leave with the tokens that a request has now."""
        return super().take_output(request, output) if asked(request.sampling_params, ROUTED_KEY) else None

    def request_finished(self, request: Any) -> None:
        """It has ended, or vLLM gives it up for others and begins it again later."""
        if self._given.pop(request.request_id, None) is not None:
            self._ended.append(request.request_id)

    def reset(self) -> None:
        """What workers keep is of no use any more: requests that go on begin anew."""
        super().reset()
        self._given.clear()
        self._ended.clear()

    def _named(self, name: str, full: int) -> PackedBlockHashes | None:
        """Names of a request's blocks before `full` that have none yet."""
        number, first = self._given.get(name) or (next(self._fresh), 0)
        self._given[name] = number, max(first, full)
        packed = b"".join(_NAME.pack(number, index) for index in range(first, full))
        return PackedBlockHashes(packed, _NAME.size) if packed else None


def _start(request: Any) -> int:
    """The first token of a request whose row has not left."""
    return int(request.num_tokens - 1) if request.num_output_tokens else 0
