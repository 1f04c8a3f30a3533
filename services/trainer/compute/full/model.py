"""A model that trains all of its weights: a copy of the base model in a DeepSpeed engine of its own.

Everything about full models that knows DeepSpeed's insides is here and in `memory`. The engine runs with
`managed_gradient_accumulation` off: backward passes only accumulate, a step reduces and applies. Losses are
token sums, so DeepSpeed's average over the ranks is undone by a factor on the loss.

Invariants: forward and backward passes, steps and states are collectives of all ranks. What a step, a load
and the model itself take of a rank's memory is there on all of them before anything changes. Gradients go
straight into one sum, so an operation cannot be taken out of it again: when one fails after its backward
pass has begun, the sum is in doubt and the world must be restarted and replay (`fail` raises).
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.contract.errors import DataLoss, InvalidRequest, TinsmithError
from services.common.contract.roles import Role
from services.trainer.compute.attention import Sequences
from services.trainer.compute.base_model import Scorer, computes_flat, load_model
from services.trainer.compute.blocks.checkpointing import checkpoint_blocks
from services.trainer.compute.collate import idle_batch
from services.trainer.compute.data import AdamSpec, Failure, ShardedState
from services.trainer.compute.exchange import any_rank, meet_when_read
from services.trainer.compute.full.config import FullModelConfig
from services.trainer.compute.full.memory import Sizes, load_pieces, model_pieces, step_pieces, taken_before
from services.trainer.compute.full.shards import Part, SavedShards, ShardWriter, Writing
from services.trainer.compute.full.snapshot import FullSnapshot
from services.trainer.compute.full.stepping import stepped
from services.trainer.compute.logprobs import Targets, multiplied
from services.trainer.compute.lora.grouped import LoraRouter
from services.trainer.compute.memory.buffers import FlatBuffers
from services.trainer.compute.memory.failures import NoMemory, free_cache
from services.trainer.compute.memory.room import has_room
from services.trainer.compute.memory.transfer import Copies, ToHost, copied
from services.trainer.compute.optimizer import MOMENTS, MeasuredAdamW
from services.trainer.compute.replay.routers import Replay

log = logging.getLogger(__name__)

_GRADIENT_BYTES = _FLOAT_BYTES = 4


class FullModel:
    """One model, as the engine has a `LoraTenant`, and as what computes its own log-probabilities. Use it on
    all ranks alike.

    Attributes:
        collective, flat, replay: as of `BaseModel`.
        sharded: the weights are spread over the ranks, so that all must call `snapshot`.
    """

    collective = True

    def __init__(self, config: FullModelConfig, elements: int, buffers: FlatBuffers) -> None:
        """Starts from the weights of the base model, which are read again.

        Args:
            elements: of all weights.
            buffers: what is kept in them for adapters goes where there is no memory for this model, or for
                what it does.

        Raises:
            NoMemory: some rank has none for it; no rank has any of it.
        """
        pieces = model_pieces(config, elements, dist.get_world_size())
        if not taken_before(pieces, config.device, buffers):
            raise NoMemory("out of memory on a new model that trains all weights, which was not made")
        import deepspeed

        settings = config.deepspeed()
        self.sharded = config.zero_stage == 3
        self._device = config.device
        self._config, self._buffers = config, buffers
        model = load_model(
            config.model_path,
            config.dtype,
            settings if self.sharded else None,
        )
        if not self.sharded:
            meet_when_read(elements * config.dtype.itemsize, config.device)
        if config.activation_checkpointing:
            checkpoint_blocks(model)
        model.requires_grad_(True)
        self.flat, self.replay = computes_flat(model), Replay(model)
        self._parameters: dict[str, Any] = dict(model.named_parameters())
        scorer = Scorer(model, LoraRouter(), detached=False)
        self._adam = MeasuredAdamW(scorer.parameters())
        _support(MeasuredAdamW)
        self._engine, *_ = deepspeed.initialize(model=scorer, optimizer=self._adam, config=settings)
        self._start_moments()
        self._begun: set[int] = set()
        self._failures: dict[int, Failure] = {}

    def score(self, tokens: Tensor, targets: Targets, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """See `BaseModel.score`; log-probabilities are differentiable in the weights when gradients are
        enabled. There is no value head: every token has targets, and there are no values."""
        # Of the loss as `backward` has it.
        targets = replace(targets, slope=multiplied(targets.slope, dist.get_world_size()))
        logprobs, hidden = self._engine(tokens, targets, sequences)
        return logprobs, hidden.new_zeros(0, dtype=torch.float32)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of this rank's part of the loss to the sum."""
        self._engine.backward(loss * dist.get_world_size())

    @property
    def role(self) -> Role:
        return "policy"

    @property
    def has_gradient(self) -> bool:
        return bool(self._begun)

    def begin(self, seq_id: int) -> None:
        self._begun.add(seq_id)

    def failure(self, seq_id: int) -> Failure | None:
        return self._failures.get(seq_id)

    def fail(self, seq_id: int, failure: Failure) -> None:
        """See `LoraTenant.fail`.

        Raises:
            RuntimeError: a part of the operation has run.
        """
        self._failures[seq_id] = failure
        if seq_id in self._begun:
            raise RuntimeError(f"operation {seq_id} failed with its gradient begun: {failure.message}")

    def close_before(self, seq_id: int) -> None:
        """See `LoraTenant.close_before`; gradients are in the sum already."""
        for done in [number for number in self._failures if number < seq_id]:
            del self._failures[done]

    def clear_gradient(self) -> None:
        if self._begun:
            # DeepSpeed itself drops a gradient that is not finite, wherever its stage keeps it.
            batch = idle_batch(self._device)
            logprobs, _ = self.score(batch.tokens, batch.targets, batch.sequences)
            self.backward(logprobs.sum() * math.inf)
            if stepped(self._engine):
                raise RuntimeError("a gradient that was to be dropped was applied")
        self._begun.clear()
        self._failures.clear()

    def step(self, adam: AdamSpec) -> dict[str, float] | FloatingPointError | NoMemory:
        """Sums the gradient over the ranks, applies it and clears it.

        Returns:
            As `Engine.optim_steps`; or the gradient is not finite, and was dropped; or some rank has no
            memory for it, and nothing changed.
        """
        if not taken_before(step_pieces(self._config, self._sizes), self._device, self._buffers):
            return NoMemory(
                "out of memory on the optimizer step of a model that trains all weights, which was not "
                "taken: weights and gradient are as they were"
            )
        for group in self._adam.param_groups:
            group.update(
                lr=adam.learning_rate,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
            )
        zero = self._engine.optimizer
        zero.clip_grad = adam.grad_clip_norm
        self._adam.change = 0.0
        taken = stepped(self._engine)
        self._begun.clear()
        self._failures.clear()
        if not taken:
            return FloatingPointError("the gradient norm is not finite")
        change = torch.as_tensor(self._adam.change, dtype=torch.float64, device=self._device)
        dist.all_reduce(change)
        return {
            "grad_norm": float(zero._global_grad_norm),
            "learning_rate": adam.learning_rate,
            "update_norm": float(change.sqrt()),
        }

    @property
    def gradient_bytes(self) -> int:
        """What its gradient takes of the device at most."""
        return self._elements * _GRADIENT_BYTES

    def snapshot(self, pass_room: int) -> FullSnapshot:
        """What computes, in its element type. Of a `sharded` model ranks other than 0 get no tensors, and
        rank 0 gathers them one by one.

        Copies are on the device if it has the memory for them beside what work may yet take of it; else they
        are on their way to the host when this returns.

        Args:
            pass_room: bytes that passes, gradients of full models, and adapters may yet take of the device.
        """
        steps = self._steps
        item = next(iter(self._parameters.values())).element_size()
        mine = not self.sharded or dist.get_rank() == 0
        names = list(self._parameters) if mine else []
        copies = self._copied(self._weights(mine), self._elements * item, pass_room)
        return FullSnapshot(names, copies, steps)

    def _copied(self, tensors: Iterable[Tensor], size: int, pass_room: int) -> Copies:
        """Copies of tensors of `size` bytes, where there is room for them."""
        fits = has_room(size, pass_room, self._device)
        return Copies(copied(tensors, on_device=fits), torch.device(self._device))

    def _weights(self, mine: bool) -> Iterator[Tensor]:
        """Each weight, whole until the next one is asked for; only for ranks that take it."""
        import deepspeed

        for parameter in self._parameters.values():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.sharded):
                if mine:
                    yield parameter

    def write(self, writer: ShardWriter, directory: str, pass_room: int) -> Writing:
        """Has float32 weights, and after the first step the moments, written to a directory. Training may go
        on at once: where copies of them are is as of `snapshot`, each rank for itself, and they come to the
        host beside the work.

        Args:
            directory: as of `ShardWriter.write`.
            pass_room: as of `snapshot`.
        """
        # Asked for it the device is waited for, and so before there is anything to copy.
        steps = self._steps
        names = self._names(moments=steps > 0)
        parts = list(self._parts(moments=steps > 0))
        size = sum(part.values.nbytes for _, part in parts)
        copies = self._copied((part.values for _, part in parts), size, pass_room)
        places = [(name, part.start, part.whole) for name, part in parts]
        return Writing(steps, size, writer.write(lambda: _on_host(places, copies), names, directory))

    def load_state(self, state: ShardedState, optimizer: bool) -> None:
        """Replaces weights, and optimizer state or else starts that afresh. Clears the gradient.

        Raises:
            InvalidRequest: the state is of a model of another shape; nothing changed.
            DataLoss: its files are damaged, as one rank at least sees them; nothing changed.
            NoMemory: some rank has none for it; nothing changed.
        """
        saved = self._opened(state)
        pieces = load_pieces(self._config, self._sizes, self.has_gradient)
        if not taken_before(pieces, self._device, self._buffers):
            raise NoMemory(
                "out of memory on the state of a model that trains all weights, which was not loaded: "
                "nothing was changed"
            )
        self.clear_gradient()
        with_moments = optimizer and state.step > 0
        with torch.no_grad():
            saved.read(dict(self._parts(moments=with_moments)))
            copies = 1 + len(MOMENTS) if with_moments else 1
            meet_when_read(self._elements * _FLOAT_BYTES * copies, self._device)
            for held in self._partitions:
                kept = self._adam.state[held]
                kept["step"].fill_(state.step if with_moments else 0)
                for moment in () if with_moments else MOMENTS:
                    kept[moment].zero_()
            self._follow_masters()

    def _opened(self, state: ShardedState) -> SavedShards:
        """What is saved, once every rank has seen that it is whole and of this model: what comes after that
        ranks do together."""
        refused: TinsmithError | None = None
        try:
            saved = SavedShards(state.directory)
            saved.check(self._names(moments=state.step > 0))
        except (DataLoss, InvalidRequest) as error:
            refused = error
        damaged, other = any_rank(
            [isinstance(refused, DataLoss), isinstance(refused, InvalidRequest)], self._device
        )
        if damaged and not isinstance(refused, DataLoss):
            raise DataLoss("the saved state is damaged, as another rank sees it") from refused
        if refused is not None:
            raise refused
        if other:
            raise InvalidRequest(
                "the saved state is of another model, as another rank sees it", "state_mismatch"
            )
        return saved

    def close(self) -> None:
        """Frees the memory. The model cannot be used any more."""
        self._engine.destroy()
        self._parameters.clear()
        del self._engine, self._adam
        # DeepSpeed's hooks and parameters refer to each other.
        gc.collect()
        free_cache()

    @property
    def _partitions(self) -> list[Tensor]:
        """This rank's float32 master weights, as the flat tensors that AdamW steps."""
        zero = self._engine.optimizer
        flat = zero.fp32_partitioned_groups_flat if self.sharded else zero.single_partition_of_fp32_groups
        return cast(list[Tensor], flat)

    @property
    def _sizes(self) -> Sizes:
        zero, wholes = self._engine.optimizer, [self._whole(each) for each in self._parameters.values()]
        touched = (
            0 if self.sharded else sum(each.numel() for some in zero.params_in_partition for each in some)
        )
        return Sizes(tuple(held.numel() for held in self._partitions), touched, sum(wholes), max(wholes))

    @property
    def _steps(self) -> int:
        return int(self._adam.state[self._partitions[0]]["step"].item())

    def _start_moments(self) -> None:
        """Makes AdamW's state as its first step would, so that it can be set and read from now on."""
        for held in self._partitions:
            self._adam.start(held)
        if not self.sharded:
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _names(self, *, moments: bool) -> dict[str, int]:
        """Elements of what makes up the state: each weight, and its moments."""
        sizes = {name: int(self._whole(parameter)) for name, parameter in self._parameters.items()}
        of_moments = {f"{name}.{moment}": size for name, size in sizes.items() for moment in MOMENTS}
        return sizes | of_moments if moments else sizes

    def _parts(self, *, moments: bool) -> Iterator[tuple[str, Part]]:
        """This rank's part of the state, by name: views of what is trained."""
        for name, parameter in self._parameters.items():
            for moment in (None, *MOMENTS) if moments else (None,):
                part = self._part_of_3(parameter, moment) if self.sharded else _part(parameter, moment)
                if part is not None:
                    yield name if moment is None else f"{name}.{moment}", part

    def _part_of_3(self, parameter: Any, moment: str | None) -> Part | None:
        zero, whole = self._engine.optimizer, self._whole(parameter)
        held, _ = zero._get_fp32_opt_state_partition(
            parameter, release_swap_buffers=False, optim_state_key=moment
        )
        # The last ranks' parts are filled up to the size of the first one's.
        start = dist.get_rank() * held.numel()
        return Part(held[: whole - start], start, whole) if start < whole else None

    @property
    def _elements(self) -> int:
        return sum(map(self._whole, self._parameters.values()))

    def _whole(self, parameter: Any) -> int:
        return int(parameter.ds_numel if self.sharded else parameter.numel())

    def _follow_masters(self) -> None:
        """Has the weights that compute be those of the masters, as after a step."""
        zero = self._engine.optimizer
        if not self.sharded:
            zero.update_lp_params()
            return
        zero._partition_all_parameters()
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        zero._post_step(set())


def _part(parameter: Any, moment: str | None) -> Part | None:
    """A rank's part of a parameter's master, or of a moment, under ZeRO 1 and 2; None: it has none."""
    held = parameter._hp_mapping
    if held is None:
        return None
    values = held.get_hp_fragment(moment)
    return Part(values, held.lp_fragment_address.start, int(parameter.numel()))


def _on_host(places: Sequence[tuple[str, int, int]], copies: Copies) -> dict[str, Part]:
    """Parts of tensors by name, start and size of the whole, once their copies are on the host."""
    with copies.beside() as made:
        values = ToHost(made).wait()
    return {name: Part(copy, start, whole) for (name, start, whole), copy in zip(places, values, strict=True)}


def _support(optimizer: type[torch.optim.Optimizer]) -> None:
    """Has DeepSpeed take an optimizer without a warning that nobody has tried it."""
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    if optimizer not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(optimizer)
