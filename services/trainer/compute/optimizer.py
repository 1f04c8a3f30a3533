"""AdamW over flat tensors, a rank's part of an adapter and of a full model, with every setting given anew for
each step.

Invariant: a step depends only on the masters, the moments, the step count and the step's own gradient and
settings, bit for bit the same whatever other adapters step with it; `restore` takes moments and count over
bit for bit. Norms are of the whole adapter, and the same number on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from services.trainer.compute.data import AdamSpec
from services.trainer.compute.exchange import everyones
from services.trainer.compute.lora.parts import ROW
from services.trainer.compute.memory.buffers import FlatBuffers

_LEAST_SQUARES = 2.0**-80
"""A sum of squares below which those that count may have been lost in float32."""

_BLOCK = 2**15
"""Elements whose norm a CPU takes in float64, which it does faster of some than of many."""

_DEVICE_BLOCK = 2**20
"""Elements whose norm a device takes in float32; those of blocks are put together in float64."""

STEP_BLOCK = 2**22
"""Elements of a full model that step at once, whose values before are kept to measure the change. Norms are
taken of as many."""

HOST_BLOCK = 2**17
"""Elements that each thread of a CPU steps at once: they stay in its core's cache, so that to measure the
change takes no sweep over memory of its own."""

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdapterOptimizer:
    """torch.optim.AdamW (decoupled weight decay) of one flat float32 tensor; `step_together` steps it.

    Args:
        elements: of the moments, where that is more than `flat` has: what fills them up stays zero.

    Attributes:
        flat: what it changes.
        steps: taken so far.
        moments: "exp_avg" and "exp_avg_sq", flat; none before the first step.
    """

    def __init__(self, flat: Tensor, elements: int = 0) -> None:
        self.flat = flat
        self.steps = 0
        self.moments: dict[str, Tensor] = {}
        self._elements = max(elements, flat.numel())

    def start(self) -> None:
        """Makes the moments of a first step, unless they are there."""
        if not self.moments:
            self.moments = {name: self.flat.new_zeros(self._elements) for name in MOMENTS}

    def forget(self) -> None:
        """Lets go of the moments of a first step that was not taken."""
        if not self.steps:
            self.moments = {}

    def restore(self, steps: int, moments: Mapping[str, Tensor]) -> None:
        """Takes over another's steps and moments, of as many elements as `flat` has or more."""
        self.steps = steps
        if not steps:
            self.moments = {}
            return
        self.start()
        for name, kept in self.moments.items():
            kept[: moments[name].numel()].copy_(moments[name])


class MeasuredAdamW(torch.optim.AdamW):
    """torch's fused AdamW, which sums up the squared change of what it steps, without a copy of it.

    A block steps after the other, so that scratch is of one block whatever the size of the tensors. State of
    each tensor is there before its first step, as `start` makes it.

    Attributes:
        change: sum of the squared changes of all elements since it was last set to 0; float64 [].
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.0, weight_decay=0.0)
        self.change: Tensor | float = 0.0

    def start(self, flat: Tensor) -> None:
        """Gives a flat tensor the state of one that has not been stepped yet."""
        zeros = {name: torch.zeros_like(flat) for name in MOMENTS}
        self.state[flat] = {"step": torch.zeros((), device=flat.device), **zeros}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Steps what has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for flat in group["params"]:
                if flat.grad is not None:
                    self._step_blocks(flat, flat.grad, group)

    def _step_blocks(self, flat: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[flat]
        beta1, beta2 = group["betas"]
        adam = AdamSpec(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
        step = _Step(flat, gradient, state["exp_avg"], state["exp_avg_sq"])
        scratch = flat.new_empty(min(STEP_BLOCK, scratch_elements(flat)))
        state["step"] += 1
        self.change = _step_by_blocks(step, state["step"], adam, scratch) + self.change


class Due(NamedTuple):
    """A step that is to be taken. `gradient`: flat, changed in place."""

    optimizer: AdapterOptimizer
    gradient: Tensor
    adam: AdamSpec


def step_together(
    due: Sequence[Due], buffers: FlatBuffers, ranks: int = 1
) -> list[dict[str, float] | FloatingPointError]:
    """Clips each gradient to its global norm and applies it, in as few kernels as their settings allow.

    The host waits for the device twice, whatever the number of steps.

    Args:
        due: of different adapters on one device.
        buffers: where the scratch comes from, of `scratch_elements` for each.
        ranks: that call it together, each with its own part of the same adapters.

    Returns:
        Of each grad_norm (global L2 norm before clipping), learning_rate, update_norm (L2 norm of the
        change); or the error of a gradient that is not finite, of which nothing was applied.
    """
    norms = _roots(_square_sums([step.gradient for step in due]), ranks) if due else []
    finite = [number for number, norm in enumerate(norms) if norm < float("inf")]
    for number in finite:
        step = due[number]
        if step.adam.grad_clip_norm > 0:
            step.gradient.mul_(min(1.0, step.adam.grad_clip_norm / (norms[number] + 1e-6)))
    squares: dict[int, Tensor] = {}
    for group in _alike(due, finite):
        squares |= zip(group, _apply([due[number] for number in group], buffers), strict=True)
    changes = dict(zip(squares, _roots([*squares.values()], ranks), strict=True))
    return [
        {"grad_norm": norm, "learning_rate": step.adam.learning_rate, "update_norm": changes[number]}
        if number in changes
        else FloatingPointError(f"gradient norm is {norm}")
        for number, (step, norm) in enumerate(zip(due, norms, strict=True))
    ]


def scratch_elements(flat: Tensor) -> int:
    """Of the scratch that `step_together` takes for each that it steps."""
    elements = flat.numel()
    return min(elements, HOST_BLOCK * torch.get_num_threads()) if flat.device.type == "cpu" else elements


def _alike(due: Sequence[Due], numbers: Sequence[int]) -> Iterable[list[int]]:
    """Steps that one call may take: their settings are equal, but for the clipping, which is done."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for number in numbers:
        adam = due[number].adam
        settings = (adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay)
        groups.setdefault(settings, []).append(number)
    return groups.values()


