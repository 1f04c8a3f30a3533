"""One model on the trainer: its weights, its optimizer, and the gradient since its last step.

That is an adapter on the shared base model; one that trains all weights is full/model.py's, which the engine
asks for the same of a pass and its operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.common.contract.errors import InvalidRequest, ModelNotResident
from services.common.contract.roles import Role
from services.common.contract.tensors import HostTensor
from services.trainer.compute.data import AdamSpec, Failure, ModelState
from services.trainer.compute.lora.adapter import Adapter
from services.trainer.compute.lora.parts import gathered
from services.trainer.compute.lora.snapshot import AdapterSnapshot, NoSnapshot, Snapshot
from services.trainer.compute.memory.buffers import FlatBuffers
from services.trainer.compute.memory.failures import NoMemory
from services.trainer.compute.memory.host import Away
from services.trainer.compute.memory.room import taken_everywhere
from services.trainer.compute.memory.transfer import copied
from services.trainer.compute.optimizer import MOMENTS, AdapterOptimizer, Due, scratch_elements
from services.trainer.order.microbatch import deal


@dataclass
class _Sum:
    """What an operation's gradient is summed up in.

    Attributes:
        flat: float32 [part.padded], once it was asked for.
        fresh: nothing was added, and what is in it does not count.
    """

    flat: Tensor | None = None
    fresh: bool = True


class LoraTenant:
    """An adapter and its AdamW. Unless it says otherwise a method is called on every rank alike.

    Invariant: the gradient is kept per operation until a later operation begins, so that one that fails in
    any of its micro-batches leaves nothing behind; the total is always added up in seq_id order. Each rank
    has moments of its own part alone, and masters where what computes is a copy of them; all else but the
    gradient's values is equal on every rank.

    Args:
        buffers: gradients are taken from it and given back.

    Attributes:
        adapter: the masters.
        away: what it holds, while that is on the host (lora/away.py): nothing else may be asked of it then.
        loads: tokens dealt to each rank since the last step, of passes the model had for itself and
            operations that did not fail; empty: none.
    """

    def __init__(self, adapter: Adapter, buffers: FlatBuffers) -> None:
        self.adapter = adapter
        self.away: Away | None = None
        self.loads: list[int] = []
        self._dealt: dict[int, list[int]] = {}
        """Of each operation that may still fail, its part of `loads`."""
        self._optimizer = AdapterOptimizer(adapter.own, adapter.part.elements)
        self._buffers = buffers
        self._total: Tensor | None = None
        self._closed = False
        self._open: dict[int, _Sum] = {}
        self._failures: dict[int, Failure] = {}

    @property
    def role(self) -> Role:
        """What its head computes."""
        return self.adapter.spec.role

    @property
    def has_gradient(self) -> bool:
        """Whether any operation since the last step added to the gradient, on any rank."""
        return self._closed or bool(self._open)

    def begin(self, seq_id: int) -> None:
        """A forward_backward has work in the coming pass (perhaps not its first)."""
        self._open.setdefault(seq_id, _Sum())

    def gradient(self, seq_id: int) -> tuple[Tensor, bool]:
        """What a begun operation's gradient is summed up in, flat, and whether it is fresh: then nothing was
        added, and what is in it does not count."""
        begun = self._open[seq_id]
        if begun.flat is None:
            begun.flat = self._taken()
        return begun.flat[: self.adapter.part.size], begun.fresh

    def note_added(self, seq_id: int) -> None:
        """Something was added to the gradient of a begun operation."""
        self._open[seq_id].fresh = False

    def deal(self, sizes: Sequence[int], seq_ids: Sequence[int], ranks: int) -> list[list[int]]:
        """Batches of a pass that the model has for itself, dealt to ranks from where its last one ended, so
        that the rank of each depends on the model's own operations only.

        Args:
            sizes, seq_ids: of each batch, and the operation that it is of.
        """
        self.loads = self.loads or [0] * ranks
        dealt = deal(sizes, self.loads)
        for rank, batches in enumerate(dealt):
            for batch in batches:
                self._dealt.setdefault(seq_ids[batch], [0] * ranks)[rank] += sizes[batch]
        return dealt

    def failure(self, seq_id: int) -> Failure | None:
        """Why an earlier part of the operation failed."""
        return self._failures.get(seq_id)

    def fail(self, seq_id: int, failure: Failure) -> None:
        """The operation failed: nothing of its gradient stays, and what is left of it will fail too."""
        self._failures[seq_id] = failure
        self._open.pop(seq_id, None)
        # A replay leaves the operation out, and deals what comes after it as if it had never been.
        dealt = self._dealt.pop(seq_id, None)
        if dealt is not None:
            self.loads = [load - part for load, part in zip(self.loads, dealt, strict=True)]

    def close_before(self, seq_id: int) -> None:
        """Operations before `seq_id` are complete: their gradients join the total, and nobody asks any more
        why one failed."""
        for done in [number for number in self._failures if number < seq_id]:
            del self._failures[done]
        for done in sorted(number for number in self._open if number < seq_id):
            begun = self._open.pop(done)
            self._dealt.pop(done, None)
            self._closed = True
            if begun.flat is None:
                continue
            if self._total is None and not begun.fresh:
                self._total = begun.flat
                continue
            if self._total is not None and not begun.fresh:
                self._total.add_(begun.flat)
            self._buffers.give(begun.flat)

    def clear_gradient(self) -> None:
        """Forgets the gradient and the failures since the last step."""
        if self._total is not None:
            self._buffers.give(self._total)
        self._total, self._closed, self.loads = None, False, []
        self._open.clear()
        self._dealt.clear()
        self._failures.clear()

    def take_gradient(self) -> Tensor:
        """This rank's total, flat, filled up as `Part.padded`; zeros when the rank had no rows. It is taken
        out of the tenant."""
        self._fill()
        total, self._total = self._total, None
        self.clear_gradient()
        assert total is not None
        return total

    def take_step_memory(self, aside: FlatBuffers) -> None:
        """Takes what a step needs beside what is here: the moments of a first one, a gradient where this rank
        had no rows, and its scratch, which goes to `aside`. Nothing else of the model changes."""
        self._fill()
        self._optimizer.start()
        flat = self._optimizer.flat
        aside.give(self._buffers.take(scratch_elements(flat), flat.device))

    def forget_moments(self) -> None:
        """Lets go of the moments of a first step that was not taken."""
        self._optimizer.forget()

    def tensors(self) -> list[Tensor]:
        """All that this rank holds of it. Its operations are complete."""
        self._close()
        gradient = [] if self._total is None else [self._total]
        return [*self.adapter.tensors(), *self._optimizer.moments.values(), *gradient]

    def due(self, gradient: Tensor, adam: AdamSpec) -> Due:
        """A step of this rank's part with a gradient, the sum of all ranks'."""
        return Due(self._optimizer, self.adapter.part.of(gradient), adam)

    def gathers(self, optimizer: bool) -> bool:
        """Whether a snapshot is made of what is spread over the ranks, so that all must call `snapshot`."""
        spread = bool(self._optimizer.moments) if optimizer else False
        return self.adapter.part.ranks > 1 and (spread or not self.adapter.holds_all)

    def snapshot(self, optimizer: bool) -> Snapshot:
        """What it is now, with the moments when `optimizer` is set; any rank may call it alone unless it
        `gathers`: then ranks other than 0 get no tensors."""
        step = self._optimizer.steps
        moments = self._optimizer.moments if optimizer else {}
        mine = [self.adapter.flat, *moments.values()]
        whole = self._gathered(moments) if self.gathers(optimizer) else copied(mine)
        if whole is None:
            return NoSnapshot(ModelState(self.adapter.spec, {}, {}, step))
        masters, *copies = whole
        named = dict(zip(moments, copies, strict=True))
        device = self.adapter.low.device
        return AdapterSnapshot(self.adapter.spec, self.adapter.layout, step, masters, named, device)

    def load_state(self, state: ModelState, optimizer: bool) -> None:
        """Replaces weights, and optimizer state or else starts that afresh. Clears the gradient.

        Raises:
            InvalidRequest: the state is of a model of another shape; nothing changed.
            NoMemory: some rank has none for it; nothing changed.
        """
        found: dict[str, Tensor] = {}
        steps = state.step if optimizer else 0

        def take() -> None:
            found[""] = _flattened(self.adapter, state.adapter)
            for moment in MOMENTS if steps else ():
                named = {name: state.optimizer.get(f"{name}.{moment}") for name in self.adapter.layout}
                found[moment] = self.adapter.part.of(_flattened(self.adapter, named))
            if steps:
                self._optimizer.start()

        def give_back() -> None:
            found.clear()
            self._optimizer.forget()
            self._buffers.clear()

        if not taken_everywhere(take, give_back, str(self.adapter.low.device)):
            raise NoMemory(
                f"out of memory on the state of an adapter of {self.adapter.mib:.1f} MiB, which was not "
                "loaded: nothing was changed"
            )
        self.clear_gradient()
        self.adapter.load(found.pop(""))
        self._optimizer.restore(steps, found)

    def _gathered(self, moments: Mapping[str, Tensor]) -> list[Tensor] | None:
        """Copies of the masters and of moments on rank 0, of what all ranks have; None elsewhere."""
        adapter = self.adapter
        spread = moments.values() if adapter.holds_all else (adapter.flat, *moments.values())
        whole = [gathered(mine, adapter.part) for mine in spread]
        if adapter.part.rank != 0:
            return None
        masters = copied([adapter.flat]) if adapter.holds_all else []
        return [*masters, *(tensor for tensor in whole if tensor is not None)]

    def _close(self) -> None:
        """No operation fails any more."""
        if self._open:
            self.close_before(max(self._open) + 1)

    def _fill(self) -> None:
        """No operation fails any more, and there is a total on this rank too."""
        self._close()
        if self._total is None:
            self._total = self._taken().zero_()

    def _taken(self) -> Tensor:
        """float32 [part.padded], with whatever is in it, but for zeros that fill it up."""
        part, device = self.adapter.part, self.adapter.low.device
        gradient = self._buffers.take(part.padded, device)
        gradient[part.size :].zero_()
        return gradient


def not_here(model_id: str) -> ModelNotResident:
    """The error of a model that this trainer does not have."""
    return ModelNotResident(f"model {model_id} is not on this trainer")


def not_finite(error: FloatingPointError) -> InvalidRequest:
    """The error of a step whose gradient is not finite."""
    return InvalidRequest(
        f"{error}: the step was not applied and the gradient was dropped; check weights, advantages "
        "and logprobs, or lower the learning rate",
        "non_finite_gradient",
    )


def skipped(adam: AdamSpec) -> dict[str, float]:
    """The metrics of a step without a gradient."""
    return {"skipped": 1.0, "grad_norm": 0.0, "learning_rate": adam.learning_rate, "update_norm": 0.0}


def _flattened(adapter: Adapter, named: Mapping[str, HostTensor | None]) -> Tensor:
    """Named matrices of a saved state as one flat host tensor in the adapter's layout.

    Raises:
        InvalidRequest: a tensor is missing, too many, or of another type or shape.
    """
    views = adapter.views(flat := torch.empty(adapter.part.size, dtype=torch.float32))
    if named.keys() != views.keys():
        raise InvalidRequest(
            "the saved state trains other modules than this model; create the model from the state instead",
            "state_mismatch",
        )
    for name, view in views.items():
        array, shape = named[name], tuple(view.shape)
        if array is None or array.dtype != "float32" or array.shape != shape:
            found = "nothing" if array is None else f"{array.dtype} of shape {list(array.shape)}"
            raise InvalidRequest(
                f"the saved state has {found} for {name} where this model has float32 of shape "
                f"{list(shape)}; create the model from the state instead",
                "state_mismatch",
            )
        view.numpy()[...] = array.values()
    return flat
