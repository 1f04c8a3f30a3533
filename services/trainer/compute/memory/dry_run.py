"""What a token takes, measured: the engine computes an operation that nobody sent.

Invariant: it leaves no model and no gradient behind, and a rank without memory for it ends no start. All
ranks take part, with equal arguments, and go the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.common.contract.errors import Internal
from services.common.contract.tensors import from_values
from services.trainer.compute.data import MicroBatch, Pass, PassOp, Row
from services.trainer.compute.exchange import any_rank
from services.trainer.compute.lora.adapter import MAX_RANK
from services.trainer.compute.memory.capacity import (
    Capacity,
    Footprint,
    at_least,
    capacity,
    least_of_all,
    steady,
    warn_of_halves,
)
from services.trainer.compute.memory.failures import OUT_OF_MEMORY
from services.trainer.compute.memory.machine import operation_memory, own_memory
from services.trainer.compute.memory.use import largest_pass_bytes
from services.trainer.order.prefixes import BLOCK

if TYPE_CHECKING:
    from services.trainer.compute.engine import Engine

log = logging.getLogger(__name__)

MODEL_ID = "dry-run"
FEW, MANY = 256, 2048
"""Tokens; what does not grow with them cancels out."""
LEAST = 128
"""Tokens; of fewer nothing is learned."""


ANSWER = 32
"""Tokens of each answer to one prompt."""

Work = Callable[[int, int], tuple[list[Row], int]]
"""What a rank is given of an operation: which rank, and about how many tokens; and how many it computes."""

_PERIOD = 4
"""Blocks after which their kinds come again: in some models each fourth is of another one."""


class _DoesNotFit(Exception):
    """Some rank has no memory for so many tokens; raised on all."""


def find_capacity(
    engine: Engine, memory: int, micro_batch_tokens: int, *, keeps_blocks: bool = False
) -> Capacity:
    """What the world can hold: the least of what its ranks can.

    On CUDA tokens are measured, unless passes are collectives: there a rank that ran out of memory would
    leave the others waiting. On CPU, unless `memory` is given, a sequence of a micro-batch's tokens and one
    adapter of any rank are let in whatever the arithmetic says.

    Args:
        memory: bytes that this rank may take, on a GPU at most what it could have; 0 = that, or its share of
            the machine.
        micro_batch_tokens: up to which several sequences are computed at once.
        keeps_blocks: blocks keep their activations from then on, as `Engine.keep_blocks` says.

    Raises:
        Internal: a small operation could not be computed, for another reason than memory.
    """
    found = engine.footprint
    if engine.device != "cpu" and not engine.collective:
        found = measured(engine, peak_of_cuda, keeps_blocks=keeps_blocks)
    given = own_memory(engine.device)
    if memory:
        given = memory if engine.device == "cpu" else min(memory, given)
    together = engine.world_size if engine.splits else 1
    host = operation_memory(given, engine.device)
    mine = capacity(
        given, host, found, engine.context_length, engine.vocab_size, micro_batch_tokens, together
    )
    if not memory and engine.device == "cpu":
        adapter = engine.sizes.adapter(engine.sizes.largest_adapter(MAX_RANK))
        mine = at_least(mine, min(engine.context_length, micro_batch_tokens), adapter)
    engine.footprint = found
    least = least_of_all(mine, engine.device)
    promised = least if engine.device == "cpu" else steady(least, engine.context_length)
    engine.pass_room = largest_pass_bytes(found, promised, engine.vocab_size, micro_batch_tokens, together)
    engine.adapter_room = promised.adapter_bytes
    warn_of_halves(promised, micro_batch_tokens, engine.context_length)
    if keeps_blocks:
        engine.keep_blocks(memory)
    return promised


def measured(engine: Engine, peak: Callable[[Callable[[], None]], int], *, keeps_blocks: bool) -> Footprint:
    """An engine's footprint with what a token takes, as far as enough of them fit. Arguments and errors as of
    `token_bytes`.

    Args:
        keeps_blocks: also what a token adds in a block that keeps its activations; 0 where too few fit.
    """
    found, work = engine.footprint, one_sequence
    token = token_bytes(engine, peak, work)
    if token is None:
        log.warning("what a token takes could not be measured; arithmetic says it")
        return replace(found, block=0.0)
    if engine.shares_prefixes and engine.context_length >= LEAST:
        # Sums are in float32 there, and states go on in several sequences.
        shared = token_bytes(engine, peak, answers)
        if shared is not None and shared > token:
            token, work = shared, answers
    found = replace(found, token=token)
    if keeps_blocks and found.block:
        found = replace(found, block=_block_bytes(engine, peak, token, work))
    return found


def _block_bytes(
    engine: Engine, peak: Callable[[Callable[[], None]], int], token: float, work: Work
) -> float:
    blocks = engine.blocks
    if blocks is None or blocks.count < 2:
        return 0.0
    # One block is there anyway when it is computed again, after those that keep theirs are done with.
    few, many = (_PERIOD, 2 * _PERIOD) if blocks.count >= 2 * _PERIOD else (1, blocks.count)
    taken = {1: token}
    try:
        for kept in sorted({few, many} - taken.keys()):
            blocks.kept = kept
            more = token_bytes(engine, peak, work)
            if more is None:
                log.warning("no block keeps its activations: a pass in which some do does not fit")
                return 0.0
            taken[kept] = more
    finally:
        blocks.kept = 0
    return max(1.0, (taken[many] - taken[few]) / (many - few))


def token_bytes(engine: Engine, peak: Callable[[Callable[[], None]], int], work: Work) -> float | None:
    """Bytes that each token of a micro-batch takes until its backward pass is done; None: too few fit.

    Args:
        peak: the most memory that was in use while a call ran, in bytes.
        work: what is computed.

    Raises:
        Internal: it could not be computed, for another reason than memory.
    """
    many = min(MANY, engine.context_length)
    least = min(LEAST, many)
    while many >= least:
        few = max(1, min(FEW, many // 2))
        engine.create_model(MODEL_ID, engine.sizes.largest_adapter(rank=8))
        try:
            # The first time allocates what stays.
            _, less, more = (peak(partial(_run, engine, work, tokens)) for tokens in (few, few, many))
            computed = work(0, many)[1] - work(0, few)[1]
            return max(1.0, (more - less) / max(1, computed))
        except _DoesNotFit:
            log.warning("at the start a pass of %d tokens did not fit", many)
        finally:
            engine.drop_model(MODEL_ID)
        many //= 2
    return None


def peak_of_cuda(run: Callable[[], None]) -> int:
    """The most that was allocated on this process's GPU while `run` ran."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def one_sequence(rank: int, tokens: int) -> tuple[list[Row], int]:
    """One for each rank."""
    return [_row(rank, np.zeros(tokens, dtype="<i4"))], tokens


