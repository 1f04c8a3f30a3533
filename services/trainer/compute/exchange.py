"""How the ranks of a trainer world tell each other the outcome of a pass: bytes and flags, never pickle.

Invariant: every function here is a collective; all ranks call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
import torch.distributed as dist

from services.trainer.compute.data import Failure, Pass, RowResult

ELSEWHERE = Failure("server", "internal", "another rank of the trainer failed on this operation")
"""Why an operation failed, on a rank on which it did not."""


class _RankReport(msgspec.Struct):
    results: list[RowResult]
    failures: dict[int, Failure]


def any_rank(flags: list[bool], device: str) -> list[bool]:
    """Position by position, whether the flag is set on any rank. The lists are equally long on all ranks."""
    if dist.get_world_size() == 1 or not flags:
        return flags
    tensor = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [bool(flag) for flag in tensor.tolist()]


def gather_bytes(payload: bytes, device: str) -> list[bytes]:
    """The payloads of all ranks in rank order on rank 0; nothing elsewhere."""
    world_size = dist.get_world_size()
    if world_size == 1:
        return [payload]
    size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(world_size)]
    dist.all_gather(sizes, size)
    longest = max(int(other) for other in sizes)
    buffer = torch.zeros(longest, dtype=torch.uint8, device=device)
    buffer[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    if dist.get_rank() != 0:
        dist.gather(buffer, dst=0)
        return []
    parts = [torch.empty_like(buffer) for _ in range(world_size)]
    dist.gather(buffer, parts, dst=0)
    return [part[: int(used)].cpu().numpy().tobytes() for part, used in zip(parts, sizes, strict=True)]


def collect(
    work: Pass, results: list[RowResult], failures: Mapping[int, Failure], device: str
) -> list[RowResult]:
    """On rank 0 what every row of a pass came to, ordered by operation and index; nothing elsewhere.

    Args:
        results: of the rows that ran on this rank.
        failures: of the operations that failed, on whatever rank.
    """
    report = msgspec.msgpack.encode(_RankReport(results, dict(failures)))
    reports = [msgspec.msgpack.decode(data, type=_RankReport) for data in gather_bytes(report, device)]
    if not reports:
        return []
    # The rank on which an operation failed says why, whichever it is.
    told = dict(failures)
    for rank in reports:
        told |= {number: failure for number, failure in rank.failures.items() if failure != ELSEWHERE}
    collected = [result for rank in reports for result in rank.results if result.op not in told]
    collected += [
        RowResult(row.op, row.index, failure=told[row.op])
        for batch in work.micro_batches
        for row in batch.rows
        if row.op in told
    ]
    return sorted(collected, key=lambda result: (result.op, result.index))
