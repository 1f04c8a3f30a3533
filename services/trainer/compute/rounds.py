"""What one rank computes of a pass: its micro-batches, one after the other.

Invariants: an operation of which a micro-batch failed here is told, and nothing of it runs after that; while
one micro-batch runs on a device the host makes the next, and waits only for what came before both. What all
ranks take part in fails for none of them alone: what breaks it off is raised, and a lack of memory as what is
to be done about it. So is an error of the device, which is no operation's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from prometheus_client import Counter

from services.common.process import failpoints
from services.trainer.compute.base_model import BaseModel
from services.trainer.compute.batch_losses import BatchLosses, Leaving
from services.trainer.compute.blocks.kept import KeptBlocks
from services.trainer.compute.collate import (
    Collated,
    collate,
    computed_tokens,
    idle_batch,
    in_order,
    smaller,
)
from services.trainer.compute.data import Failure, Pass, PassOp, Row, RowResult
from services.trainer.compute.exchange import part_seconds, patience
from services.trainer.compute.full.model import FullModel
from services.trainer.compute.logprobs import shifted
from services.trainer.compute.lora.grouped import LoraRouter
from services.trainer.compute.lora.stack import Segment
from services.trainer.compute.memory.capacity import Footprint
from services.trainer.compute.memory.failures import (
    LacksMemory,
    explained,
    free_cache,
    is_of_device,
    is_out_of_memory,
)
from services.trainer.compute.memory.failures import failure as failure_of
from services.trainer.compute.memory.room import room_within
from services.trainer.compute.split.exchange import joined
from services.trainer.compute.split.share import Share
from services.trainer.compute.tenant import LoraTenant
from services.trainer.order.microbatch import deal, deals_on

logger = logging.getLogger(__name__)

BUSIEST = Counter(
    "tinsmith_busiest_rank_tokens_total", "Tokens of passes on the rank that had the most of each"
)
MEAN = Counter("tinsmith_mean_rank_tokens_total", "The same by rank if each had had equally many")

SPLIT = Counter(
    "tinsmith_micro_batch_splits_total",
    "Times that a micro-batch was refused memory on the first rank and went on in halves",
)

J = TypeVar("J")
P = TypeVar("P")
S = TypeVar("S")


def in_turn(jobs: Sequence[J], prepare: Callable[[J], P], start: Callable[[J, P], S]) -> Iterator[S]:
    """Starts jobs in order. Each is prepared while the one before it runs, and what it started is handed out,
    to be waited for, when the next one has been started."""
    # What is handed over is held by nobody else: it may take much memory.
    ready = [prepare(job) for job in jobs[:1]]
    before: list[S] = []
    for number, job in enumerate(jobs, start=1):
        started = start(job, ready.pop())
        ready += [prepare(following) for following in jobs[number : number + 1]]
        yield from before
        before = [started]
    yield from before


@dataclass(frozen=True)
class _Ready:
    """What a micro-batch of so many rows, with so many tokens, is computed from, on the device or on its way
    there."""

    rows: int
    tokens: int
    batch: Collated
    losses: BatchLosses


@dataclass(frozen=True)
class _Alike:
    """What micro-batches of a pass have in common that follow each other.

    Attributes:
        model: computes them.
        ops: of the pass.
        grad: they have a backward pass; all rows of them want that, or none does.
        failed: operations of which one failed here. More come to it.
        beside: tokens of the largest micro-batch of several sequences, on whichever rank.
    """

    model: BaseModel | FullModel
    ops: Sequence[PassOp]
    grad: bool
    failed: dict[int, Failure]
    beside: int = 0

    def left(self, rows: Sequence[Row]) -> list[Row]:
        """Those of operations that did not fail."""
        return [row for row in rows if row.op not in self.failed]


class Rounds:
    """Runs this rank's part of passes.

    Args:
        tenants: the models that are here, by id.

    Attributes:
        shares_prefixes: as of `Engine`.
    """

    def __init__(
        self,
        base: BaseModel,
        router: LoraRouter,
        tenants: Mapping[str, LoraTenant | FullModel],
        rank: int,
        world_size: int,
        shares_prefixes: bool,
    ) -> None:
        self._base = base
        self._router = router
        self._tenants = tenants
        self._rank = rank
        self._world_size = world_size
        self.shares_prefixes = shares_prefixes
        self._kept: KeptBlocks | None = None
        self._device = base.device
        self._fitted = {False: 0, True: 0}
        """Tokens of the largest micro-batch of several sequences that ran and all ranks took part in, without
        a backward pass, which takes a fraction of the memory, and with one."""

    def keep_blocks(self, memory: int, footprint: Footprint, vocab_size: int) -> None:
        """Has the last blocks of the base model, where they compute their activations again, keep them from
        now on, as far as there is room. Not where ranks share each pass: one that lacked memory would end the
        world.

        Args:
            memory: bytes that this rank may take in all; 0 = what it could have.
        """
        if self._base.blocks is not None and not self._base.collective:
            room = partial(room_within, memory, self._device)
            self._kept = KeptBlocks(self._base.blocks, footprint, vocab_size, room)

    @property
    def kept_bytes(self) -> int:
        """What the largest micro-batch of the last pass took, where blocks may keep their activations; else
        0. Anybody may ask."""
        return 0 if self._kept is None else self._kept.bytes

    def run(self, work: Pass, failures: Mapping[int, Failure]) -> tuple[list[RowResult], dict[int, Failure]]:
        """Runs this rank's micro-batches; its results, and the operations that failed while running."""
        model = self._computes(work)
        if self._kept is not None:
            self._kept.bytes = 0
        kept = [
            ([row for row in batch.rows if row.op not in failures], batch.split)
            for batch in work.micro_batches
        ]
        results: list[RowResult] = []
        loads = [0] * self._world_size
        for row in (row for rows, split in kept if split for row in rows):
            # NCCL counts from when the host asks, which is long before the device has come so far.
            within = patience(part_seconds(work, self._world_size, self._device))
            with self._together(_Alike(model, work.ops, True, {}), [row], row.length), within:
                leaving = self._run_split(model, work.ops, row)
            loads = [load + Share(0, self._world_size, row.length).size for load in loads]
            # All ranks came to the same.
            results += leaving.results() if self._rank == 0 else []
        batches = [in_order(rows) for rows, split in kept if rows and not split]
        if not model.flat:
            batches = [[row] for rows in batches for row in rows]
        failed: dict[int, Failure] = {}
        # What only runs forward builds no graph, whatever it came with.
        for grad in (False, True):
            parts = [[row for row in rows if work.ops[row.op].forward_only != grad] for rows in batches]
            parts = [rows for rows in parts if rows]
            tokens = [sum(row.length for row in rows) for rows in parts]
            # Where every rank takes part in every round, what counts is how many there are.
            sizes = [1] * len(parts) if model.collective else tokens
            dealt = self._deal(work, parts, sizes, grad)
            loads = [
                load + sum(tokens[batch] for batch in own) for load, own in zip(loads, dealt, strict=True)
            ]
            beside = max((size for size, rows in zip(tokens, parts, strict=True) if len(rows) > 1), default=0)
            jobs = [parts[batch] for batch in dealt[self._rank]]
            if model.collective:
                jobs += [[]] * (max(map(len, dealt)) - len(jobs))
            alike = _Alike(model, work.ops, grad, failed, beside)
            for started in in_turn(jobs, partial(self._prepared, alike), partial(self._start, alike)):
                results += [result for each in started for result in each.results()]
        BUSIEST.inc(max(loads))
        MEAN.inc(sum(loads) / self._world_size)
        return results, failed

    def _prepared(self, alike: _Alike, rows: Sequence[Row]) -> _Ready | None:
        """What a micro-batch is computed from; None: it is made where it runs, and fails there if it does."""
        try:
            return self._ready(alike.ops, alike.left(rows))
        except Exception:
            return None

    def _ready(self, ops: Sequence[PassOp], rows: Sequence[Row]) -> _Ready:
        shared = self.shares_prefixes
        batch = collate(rows, self._device, shared=shared) if rows else idle_batch(self._device)
        tokens = sum(row.length for row in rows)
        return _Ready(len(rows), tokens, batch, BatchLosses(ops, rows, batch, self._device))

    def _start(self, alike: _Alike, rows: Sequence[Row], ready: _Ready | None) -> list[Leaving]:
        left = alike.left(rows)
        if ready is not None and ready.rows != len(left):
            ready = None
        if alike.model.collective:
            if ready is None:
                tokens = computed_tokens(left, shared=self.shares_prefixes)
            else:
                tokens = ready.batch.tokens.numel()
            with self._together(alike, left, tokens):
                # What could not be made while another one ran may lack memory here, too.
                return [self._run(alike, ready or self._ready(alike.ops, left))]
        return self._start_or_split(alike, left, ready) if left else []

    def _start_or_split(self, alike: _Alike, rows: Sequence[Row], ready: _Ready | None) -> list[Leaving]:
        """A micro-batch, in halves as long as it does not fit into memory, and the rows of each operation by
        themselves if something else goes wrong with those of several.

        A sequence that does not fit by itself fails its operation, and so does any other error of its rows.

        Raises:
            Exception: of the device.
        """
        try:
            return [self._run(alike, ready or self._ready(alike.ops, rows))]
        except Exception as error:
            if is_of_device(error):
                raise
            kept_less = is_out_of_memory(error) and self._kept is not None and self._kept.gives_way()
            parts = [rows] if kept_less else smaller(rows, in_halves=is_out_of_memory(error))
            if len(parts) > 1:
                self._note_split(error, rows)
            elif not kept_less:
                logger.exception("a micro-batch of %d rows failed", len(rows))
                failure = failure_of(explained(error, rows))
                alike.failed.update({row.op: failure for row in rows})
                return []
        # Only here has the error let go of what the batch had computed.
        free_cache()
        started = []
        for part in parts:
            left = alike.left(part)
            started += self._start_or_split(alike, left, None) if left else []
        return started

    @staticmethod
    def _note_split(error: Exception, rows: Sequence[Row]) -> None:
        if not is_out_of_memory(error):
            logger.exception("a micro-batch of %d rows failed, and each operation's run alone", len(rows))
            return
        SPLIT.inc()
        what = f"a micro-batch of {len(rows)} rows, {sum(row.length for row in rows)} tokens"
        cure = "a smaller --micro-batch-tokens would spare the time that it took"
        logger.warning("%s, was refused memory and runs in halves: %s", what, cure)

    @contextmanager
    def _together(self, alike: _Alike, rows: Sequence[Row], tokens: int) -> Iterator[None]:
        """Within it this rank computes so many tokens and the others take part.

        Raises:
            LacksMemory: this rank has none for its rows. What fitted before was not too large: if this is
                smaller, something else takes more than it did, and larger ones would be next. Or it has none
                for nothing but its part in the others': no operation is to blame for what it keeps, and less
                at once leaves it more, until each micro-batch is of one sequence.
        """
        grad, beside = alike.grad, alike.beside
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if not rows and beside:
                why = f"out of device memory on no rows, beside a micro-batch of {beside} tokens"
                raise LacksMemory(max(beside, self._fitted[grad]) // 2, None, why) from error
            if not rows:
                raise
            if len(rows) == 1:
                op = alike.ops[rows[0].op]
                why = explained(error, rows).message
                raise LacksMemory(0, (op.model_id, op.seq_id), why) from error
            why = f"out of device memory on a micro-batch of {len(rows)} rows, {tokens} tokens"
            raise LacksMemory(max(tokens, self._fitted[grad]) // 2, None, why) from error
        if len(rows) > 1:
            self._fitted[grad] = max(self._fitted[grad], tokens)

    def _computes(self, work: Pass) -> BaseModel | FullModel:
        """The model that a pass runs on."""
        tenants = {op.model_id: self._tenants.get(op.model_id) for op in work.ops}
        full = [tenant for tenant in tenants.values() if isinstance(tenant, FullModel)]
        if full and len(tenants) > 1:
            raise RuntimeError("a full model shares a pass with other models")
        return full[0] if full else self._base

    def _deal(
        self, work: Pass, parts: Sequence[Sequence[Row]], sizes: list[int], grad: bool
    ) -> list[list[int]]:
        """Which batches each rank computes. Of a model alone in the pass each is of one operation."""
        alone = deals_on({op.model_id for op in work.ops} & self._tenants.keys(), trains=grad)
        if alone is None or not isinstance(tenant := self._tenants[alone], LoraTenant):
            return deal(sizes, [0] * self._world_size)
        return tenant.deal(sizes, [work.ops[rows[0].op].seq_id for rows in parts], self._world_size)

    def _run(self, alike: _Alike, ready: _Ready) -> Leaving:
        """One micro-batch forward and, with `grad`, backward."""
        model, ops, grad = alike.model, alike.ops, alike.grad
        batch, losses = ready.batch, ready.losses
        segments = self._segments(ops, batch, grad) if model is self._base else []
        targets = batch.targets
        if grad:
            targets = replace(targets, slope=losses.slope())
        given = model.replay.given(batch.chosen)
        # What prefixes share counts for each: how much of it attention to them keeps is not known.
        chosen = self._kept if grad and model is self._base else None
        keeping = chosen.keeping(ready.tokens) if chosen is not None else nullcontext()
        with torch.set_grad_enabled(grad), self._router.route(segments), given, keeping:
            computed = losses.compute(*model.score(batch.tokens, targets, batch.sequences))
            failpoints.hit("trainer.mid_batch")
            if grad:
                model.backward(computed.total(collective=model.collective))
            # Within the context, as the gradients are kept when it ends: nothing may fail after that.
            leaving = computed.leave()
        if segments and grad:
            self._note_added(ops, batch)
        return leaving

    def _run_split(self, model: BaseModel | FullModel, ops: Sequence[PassOp], row: Row) -> Leaving:
        """One sequence of which each rank computes a part, forward and backward. Each has the loss of all.

        Raises:
            Exception: this rank could not; the others wait for it in a collective.
        """
        exchange = self._base.exchange
        if exchange is None or ops[row.op].forward_only:
            raise RuntimeError("a sequence was split that one rank computes")
        batch = collate([row], self._device, shared=False)
        losses = BatchLosses(ops, [row], batch, self._device)
        shares = [Share(rank, self._world_size, row.length) for rank in range(self._world_size)]
        part = batch.part(shares[self._rank], exchange)
        counts = [batch.outputs(share) for share in shares]
        first = sum(scored for scored, _ in counts[: self._rank])
        targets = replace(part.targets, slope=shifted(losses.slope(), first))
        segments = self._segments(ops, part, True) if model is self._base else []
        with torch.enable_grad(), self._router.route(segments), model.replay.given(part.chosen):
            logprobs, values = model.score(part.tokens, targets, part.sequences)
            computed = losses.compute(
                joined(logprobs, [scored for scored, _ in counts]),
                joined(values[: counts[self._rank][1]], [valued for _, valued in counts]),
            )
            failpoints.hit("trainer.mid_split")
            model.backward(computed.total(collective=model.collective))
            leaving = computed.leave()
        if segments:
            self._note_added(ops, part)
        return leaving

    def _segments(self, ops: Sequence[PassOp], batch: Collated, grad: bool) -> list[Segment]:
        segments = []
        for number, tokens in batch.ops:
            op = ops[number]
            tenant = self._adapted(op)
            gradient, fresh = tenant.gradient(op.seq_id) if grad else (None, False)
            segments.append(Segment(tokens, tenant.adapter, gradient, fresh))
        return segments

    def _note_added(self, ops: Sequence[PassOp], batch: Collated) -> None:
        for number, _ in batch.ops:
            self._adapted(ops[number]).note_added(ops[number].seq_id)

    def _adapted(self, op: PassOp) -> LoraTenant:
        tenant = self._tenants[op.model_id]
        assert isinstance(tenant, LoraTenant)
        return tenant