def answers(rank: int, tokens: int) -> tuple[list[Row], int]:
    """Answers to one prompt, which is half of all."""
    prompt = tokens // 2 // BLOCK * BLOCK
    count = max(2, (tokens - prompt) // ANSWER)
    rows = []
    for number in range(count):
        ids = np.zeros(prompt + ANSWER, dtype="<i4")
        ids[prompt] = number
        rows.append(_row(rank * count + number, ids))
    return rows, prompt + count * ANSWER


def _run(engine: Engine, work: Work, tokens: int) -> None:
    """A forward_backward of a micro-batch for each rank.

    Raises:
        _DoesNotFit, Internal: on all ranks alike.
    """
    batches = [MicroBatch(work(rank, tokens)[0]) for rank in range(engine.world_size)]
    given = Pass([PassOp(MODEL_ID, tokens, "cross_entropy")], batches)
    # Only rank 0 is told what became of the rows.
    failed = [result.failure for result in engine.run_pass(given) if result.failure is not None]
    full = [failure.code == OUT_OF_MEMORY for failure in failed]
    broken, does_not_fit = any_rank([not all(full), any(full)], engine.device)
    if broken:
        reasons = "; ".join(dict.fromkeys(failure.message for failure in failed)) or "see the log of rank 0"
        raise Internal(f"{tokens} tokens could not be computed at the start: {reasons}")
    if does_not_fit:
        raise _DoesNotFit


def _row(index: int, ids: np.ndarray) -> Row:
    inputs = {
        "target_tokens": from_values(np.zeros(len(ids), dtype="<i8")),
        "weights": from_values(np.ones(len(ids), dtype="<f4")),
    }
    return Row(0, index, ids.tobytes(), inputs)