class _Step(NamedTuple):
    """What AdamW changes, of equally many elements. Flat."""

    masters: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def _apply(group: Sequence[Due], buffers: FlatBuffers) -> list[Tensor]:
    """Steps of one setting; the sum of the squares of what each changed, float64 []."""
    steps = []
    for optimizer, gradient, _ in group:
        optimizer.start()
        moments = (optimizer.moments[name][: optimizer.flat.numel()] for name in MOMENTS)
        steps.append(_Step(optimizer.flat, gradient, *moments))
    device, adam = group[0].optimizer.flat.device, group[0].adam
    taken = torch.tensor([each.optimizer.steps + 1.0 for each in group], device=device).unbind()
    scratch = [buffers.take(scratch_elements(step.masters), device) for step in steps]
    if device.type == "cpu":
        each = zip(steps, taken, scratch, strict=True)
        squares = [_step_by_blocks(step, count, adam, block) for step, count, block in each]
    else:
        squares = _step(steps, taken, adam, scratch)
    for unused, (optimizer, _, _) in zip(scratch, group, strict=True):
        buffers.give(unused)
        optimizer.steps += 1
    return squares


def _step_by_blocks(step: _Step, taken: Tensor, adam: AdamSpec, scratch: Tensor) -> Tensor:
    """`_step` of one, of as many elements after the other as the scratch has."""
    blocks = zip(*(values.split(max(scratch.numel(), 1)) for values in step), strict=True)
    squares = [_step([_Step(*block)], [taken], adam, [scratch[: block[0].numel()]])[0] for block in blocks]
    return torch.stack(squares).sum()


@torch.no_grad()
def _step(
    steps: Sequence[_Step], taken: Sequence[Tensor], adam: AdamSpec, scratch: list[Tensor]
) -> list[Tensor]:
    """One sweep of AdamW over the tensors: the step of a small model costs as much as its memory traffic.

    Args:
        taken: of each, how many steps it will have taken, float32 [].
        scratch: of as many elements as each has.

    Returns:
        The sum of the squares of each one's changes, float64 [].
    """
    masters, gradients, first, second = (list(values) for values in zip(*steps, strict=True))
    torch._foreach_copy_(scratch, masters)
    torch._fused_adamw_(
        masters,
        gradients,
        first,
        second,
        [],
        list(taken),
        amsgrad=False,
        beta1=adam.beta1,
        beta2=adam.beta2,
        lr=adam.learning_rate,
        weight_decay=adam.weight_decay,
        eps=adam.eps,
        maximize=False,
    )
    torch._foreach_sub_(scratch, masters)
    return _square_sums(scratch)


def _roots(squares: list[Tensor], ranks: int) -> list[float]:
    """L2 norms by the sums of squares, float64 [], of each rank's part; the host waits once."""
    if not squares:
        return []
    # Not summed by the ranks' backend: its order would depend on how many tensors there are.
    parts = everyones(torch.stack(squares), ranks).tolist()
    return [math.sqrt(math.fsum(sums)) for sums in zip(*parts, strict=True)]


def _square_sums(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Sums of the squares of flat tensors, each float64 []; pieces have norms in float32, and no copy."""
    if tensors[0].device.type == "cpu":
        return [
            torch.stack([_square_sum(block) for block in each.split(STEP_BLOCK)]).sum() for each in tensors
        ]
    blocks = [values.split(_DEVICE_BLOCK) for values in tensors]
    norms = torch.stack(torch._foreach_norm([block for each in blocks for block in each])).double()
    return [part.square().sum() for part in norms.split([len(each) for each in blocks])]


def _square_sum(values: Tensor) -> Tensor:
    """The sum of the squares of a flat tensor of a CPU, float64 [], to 1e-6 of it. Unlike by a dot product it
    does not depend on where in memory the tensor begins, and is as near where all values are the same."""
    whole = values.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(values[:whole].view(-1, ROW), dim=1).double()
    found = rows.square().sum() + torch.linalg.vector_norm(values[whole:]).double().square()
    if _LEAST_SQUARES < float(found) < math.inf or not values.any():
        return found
    # The squares may be none that float32 has.
    blocks = [torch.linalg.vector_norm(block, dtype=torch.float64) for block in values.split(_BLOCK)]
    return torch.stack(blocks).square().sum()
