"""Optimizer steps of adapters, of several in as few kernels as of one.

Invariant: what a model comes to does not depend on who steps with it, bit for bit. A step is taken whole or
not at all: memory is taken by all ranks, or by none, before anything of a model changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from services.common.process import failpoints
from services.trainer.compute.data import AdamSpec
from services.trainer.compute.exchange import least
from services.trainer.compute.lora.parts import begin_sum, wait
from services.trainer.compute.memory.buffers import KEPT_BYTES, FlatBuffers
from services.trainer.compute.memory.failures import NoMemory
from services.trainer.compute.memory.room import free_memory, taken_everywhere
from services.trainer.compute.optimizer import step_together

if TYPE_CHECKING:
    from services.trainer.compute.tenant import LoraTenant

Stepped = dict[str, float] | FloatingPointError | NoMemory
"""What a step came to; or its gradient is not finite, or some rank has no memory for it: nothing changed."""


def step_adapters(due: Sequence[tuple[LoraTenant, AdamSpec]], buffers: FlatBuffers) -> list[Stepped]:
    """Sums the gradients of different adapters over the ranks, applies and clears them. Each rank steps its
    part, and gets those of the others.

    Each sum is taken by itself, so its bits do not depend on the others, but all are under way at once; of
    so many adapters at a time that their scratch stays bounded. Where a rank has no memory for them all, in
    halves; a model for whose step alone it has none keeps its gradient, and all else of it is as it was.

    Returns:
        As `step_together`, or that there was no memory.
    """
    return [step for some in _chunks(due, _room(due)) for step in _step_or_split(some, buffers)]


def _step_or_split(due: Sequence[tuple[LoraTenant, AdamSpec]], buffers: FlatBuffers) -> list[Stepped]:
    tenants = [tenant for tenant, _ in due]
    aside = FlatBuffers(sum(_scratch(tenant) for tenant in tenants))

    def take() -> None:
        failpoints.hit("trainer.before_step_memory")
        for tenant in tenants:
            tenant.take_step_memory(aside)

    def give_back() -> None:
        aside.clear()
        buffers.clear()
        for tenant in tenants:
            tenant.forget_moments()

    if taken_everywhere(take, give_back, str(tenants[0].adapter.low.device)):
        found = _step(due, buffers, aside)
    elif len(due) > 1:
        halves = due[: len(due) // 2], due[len(due) // 2 :]
        return [step for half in halves for step in _step_or_split(half, buffers)]
    else:
        found = [
            NoMemory(
                f"out of memory on the optimizer step of an adapter of {tenants[0].adapter.mib:.1f} MiB, "
                "which was not taken: weights and gradient are as they were"
            )
        ]
    return found


def _step(
    due: Sequence[tuple[LoraTenant, AdamSpec]], buffers: FlatBuffers, aside: FlatBuffers
) -> list[Stepped]:
    """As `step_adapters`, of those for which every rank has the memory. `aside`: their scratch."""
    ranks = dist.get_world_size()
    gradients = [tenant.take_gradient() for tenant, _ in due]
    if ranks > 1:
        parts = [tenant.adapter.part for tenant, _ in due]
        wait([begin_sum(whole, part) for whole, part in zip(gradients, parts, strict=True)])
    failpoints.hit("trainer.mid_step")
    steps = [tenant.due(whole, adam) for (tenant, adam), whole in zip(due, gradients, strict=True)]
    found = step_together(steps, aside, ranks)
    wait([work for tenant, _ in due for work in tenant.adapter.begin_renewal()])
    aside.move_to(buffers)
    for (tenant, _), whole, step in zip(due, gradients, found, strict=True):
        buffers.give(whole)
        if isinstance(step, FloatingPointError):
            tenant.forget_moments()
    return [*found]


def scratch_room(free: int) -> int:
    """Bytes of scratch that steps which are taken at once may have, of a device with so many free. Pure.

    Moments of first steps and gradients of a rank that computed nothing are three times as much beside it: of
    what is free a quarter goes at most. A group that finds less all the same steps in halves.
    """
    return max(KEPT_BYTES, free // 16)


def _room(due: Sequence[tuple[LoraTenant, AdamSpec]]) -> int:
    """`scratch_room` of the rank that has least. On a CPU what is beyond the memory that is used again costs
    more than it saves."""
    size = sum(_scratch(tenant) for tenant, _ in due)
    if size <= KEPT_BYTES or due[0][0].adapter.low.device.type == "cpu":
        return KEPT_BYTES
    device = str(due[0][0].adapter.low.device)
    (room,) = least([scratch_room(free_memory(device))], device)
    return room


def _scratch(tenant: LoraTenant) -> int:
    return 4 * tenant.adapter.part.padded


def _chunks(
    due: Sequence[tuple[LoraTenant, AdamSpec]], most: int
) -> Iterator[list[tuple[LoraTenant, AdamSpec]]]:
    """Steps in order, of adapters with so many bytes of scratch together or of one that has more."""
    some: list[tuple[LoraTenant, AdamSpec]] = []
    size = 0
    for tenant, adam in due:
        taken = _scratch(tenant)
        size += taken
        if some and size > most:
            yield some
            some, size = [], taken
        some.append((tenant, adam))
    if some:
        yield some
