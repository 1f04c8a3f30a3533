"""How the ranks of a trainer world tell each other the outcome of a pass: bytes and flags, never pickle.

Invariant: every function here that is not pure is a collective; all ranks call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.compute.data import Failure, Pass, RowResult

COLLECTIVE_TIMEOUT = timedelta(seconds=300)
"""For which ranks wait for each other where all have the same to do. One that died is seen at once: its
connections close, and the agent ends the others."""

SLOWEST = {"cpu": 10, "cuda": 100}
"""Tokens that a rank computes in a second, at least."""

SLOWEST_SPLIT = 10
"""The same of a sequence that all compute together: what attention takes grows with the square of its
length."""

SLOWEST_READ = 5_000_000
"""Bytes of files that a rank reads in a second, at least: a slower one counts as stuck."""

ELSEWHERE = Failure("server", "internal", "another rank of the trainer failed on this operation")
"""Why an operation failed, on a rank on which it did not."""


_alike: list[dist.ProcessGroup] = []


class _RankReport(msgspec.Struct):
    results: list[RowResult]
    failures: dict[int, Failure]


def part_seconds(work: Pass, ranks: int, device: str) -> float:
    """Within which a rank has computed its part of a pass, whichever it is dealt. Pure.

    What one rank computes goes to who has the least of all passes since a step, or by count where ranks take
    part in each other's: so one may have all of a pass.
    """
    split = [row.length for batch in work.micro_batches if batch.split for row in batch.rows]
    dealt = sum(row.length for batch in work.micro_batches if not batch.split for row in batch.rows)
    return (
        sum(-(-length // ranks) for length in split) / SLOWEST_SPLIT + dealt / SLOWEST[device.split(":")[0]]
    )


def wait_alike(group: dist.ProcessGroup) -> None:
    """Has ranks of another group wait for each other as long as those of the world do. What makes one without
    saying for how long has torch's 10 or 30 minutes."""
    if group not in _alike:
        _alike.append(group)
    group.set_timeout(COLLECTIVE_TIMEOUT)


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Within it ranks wait so much longer for each other."""
    world = dist.group.WORLD
    assert world is not None
    groups = [world, *_alike]
    for group in groups:
        group.set_timeout(COLLECTIVE_TIMEOUT + timedelta(seconds=seconds))
    try:
        yield
    finally:
        for group in groups:
            group.set_timeout(COLLECTIVE_TIMEOUT)


def any_rank(flags: list[bool], device: str) -> list[bool]:
    """Position by position, whether the flag is set on any rank. The lists are equally long on all ranks."""
    return [number < 0 for number in least([-flag for flag in flags], device)]


def meet(device: str) -> None:
    """Returns when every rank has come here."""
    least([0], device)


def meet_when_read(nbytes: int, device: str) -> None:
    """Returns when every rank has come here, which each does when it has read its part of so many bytes, or
    all of them: for who has a slow disk others wait as long as that may take."""
    with patience(nbytes / SLOWEST_READ):
        meet(device)


def least(numbers: list[int], device: str) -> list[int]:
    """Position by position, the smallest number of any rank. The lists are equally long on all ranks."""
    if dist.get_world_size() == 1 or not numbers:
        return numbers
    tensor = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return [int(number) for number in tensor.tolist()]


def everyones(values: Tensor, ranks: int) -> Tensor:
    """The values [n] of all ranks, [ranks, n], in rank order."""
    if ranks == 1:
        return values[None]
    found = values.new_empty(ranks * values.numel())
    dist.all_gather_single(found, values)
    return found.view(ranks, -1)


def exchange(
    work: Pass,
    results: list[RowResult],
    refused: Mapping[int, Failure],
    failed_here: Mapping[int, Failure],
    device: str,
) -> tuple[dict[int, Failure], list[RowResult]]:
    """Tells all ranks which operations of a pass failed, and rank 0 what every row came to. A rank that had
    less to do waits here for those that had more, as long as their tokens may take.

    Args:
        results: of the rows that ran on this rank.
        refused: operations that did not run, on all ranks alike.
        failed_here: those that failed on this rank.

    Returns:
        The operations that failed on any rank, and those that were refused; and on rank 0 one result per row,
        ordered by operation and index, elsewhere nothing.
    """
    report = msgspec.msgpack.encode(_RankReport(results, dict(failed_here)))
    numbers = range(len(work.ops))
    mine = [len(report), *(number in failed_here for number in numbers)]
    heads = _everyones(mine, work, device)
    failed = {
        number: failed_here.get(number, ELSEWHERE)
        for number in numbers
        if any(head[1 + number] for head in heads)
    }
    failures = {**refused, **failed}
    payloads = gather_bytes(report, [head[0] for head in heads])
    reports = [msgspec.msgpack.decode(data, type=_RankReport) for data in payloads]
    if not reports:
        return failures, []
    # The rank on which an operation failed says why, whichever it is.
    told = dict(refused)
    for rank in reports:
        told |= rank.failures
    collected = [result for rank in reports for result in rank.results if result.op not in told]
    collected += [
        RowResult(row.op, row.index, failure=told[row.op])
        for batch in work.micro_batches
        for row in batch.rows
        if row.op in told
    ]
    return failures, sorted(collected, key=lambda result: (result.op, result.index))


def gather_bytes(payload: bytes, sizes: list[int]) -> list[bytes]:
    """The payloads of all ranks, of `sizes` bytes, in rank order on rank 0; nothing elsewhere. They are the
    host's and go from host to host, also where the ranks compute on CUDA."""
    if dist.get_world_size() == 1:
        return [payload]
    buffer = torch.zeros(max(sizes), dtype=torch.uint8)
    buffer[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    group = _of_hosts(dist.group.WORLD)
    if dist.get_rank() != 0:
        dist.gather(buffer, dst=0, group=group)
        return []
    parts = [torch.empty_like(buffer) for _ in sizes]
    dist.gather(buffer, parts, dst=0, group=group)
    return [part[:used].numpy().tobytes() for part, used in zip(parts, sizes, strict=True)]


@cache
def _of_hosts(world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group of all ranks of a world that takes tensors of the host."""
    if dist.get_backend(world) == "gloo":
        return world
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    return group


def _everyones(mine: list[int], work: Pass, device: str) -> list[list[int]]:
    """The numbers of all ranks, in rank order, equally many of each, when all have computed their parts of a
    pass; the host waits for the device once."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return [mine]
    with patience(part_seconds(work, ranks, device)):
        everyone = everyones(torch.tensor(mine, dtype=torch.int64, device=device), ranks)
    found: list[list[int]] = everyone.tolist()
    return found
