"""What one rank of a trainer world computes: passes over many tenants' data, optimizer steps, state.

Unless it says otherwise a method is called on every rank, with equal arguments, from one thread at a time.

Adapters share passes on the frozen base model; a model that trains all its weights has a pass for itself.

Invariants: an operation that fails leaves no gradient behind and touches no other operation, and all ranks
agree on which operations failed. A model's gradient is the sum of its operations in seq_id order, each the
sum of its own micro-batches in order, however the passes were composed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from services.common.contract import roles
from services.common.contract.errors import Internal, InvalidRequest, ModelNotResident, TinsmithError
from services.common.contract.loss_schema import check_datum, check_loss
from services.common.contract.tensors import HostTensor
from services.trainer.compute.base_model import BaseModel
from services.trainer.compute.batch_losses import BatchLosses
from services.trainer.compute.collate import Collated, collate, idle_batch, in_order
from services.trainer.compute.data import (
    AdamSpec,
    Failure,
    LoraSpec,
    ModelState,
    Pass,
    PassOp,
    Row,
    RowResult,
)
from services.trainer.compute.exchange import ELSEWHERE, any_rank, collect
from services.trainer.compute.full_model import FullModel, FullModelConfig
from services.trainer.compute.lora.adapter import HEAD, Adapter, select_targets
from services.trainer.compute.lora.grouped import LoraRouter, Segment
from services.trainer.compute.optimizer import FlatBuffers
from services.trainer.compute.tenant import LoraTenant, Tenant
from services.trainer.order.microbatch import deal

logger = logging.getLogger(__name__)


class Engine:
    """One rank of the world.

    Attributes:
        vocab_size: token ids are below this.
        context_length: most tokens of a datum.
        arch: the base model's architecture class name.
        shares_prefixes: what datums of one operation begin with alike is computed once for all of them.
    """

    def __init__(
        self,
        *,
        model_path: str,
        device: str,
        dtype: str,
        zero_stage: int,
        rank: int,
        world_size: int,
        offload_optimizer: bool = False,
        activation_checkpointing: bool = False,
        max_context: int = 0,
    ) -> None:
        """Loads the base model, joining the launcher's process group first unless that was done.

        Args:
            model_path: local directory or hub id.
            device: "cpu" or "cuda".
            dtype: element type of the base, "float32" or "bfloat16"; adapters are always float32.
            zero_stage: 0..3; 1 and 2 equal 0 for a frozen base.
            offload_optimizer: full models hold optimizer state, and step, on the CPU.
            activation_checkpointing: blocks compute their activations again in the backward pass; the same
                numbers in less memory and more time.
            max_context: most tokens of a datum; 0 = as many as the base model takes.

        Raises:
            ValueError: the base model takes fewer tokens than `max_context`.
        """
        element = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        self._router = LoraRouter()
        self._base = BaseModel(
            model_path,
            device=device,
            dtype=element,
            zero_stage=zero_stage,
            router=self._router,
            activation_checkpointing=activation_checkpointing,
        )
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise ValueError(
                f"rank {rank} of {world_size} was asked for, but this process is rank {dist.get_rank()} of "
                f"{dist.get_world_size()}"
            )
        self._rank, self._world_size = rank, world_size
        self._device = self._base.device
        self._full = FullModelConfig(
            model_path, self._device, element, zero_stage, offload_optimizer, activation_checkpointing
        )
        self._tenants: dict[str, LoraTenant | FullModel] = {}
        self._buffers = FlatBuffers(self._device)
        self.vocab_size = self._base.vocab_size
        if max_context > self._base.context_length:
            raise ValueError(
                f"--max-context {max_context}: the model takes {self._base.context_length} tokens"
            )
        self.context_length = max_context or self._base.context_length
        self.arch = self._base.arch
        # On CUDA no kernel attends to a tree.
        self.shares_prefixes = self._base.flat and device == "cpu"

    def create_model(self, model_id: str, lora: LoraSpec | None) -> None:
        """Makes a fresh adapter: equal on all ranks and any world size; it changes nothing until trained.

        Args:
            lora: None: the model trains all weights, and starts from those of the base model.

        Raises:
            InvalidRequest: the base model has nothing of what the adapter should train.
        """
        if model_id in self._tenants:
            raise Internal(f"model {model_id} exists on this trainer already")
        if lora is None:
            self._tenants[model_id] = FullModel(self._full)
            return
        targets = select_targets(self._base.linears, lora)
        hidden_size = self._base.linears[HEAD].in_features
        adapter = Adapter(lora, targets, model_id, self._device, hidden_size, self._full.dtype)
        self._tenants[model_id] = LoraTenant(adapter, self._buffers)

    def drop_model(self, model_id: str) -> None:
        """Frees a model's memory. Nothing happens if there is no such model."""
        tenant = self._tenants.pop(model_id, None)
        if isinstance(tenant, FullModel):
            tenant.close()

    def clear_gradient(self, model_id: str) -> None:
        """Forgets what was accumulated since the model's last step."""
        self._tenant(model_id).clear_gradient()

    def run_pass(self, work: Pass) -> list[RowResult]:
        """Runs the rows and adds to the gradients of their models.

        Micro-batches are dealt to the ranks. An operation may come in parts, over several passes. If any
        part of it fails, all of its rows, in this pass and later ones, have a `failure`, and no gradient of
        it is left. Under ZeRO-3, and of a full model, an exception inside a forward or backward pass is
        raised instead: the ranks are out of step, or a gradient is in doubt, and the world must be restarted.

        Returns:
            On rank 0 one result per row, ordered by operation and index; elsewhere nothing.
        """
        failures = self._refuse(work)
        for number, op in enumerate(work.ops):
            if not op.forward_only and number not in failures:
                self._tenants[op.model_id].begin(op.seq_id)
        results, failed_here = self._run_rounds(work, failures)
        self._agree_on_failures(work, failures, failed_here)
        for op in work.ops:
            if op.model_id in self._tenants:
                self._tenants[op.model_id].close_before(op.seq_id)
        return collect(work, results, failures, self._device)

    def optim_step(self, model_id: str, adam: AdamSpec) -> dict[str, float]:
        """Sums the model's gradient over the ranks, clips it, applies AdamW and clears the gradient.

        Returns:
            grad_norm (before clipping), learning_rate, update_norm; and "skipped" = 1 when there was no
            gradient, in which case nothing changed.

        Raises:
            InvalidRequest: the gradient is not finite; it was dropped and nothing else changed.
        """
        tenant = self._tenant(model_id)
        if not tenant.has_gradient:
            tenant.clear_gradient()
            return {"skipped": 1.0, "grad_norm": 0.0, "learning_rate": adam.learning_rate, "update_norm": 0.0}
        try:
            return tenant.step(adam)
        except FloatingPointError as error:
            raise InvalidRequest(
                f"{error}: the step was not applied and the gradient was dropped; check weights, advantages "
                "and logprobs, or lower the learning rate",
                "non_finite_gradient",
            ) from None

    def state(self, model_id: str, *, optimizer: bool = True) -> ModelState:
        """A copy of the model's state. A pending gradient is not part of it.

        Any rank may call it alone unless `gathers_state`: then the copy is on rank 0.

        Args:
            optimizer: include the moments.
        """
        return self._tenant(model_id).state(optimizer)

    def gathers_state(self, model_id: str) -> bool:
        """Whether the model's state is spread over the ranks, so that all must call `state`."""
        return isinstance(self._tenant(model_id), FullModel)

    def load_state(self, model_id: str, state: ModelState, optimizer: bool) -> None:
        """Replaces the weights, and the optimizer state or else starts that afresh. Clears the gradient.

        Raises:
            InvalidRequest: the state is of a model of another shape; nothing changed.
        """
        tenant = self._tenant(model_id)
        if isinstance(tenant, FullModel) != (state.lora is None):
            raise InvalidRequest(
                "the saved state is of an adapter and the model trains all weights, or the other way round; "
                "create the model from the state instead",
                "state_mismatch",
            )
        tenant.load_state(state, optimizer)

    def _tenant(self, model_id: str) -> Tenant:
        if model_id not in self._tenants:
            raise ModelNotResident(f"model {model_id} is not on this trainer")
        return self._tenants[model_id]

    def _refuse(self, work: Pass) -> dict[int, Failure]:
        """Operations that cannot run, found from the plan alone and so on all ranks alike."""
        failures: dict[int, Failure] = {}
        for number, op in enumerate(work.ops):
            try:
                earlier = self._tenant(op.model_id).failure(op.seq_id)
                if earlier is not None:
                    failures[number] = earlier
                check_loss(op.loss_fn, op.loss_config)
                roles.check_loss(self._tenant(op.model_id).role, op.loss_fn)
            except TinsmithError as error:
                failures[number] = _failure(error)
        for row in (row for batch in work.micro_batches for row in batch.rows if row.op not in failures):
            try:
                check_datum(
                    work.ops[row.op].loss_fn,
                    work.ops[row.op].loss_config,
                    HostTensor("int32", (row.length,), row.tokens),
                    row.loss_inputs,
                    vocab_size=self.vocab_size,
                    context_length=self.context_length,
                    where=f"data[{row.index}]",
                )
            except TinsmithError as error:
                failures[row.op] = _failure(error)
        return failures

    def _run_rounds(
        self, work: Pass, failures: Mapping[int, Failure]
    ) -> tuple[list[RowResult], dict[int, Failure]]:
        """Runs this rank's micro-batches; its results, and the operations that failed while running."""
        model = self._computes(work)
        kept = ([row for row in batch.rows if row.op not in failures] for batch in work.micro_batches)
        batches = [in_order(rows) for rows in kept if rows]
        if not model.flat:
            batches = [[row] for rows in batches for row in rows]
        results: list[RowResult] = []
        failed: dict[int, Failure] = {}
        # What only runs forward builds no graph, whatever it came with.
        for grad in (False, True):
            parts = [[row for row in rows if work.ops[row.op].forward_only != grad] for rows in batches]
            parts = [rows for rows in parts if rows]
            # Only what a replay does again moves where the next batch runs.
            dealt = deal(len(parts), self._world_size, self._first_rank(work, len(parts) if grad else 0))
            for number in range(max(map(len, dealt))):
                mine = dealt[self._rank][number : number + 1]
                rows = [row for batch in mine for row in parts[batch] if row.op not in failed]
                if model.collective:
                    results += self._run_micro_batch(model, work.ops, rows, grad)
                elif rows:
                    results += self._run_or_split(model, work.ops, rows, grad, failed)
        return results, failed

    def _run_or_split(
        self,
        model: BaseModel | FullModel,
        ops: Sequence[PassOp],
        rows: Sequence[Row],
        grad: bool,
        failed: dict[int, Failure],
    ) -> list[RowResult]:
        """A micro-batch, in halves as long as it does not fit into memory.

        A sequence that does not fit by itself fails its operation, any other error those of all `rows`.
        """
        try:
            return self._run_micro_batch(model, ops, rows, grad)
        except Exception as error:
            if not _is_out_of_memory(error) or len(rows) == 1:
                logger.exception("a micro-batch of %d rows failed", len(rows))
                failure = _failure(_explained(error, rows))
                failed.update({row.op: failure for row in rows})
                return []
        # Only here has the error let go of what the batch had computed.
        _free_cache()
        results = []
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            left = [row for row in half if row.op not in failed]
            results += self._run_or_split(model, ops, left, grad, failed) if left else []
        return results

    def _computes(self, work: Pass) -> BaseModel | FullModel:
        """The model that a pass runs on."""
        tenants = {op.model_id: self._tenants.get(op.model_id) for op in work.ops}
        full = [tenant for tenant in tenants.values() if isinstance(tenant, FullModel)]
        if full and len(tenants) > 1:
            raise RuntimeError("a full model shares a pass with other models")
        return full[0] if full else self._base

    def _first_rank(self, work: Pass, batches: int) -> int:
        """Where dealing starts. A model that has the pass for itself goes on where its last pass ended."""
        models = {op.model_id for op in work.ops} & self._tenants.keys()
        if len(models) != 1:
            return 0
        tenant = self._tenants[models.pop()]
        if isinstance(tenant, FullModel):
            # Each of its passes is of one operation alone.
            return 0
        first = tenant.batches
        tenant.batches += batches
        return first

    def _run_micro_batch(
        self,
        model: BaseModel | FullModel,
        ops: Sequence[PassOp],
        rows: Sequence[Row],
        grad: bool,
    ) -> list[RowResult]:
        """One micro-batch forward and, with `grad`, backward.

        Args:
            rows: of operations that all want a backward pass, or all none.
        """
        batch = collate(rows, self._device, shared=self.shares_prefixes) if rows else idle_batch(self._device)
        segments = self._segments(ops, batch, grad) if model is self._base else []
        losses, targets = BatchLosses(ops, rows, batch, self._device), batch.targets
        if grad and model is self._base and not model.collective:
            targets = replace(targets, slope=losses.slope())
        with torch.set_grad_enabled(grad), self._router.route(segments):
            losses.take(*model.score(batch.tokens, targets, batch.sequences))
            if grad:
                model.backward(losses.total(collective=model.collective))
            # Within the context, as the gradients are kept when it ends: nothing may fail after that.
            return losses.results()

    def _segments(self, ops: Sequence[PassOp], batch: Collated, grad: bool) -> list[Segment]:
        segments = []
        for number, tokens in batch.ops:
            op = ops[number]
            tenant = self._tenants[op.model_id]
            assert isinstance(tenant, LoraTenant)
            gradient, fresh = tenant.gradient(op.seq_id) if grad else (None, False)
            segments.append(Segment(tokens, tenant.adapter, gradient, fresh))
        return segments

    def _agree_on_failures(
        self, work: Pass, failures: dict[int, Failure], failed_here: Mapping[int, Failure]
    ) -> None:
        """Adds to `failures` what failed on any rank, and drops the gradients of all failed operations."""
        failed = any_rank([number in failed_here for number in range(len(work.ops))], self._device)
        for number, (op, has_failed) in enumerate(zip(work.ops, failed, strict=True)):
            if has_failed:
                failures[number] = failed_here.get(number, ELSEWHERE)
            if number in failures and op.model_id in self._tenants:
                self._tenants[op.model_id].fail(op.seq_id, failures[number])


def _free_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _failure(error: TinsmithError) -> Failure:
    return Failure(error.category, error.code, error.message)


def _is_out_of_memory(error: Exception) -> bool:
    """On a CPU the error has no type of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _explained(error: Exception, rows: Sequence[Row]) -> TinsmithError:
    if _is_out_of_memory(error):
        _free_cache()
        (row,) = rows
        return Internal(
            f"out of device memory on one sequence of {row.length} tokens; send shorter data, or start the "
            "trainer with --activation-checkpointing on; a smaller --micro-batch-tokens leaves more room for "
            "what else is on the device",
            "out_of_memory",
        )
    return Internal(f"{type(error).__name__}: {error}")
