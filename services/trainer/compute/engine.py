"""What one rank of a trainer world computes: passes over many tenants' data, optimizer steps, state.

Unless it says otherwise a method is called on every rank, with equal arguments, from one thread at a time.

Adapters share passes on the frozen base model; a model that trains all its weights has a pass for itself.

Invariants: an operation that fails leaves no gradient behind and touches no other operation, and all ranks
agree on which operations failed. A model's gradient is the sum of its operations in seq_id order, each the
sum of its own micro-batches in order, however the passes were composed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from services.common.contract import roles
from services.common.contract.errors import Internal, InvalidRequest, ModelNotResident, TinsmithError
from services.common.contract.loss_schema import check_datum, check_loss
from services.common.contract.tensors import HostTensor
from services.common.worlds.sharding import Sharding
from services.trainer.compute.base_model import BaseModel
from services.trainer.compute.data import (
    AdamSpec,
    Failure,
    LoraSpec,
    ModelState,
    Pass,
    RowResult,
    ShardedState,
)
from services.trainer.compute.exchange import exchange
from services.trainer.compute.full.config import FullModelConfig
from services.trainer.compute.full.model import FullModel
from services.trainer.compute.full.shards import ShardWriter, Writing
from services.trainer.compute.lora import away
from services.trainer.compute.lora.adapter import HEAD, Adapter, select_targets
from services.trainer.compute.lora.grouped import LoraRouter
from services.trainer.compute.lora.snapshot import Snapshot
from services.trainer.compute.lora.steps import step_adapters
from services.trainer.compute.memory import page_locked
from services.trainer.compute.memory.buffers import FlatBuffers
from services.trainer.compute.memory.failures import NoMemory
from services.trainer.compute.memory.failures import failure as failure_of
from services.trainer.compute.memory.page_locked import PageLocked
from services.trainer.compute.memory.room import taken_everywhere, without_room
from services.trainer.compute.memory.sizes import ModelSizes
from services.trainer.compute.memory.use import by_purpose, pass_bytes
from services.trainer.compute.prefix.trial import attends_to_trees
from services.trainer.compute.rounds import Rounds
from services.trainer.compute.tenant import LoraTenant, not_finite, not_here, skipped

logger = logging.getLogger(__name__)


class Engine:
    """One rank of the world.

    Attributes:
        vocab_size: token ids are below this; `context_length`: most tokens of a datum.
        arch: the base model's architecture class name; `head_name`: what it calls its output head.
        footprint: what the base model takes of this rank's memory, by arithmetic until it was measured.
        pass_room: bytes that the largest pass that is let in takes of it, once that is known; and
            adapter_room: that adapters may take.
        splits: all ranks can compute a sequence together that none holds alone.
        sizes: what models take.
        routing: how the base model routes tokens, if it computes with experts that it is given; else None.
        page_locked: memory of its host for copies.
        blocks: of the base model, where they compute their activations again in the backward pass.
        device: of this rank, for example "cuda:0"; `world_size`: ranks; `collective`: they share each pass.
    """

    def __init__(
        self,
        *,
        model_path: str,
        device: str,
        dtype: str,
        zero_stage: int,
        offload_optimizer: bool = False,
        activation_checkpointing: bool = False,
        max_context: int = 0,
        sharding: Sharding | None = None,
    ) -> None:
        """Loads the base model, joining the process group first unless that was done.

        Args:
            model_path: local directory or hub id.
            device: "cpu" or "cuda".
            dtype: element type of the base, "float32" or "bfloat16"; adapters are always float32.
            zero_stage: 0..3; 1 and 2 equal 0 for a frozen base.
            offload_optimizer: full models hold optimizer state, and step, on the CPU.
            activation_checkpointing: blocks compute their activations again in the backward pass; the same
                numbers in less memory and more time.
            max_context: most tokens of a datum, for gateways to let in; 0 = as many as the base model takes.

        Raises:
            InvalidRequest: the base model takes fewer tokens than `max_context`, or is none that is trained.
        """
        element = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        sharding = sharding or Sharding()
        self._buffers = FlatBuffers()
        self._router = LoraRouter(self._buffers)
        self._base = BaseModel(
            model_path,
            device=device,
            dtype=element,
            zero_stage=zero_stage,
            sharding=sharding,
            router=self._router,
            activation_checkpointing=activation_checkpointing,
        )
        self._rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device, self.footprint = self._base.device, self._base.footprint
        self._full = FullModelConfig(
            model_path,
            self.device,
            element,
            zero_stage,
            offload_optimizer,
            activation_checkpointing,
            sharding,
        )
        self.sizes = ModelSizes(
            self._base.linears,
            self._base.unadapted,
            self._base.elements,
            element.itemsize,
            self.world_size,
            on_device=self.device != "cpu",
        )
        self.pass_room = self.adapter_room = 0
        self._tenants: dict[str, LoraTenant | FullModel] = {}
        self._in_pass = 0
        """Bytes that the last pass took, as it was counted."""
        self._writer = ShardWriter()
        self.page_locked = PageLocked(self.device, page_locked.share())
        self.vocab_size = self._base.vocab_size
        if max_context > self._base.context_length:
            raise InvalidRequest(
                f"--max-context is {max_context}, and the model takes {self._base.context_length} tokens: "
                "give no more"
            )
        self.context_length = max_context or self._base.context_length
        self.arch, self.collective, self.blocks = self._base.arch, self._base.collective, self._base.blocks
        self.head_name = self._base.head_name
        self.splits, self.routing = self._base.exchange is not None, self._base.replay.routing
        shares = attends_to_trees(self._base.asked, self.context_length, self.device)
        self._rounds = Rounds(self._base, self._router, self._tenants, self._rank, self.world_size, shares)

    @property
    def shares_prefixes(self) -> bool:
        """Whether what datums of one operation begin with alike is computed once for all of them."""
        return self._rounds.shares_prefixes

    def keep_blocks(self, memory: int) -> None:
        """As `Rounds.keep_blocks`."""
        self._rounds.keep_blocks(memory, self.footprint, self.vocab_size)

    def memory(self, adapters: int) -> dict[str, float]:
        """Bytes of each rank by what they are for, as of the last pass. Anybody may ask, at any time.

        Args:
            adapters: that adapters take, gradients and moments included.
        """
        taken = max(self._in_pass, self._rounds.kept_bytes)
        return by_purpose(self.footprint, adapters, self._full.dtype.itemsize, self.world_size, taken)

    def create_model(self, model_id: str, lora: LoraSpec | None, *, drawn: bool = True) -> None:
        """Makes a fresh adapter: equal on all ranks and any world size; it changes nothing until trained.

        Args:
            lora: None: the model trains all weights, and starts from those of the base model.
            drawn: as of `Adapter`.

        Raises:
            InvalidRequest: the base model has nothing of what the adapter should train.
            NoMemory: some rank has none for the model; no rank has any of it.
        """
        if model_id in self._tenants:
            raise Internal(f"model {model_id} exists on this trainer already")
        if lora is None:
            self._tenants[model_id] = FullModel(self._full, self._base.elements, self._buffers)
            return
        targets = select_targets(self._base.linears, lora, self._base.unadapted)
        hidden, dtype, ranks = self._base.linears[HEAD].in_features, self._full.dtype, self.world_size
        made: list[Adapter] = []

        def take() -> None:
            place = ranks, self._rank
            made.append(Adapter(lora, targets, model_id, self.device, hidden, dtype, *place, drawn=drawn))

        def give_back() -> None:
            made.clear()
            self._buffers.clear()

        if not taken_everywhere(take, give_back, self.device):
            raise NoMemory(f"out of memory on a new adapter of rank {lora.rank}, which was not made")
        self._tenants[model_id] = LoraTenant(made[0], self._buffers)

    def drop_model(self, model_id: str) -> None:
        """Frees a model's memory. Nothing happens if there is no such model."""
        tenant = self._tenants.pop(model_id, None)
        if isinstance(tenant, FullModel):
            tenant.close()

    def move_adapter(self, model_id: str, *, to_host: bool) -> bool:
        """Has an idle adapter leave the device for the host, or come back; whether it did, on all ranks
        alike, or was there: where one of them has no memory for it, it stays where it is."""
        tenant = self._tenants.get(model_id)
        if tenant is None:
            raise not_here(model_id)
        assert isinstance(tenant, LoraTenant)
        if to_host == (tenant.away is not None):
            return True
        return away.leave(tenant, self.device) if to_host else away.come_back(tenant, self.device)

    def run_pass(self, work: Pass) -> list[RowResult]:
        """Runs the rows and adds to the gradients of their models.

        Micro-batches are dealt to the ranks, but for a sequence that all compute together. An operation may
        come in parts, over several passes. If any part of it fails, all of its rows, in this pass and later
        ones, have a `failure`, and no gradient of it is left. So it is when any rank has no memory for a
        sequence that all compute, which they find out before they begin. Under ZeRO-3, of a full model, and
        of a sequence that all ranks compute, an exception inside a forward or backward pass is raised, of
        memory as LacksMemory: ranks are out of step, or a gradient in doubt, and the world must be restarted.

        Returns:
            On rank 0 one result per row, ordered by operation and index; elsewhere nothing.
        """
        self.page_locked.tidy()
        failures = self._refuse(work)
        # Before anything of them has begun: of a model that trains all weights nothing could be taken back.
        failures |= without_room(work, failures, self.footprint, self.vocab_size, self.device)
        for number, op in enumerate(work.ops):
            if not op.forward_only and number not in failures:
                self._tenants[op.model_id].begin(op.seq_id)
        self._in_pass = pass_bytes(work, self.footprint, self.vocab_size, self.world_size)
        results, failed_here = self._rounds.run(work, failures)
        failed, collected = exchange(work, results, failures, failed_here, self.device)
        for number, failure in failed.items():
            tenant = self._tenants.get(work.ops[number].model_id)
            if tenant is not None:
                tenant.fail(work.ops[number].seq_id, failure)
        for op in work.ops:
            if op.model_id in self._tenants:
                self._tenants[op.model_id].close_before(op.seq_id)
        return collected

    def optim_step(self, model_id: str, adam: AdamSpec) -> dict[str, float]:
        """One step of `optim_steps`; raises what that answers."""
        (found,) = self.optim_steps([(model_id, adam)])
        if isinstance(found, TinsmithError):
            raise found
        return found

    def optim_steps(self, due: Sequence[tuple[str, AdamSpec]]) -> list[dict[str, float] | TinsmithError]:
        """Sums the gradients of different models over the ranks, clips each, applies AdamW and clears them.
        What a model comes to does not depend on who steps with it.

        Returns:
            Of each model grad_norm (before clipping), learning_rate, update_norm; and "skipped" = 1 when
            there was no gradient, in which case nothing changed. Or an error: the model is not here; some
            rank has no memory for its step (NoMemory), and nothing changed; or its gradient is not finite: it
            was dropped and nothing else changed.
        """
        found: dict[str, dict[str, float] | TinsmithError] = {}
        adapters: list[tuple[str, LoraTenant, AdamSpec]] = []
        for model_id, adam in due:
            try:
                tenant = self._tenant(model_id)
            except ModelNotResident as error:
                found[model_id] = error
                continue
            if not tenant.has_gradient:
                tenant.clear_gradient()
                found[model_id] = skipped(adam)
            elif isinstance(tenant, LoraTenant):
                adapters.append((model_id, tenant, adam))
            else:
                full = tenant.step(adam)
                found[model_id] = not_finite(full) if isinstance(full, FloatingPointError) else full
        steps = step_adapters([(tenant, adam) for _, tenant, adam in adapters], self._buffers)
        for (model_id, _, _), step in zip(adapters, steps, strict=True):
            found[model_id] = not_finite(step) if isinstance(step, FloatingPointError) else step
        return [found[model_id] for model_id, _ in due]

    def snapshot(self, model_id: str, *, optimizer: bool = True) -> Snapshot:
        """What the model is now, without a pending gradient. Any rank may call it alone unless it `gathers`:
        then all do, and rank 0 has it; others have one without tensors.

        Args:
            optimizer: include the moments. Not of a full model: that is `write_state`'s.
        """
        tenant = self._tenant(model_id)
        if isinstance(tenant, LoraTenant):
            return tenant.snapshot(optimizer)
        if optimizer:
            raise TypeError(f"the state of {model_id} is written by every rank")
        return tenant.snapshot(self._room_to_keep())

    def state(self, model_id: str, *, optimizer: bool = True) -> ModelState:
        """A copy of the model's state on the host, as `snapshot`."""
        return self.snapshot(model_id, optimizer=optimizer).state()

    def gathers(self, model_id: str, *, optimizer: bool) -> bool:
        """Whether what such a `snapshot` is made of is spread over the ranks, so that all must call it."""
        tenant = self._tenant(model_id)
        return tenant.gathers(optimizer) if isinstance(tenant, LoraTenant) else tenant.sharded

    def write_state(self, model_id: str, directory: str) -> Writing:
        """Has the state of a full model written by every rank; see `FullModel.write`."""
        tenant = self._tenant(model_id)
        if not isinstance(tenant, FullModel):
            raise TypeError(f"{model_id} is an adapter, whose state rank 0 gets")
        return tenant.write(self._writer, directory, self._room_to_keep())

    def load_state(self, model_id: str, state: ModelState | ShardedState, optimizer: bool) -> None:
        """Replaces the weights, and the optimizer state or else starts that afresh. Clears the gradient.

        Raises:
            InvalidRequest, DataLoss: the state is of a model of another shape, or damaged; nothing changed.
            NoMemory: some rank has none for it; nothing changed.
        """
        match self._tenant(model_id), state:
            case FullModel() as full, ShardedState():
                full.load_state(state, optimizer)
            case LoraTenant() as adapter, ModelState():
                adapter.load_state(state, optimizer)
            case _:
                raise InvalidRequest(
                    "the saved state is of an adapter and the model trains all weights, or the other way "
                    "round; create the model from the state instead",
                    "state_mismatch",
                )

    def _tenant(self, model_id: str) -> LoraTenant | FullModel:
        if model_id not in self._tenants:
            raise not_here(model_id)
        found = self._tenants[model_id]
        if isinstance(found, LoraTenant) and found.away is not None:
            raise RuntimeError(f"model {model_id} is on the host")
        return found

    def _room_to_keep(self) -> int:
        """Bytes that passes, with gradients of full models, and adapters may yet take of the device."""
        tenants = self._tenants.values()
        adapters = [each.adapter for each in tenants if isinstance(each, LoraTenant) and each.away is None]
        held = sum(self.sizes.adapter(adapter.spec) for adapter in adapters)
        gradients = sum(each.gradient_bytes for each in tenants if isinstance(each, FullModel))
        return self.pass_room + gradients + max(0, self.adapter_room - held)

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
                failures[number] = failure_of(error)
        for row in (row for batch in work.micro_batches for row in batch.rows if row.op not in failures):
            try:
                check_datum(
                    work.ops[row.op].loss_fn,
                    work.ops[row.op].loss_config,
                    HostTensor("int32", (row.length,), row.tokens),
                    row.loss_inputs,
                    vocab_size=self.vocab_size,
                    # What gateways let in while `max_context` was more is repeated as it was.
                    context_length=self._base.context_length,
                    where=f"data[{row.index}]",
                )
            except TinsmithError as error:
                failures[row.op] = failure_of(error)
        return failures
