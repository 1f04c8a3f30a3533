"""Updates of all weights of a model in the process of the engine's core, beside vLLM's scheduler.

An update falls between two steps of an engine that is paused: none is under way, and all requests are of the
weights that are replaced. Tokens up to `num_computed_tokens` have keys and values of the old ones; the last
token, which these sampled and nothing has computed yet, gets its own from the new ones.

vLLM's own `weight_versions` (vllm-project/vllm#49040) are no substitute: they tell of a sequence that has
ended which label its whole engine had at each token, and neither which adapter nor whether keys and values
were kept.

Invariants: a block of keys and values is cached under the name of the weights that computed all of it and all
before it, or under a name that no request ever has. A sequence keeps its keys and values only if all before
its last token have been computed; another begins again as one of the new weights alone, and so does one that
vLLM gave up to make room; both are said.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from services.sampler.engine.shifts.core import Told, between_steps, forget_ended, is_still, note

UPDATE = "tinsmith_update"
"""The method of vLLM's engine core that is told of updates."""

_NAME_BYTES = 32

BlockHasher = Callable[[Any], list[Any]]


def install(scheduler: Any) -> None:
    """Has a scheduler's requests go on with other weights when the engine core's `UPDATE` says that they are
    there."""
    updates = Updates(scheduler)
    between_steps(scheduler, updates.apply, updates.told)
    scheduler.tinsmith_updates = updates
    setattr(EngineCore, UPDATE, _update)


def _update(core: Any, former: Any, present: Any, version: Any) -> None:
    updates: Updates = core.scheduler.tinsmith_updates
    updates.update(former, present, version)


class Updates:
    """The updates under one scheduler's requests.

    Attributes:
        told: what is known of the updates under each.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._version = 0
        self._mixed: dict[str, BlockHasher] = {}
        """Of requests whose keys and values are of several versions, what names those of one."""
        self.told: dict[str, Told] = {}

    def update(self, former: str, present: str, version: int) -> None:
        """The workers have other weights. No step is under way.

        Args:
            former, present: names of the weights; the names of a request's blocks begin with that of its own.
            version: of the present ones.

        Raises:
            RuntimeError: a request is of other weights than the former ones.
        """
        self._version = version
        # What begins again goes to the front of those that wait: so it stays in order.
        for request in reversed(list(self._scheduler.requests.values())):
            if request.is_finished():
                continue
            if request.lora_request is not None or not (request.cache_salt or "").startswith(former):
                raise RuntimeError(f"{request.request_id} is not of {former}")
            request.cache_salt = present + request.cache_salt.removeprefix(former)
            self._go_on(request)

    def apply(self) -> None:
        """Has what vLLM gave up begin as one of its present weights alone. Call it before each step is
        scheduled."""
        forget_ended(self._scheduler, self._mixed, self.told)
        for name in list(self._mixed):
            request = self._scheduler.requests[name]
            if request.status == RequestStatus.PREEMPTED and is_still(request):
                self._anew(request)

    def _go_on(self, request: Any) -> None:
        if request.status == RequestStatus.RUNNING:
            if request.num_output_tokens and request.num_computed_tokens >= request.num_tokens - 1:
                self._keep(request)
                return
            # What is computed of it so far would be of both.
            self._scheduler.running.remove(request)
            self._scheduler._preempt_request(request, time.monotonic())
            # As vLLM has it for what it gives up and may begin again with the same step.
            self._scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        self._anew(request)

    def _keep(self, request: Any) -> None:
        self._note(request, kept=True)
        size = self._scheduler.hash_block_size
        if request.request_id not in self._mixed:
            self._mixed[request.request_id] = request._block_hasher
            request._block_hasher = _namer(size)
            # vLLM names a block when its last token is known, which may be before that is computed.
            del request.block_hashes[request.num_computed_tokens // size :]
            request.update_block_hashes()

    def _anew(self, request: Any) -> None:
        self._note(request, kept=False)
        if (hasher := self._mixed.pop(request.request_id, None)) is not None:
            request._block_hasher = hasher
        request.block_hashes.clear()
        request.update_block_hashes()

    def _note(self, request: Any, kept: bool) -> None:
        note(self.told, request.request_id, (int(request.num_output_tokens), self._version, kept))


def _namer(size: int) -> BlockHasher:
    """Names blocks of so many tokens by chance: nobody knows these names."""

    def names(request: Any) -> list[bytes]:
        return [os.urandom(_NAME_BYTES) for _ in range(len(request.block_hashes), request.num_tokens // size)]

    return names
