"""What two ranks of a world come to together, and what one of them comes to alone, of every architecture; of
those with routed experts, with given ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from services.common.contract.tensors import from_values
from services.trainer.compute import attention
from services.trainer.compute.attention import FLAT_ATTENTION, Sequences, give_kernel_sinks, register
from services.trainer.compute.base_model import Scorer
from services.trainer.compute.blocks.checkpointing import checkpoint_blocks
from services.trainer.compute.collate import Collated, collate
from services.trainer.compute.data import Row
from services.trainer.compute.lora.adapter import Adapter, largest, select_targets
from services.trainer.compute.lora.grouped import LoraRouter
from services.trainer.compute.lora.stack import Segment
from services.trainer.compute.lora.targets import find_linears, find_unadapted, hook_adapters
from services.trainer.compute.prefix import flash
from services.trainer.compute.replay.routers import Replay
from services.trainer.compute.split.asked import Asked, splits
from services.trainer.compute.split.exchange import Exchange, before, joined
from services.trainer.compute.split.share import Share
from tests.component.engine.data import given_experts
from tests.unit.trainer.compute.architectures import FLAT, config_of, random_model
from tests.unit.trainer.compute.prefix.kernels import Plain

TOKENS, VOCAB = 23, 60
OWN_TOKENS, BACK = (1, 2, 3, 7), 3
MEMORY_TOKENS, HEADS, KEY_HEADS, HEAD_SIZE = 512, 8, 4, 32


class Compared(msgspec.Struct):
    """Of one architecture. `outputs`: the largest difference of a log-probability, `gradient`: of an element
    of the adapter's gradient, as a part of the largest element."""

    splits: bool
    plain: bool
    outputs: float = 0.0
    gradient: float = 0.0


class Memory(msgspec.Struct):
    """Of attention, in all that goes in and comes out of this rank's tokens: what was in use at most."""

    alone: float
    together: float


class Report(msgspec.Struct):
    """`before`: by each rank's number of tokens whether those before them are right, and their gradient."""

    models: dict[str, Compared] = {}
    before: dict[int, bool] = {}
    memory: Memory | None = None


class _Model:
    """A tiny model with an adapter on all that can have one."""

    def __init__(self, model_type: str, checkpointing: bool) -> None:
        model = random_model(config_of(model_type, FLAT[model_type]), FLAT_ATTENTION).requires_grad_(False)
        if checkpointing:
            checkpoint_blocks(model)
        self.router, self.replay, linears = LoraRouter(), Replay(model), find_linears(model)
        hook_adapters(model, self.router)
        self.scorer = Scorer(model, self.router, detached=False)
        spec, unadapted = largest(linears, 4, find_unadapted(model)), find_unadapted(model)
        targets = select_targets(linears, spec, unadapted)
        self.adapter = Adapter(spec, targets, "m", "cpu", model.config.hidden_size)
        self.adapter.flat.normal_(std=0.1, generator=torch.Generator().manual_seed(3))

    def asked(self, batch: Collated) -> list[Asked]:
        asked: list[Asked] = []
        with torch.no_grad():
            self.scorer(
                batch.tokens[:, :1],
                batch.targets[0:1],
                dataclasses.replace(Sequences.of([1], "cpu"), asked=asked),
            )
        return asked

    def trained(self, batch: Collated, put: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Log-probabilities, and the gradient of a sum of them with different weights."""
        gradient = torch.zeros_like(self.adapter.flat)
        segment = Segment(batch.tokens.shape[1], self.adapter, gradient)
        with self.router.route([segment]), self.replay.given(batch.chosen):
            own, _ = self.scorer(batch.tokens, batch.targets, batch.sequences)
            logprobs = put(own)
            (logprobs * torch.linspace(-1, 1, TOKENS)).sum().backward()
        return logprobs.detach(), gradient


def compared(model_type: str, checkpointing: bool) -> Compared:
    rng = np.random.default_rng(1)
    inputs = {"target_tokens": from_values(rng.integers(0, VOCAB, TOKENS))}
    row = Row(0, 0, rng.integers(0, VOCAB, TOKENS).astype("<i4").tobytes(), inputs)
    model = _Model(model_type, checkpointing)
    if model.replay.routing is not None:
        row = given_experts(row, model.replay.routing)
    batch = collate([row], "cpu", shared=False)
    ranks = dist.get_world_size()
    asked = model.asked(batch)
    found = Compared(splits(asked, ranks), all(layer.plain for layer in asked))
    if not (found.plain or found.splits):
        return found
    shares = [Share(rank, ranks, TOKENS) for rank in range(ranks)]
    counts = [batch.outputs(share)[0] for share in shares]
    expected, wanted = model.trained(batch, lambda own: own)
    part = batch.part(shares[dist.get_rank()], Exchange(ranks, "cpu"))
    logprobs, gradient = model.trained(part, lambda own: joined(own, counts))
    dist.all_reduce(gradient)
    found.outputs = float((logprobs - expected).abs().max())
    found.gradient = float((gradient - wanted).abs().max() / wanted.abs().max())
    return found


def reaches_back(tokens: int) -> bool:
    """Whether a rank of so many tokens gets the last ones of the ranks before."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(4)
    whole = torch.randn(1, 2, ranks * tokens, generator=generator, requires_grad=True)
    weights = torch.randn(ranks, 1, 2, BACK, generator=generator)
    padded = nn.functional.pad(whole, (BACK, 0))
    expected = [padded[..., each * tokens :][..., :BACK] for each in range(ranks)]
    (wanted,) = torch.autograd.grad(sum((a * b).sum() for a, b in zip(expected, weights, strict=True)), whole)
    parts = whole.detach().split(tokens, dim=-1)
    own = parts[rank].clone().requires_grad_()
    found = before(own, BACK)
    (gradient,) = torch.autograd.grad((found * weights[rank]).sum(), own)
    return torch.equal(found, expected[rank]) and torch.allclose(gradient, wanted.split(tokens, dim=-1)[rank])


class _Peak(TorchDispatchMode):
    """The most memory that what operations made took at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[StorageWeakRef, int] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and not func.is_view:
                storage = tensor.untyped_storage()
                self._made[StorageWeakRef(storage)] = storage.nbytes()
        alive = sum(size for reference, size in self._made.items() if not reference.expired())
        self.bytes = max(self.bytes, alive)
        return result


class _Layer:
    num_key_value_groups = HEADS // KEY_HEADS
    is_causal = True


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    output: Tensor = sdpa_attention_forward(_Layer, query, key, value, None, is_causal=True)[0]  # type: ignore[arg-type]
    return output


def _peak(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
    given = [
        torch.randn(1, heads, MEMORY_TOKENS, HEAD_SIZE, requires_grad=True)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    with _Peak() as peak:
        output = attend(*(each * 1 for each in given))
        torch.autograd.grad(output, given, torch.ones_like(output))
    elements = 2 * (HEADS + KEY_HEADS) * HEAD_SIZE
    return peak.bytes / (4 * elements * MEMORY_TOKENS)


@contextmanager
def given_sinks(model_type: str) -> Iterator[None]:
    """A kernel in plain PyTorch computes attention with sinks, of a tiny model's shape."""
    config = config_of(model_type, FLAT[model_type])
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attention, "_has_kernel", lambda query, value: True)
        patched.setattr(flash, "FlashAttention", Plain)
        patched.setattr(attention, "_right_with_sinks", set())
        for ranks in (1, dist.get_world_size()):
            give_kernel_sinks(heads // ranks, key_heads // ranks, config.head_dim)
        yield


def scenario() -> Report:
    """In a world of several ranks."""
    register()
    exchange = Exchange(dist.get_world_size(), "cpu")

    def together(*given: Tensor) -> Tensor:
        return exchange.attend(_attention, *given)

    kept = {"kept": False, "checkpointed": True}
    models = {
        f"{model_type}, {name}": compared(model_type, checkpointing)
        for model_type in FLAT
        for name, checkpointing in kept.items()
    }
    with given_sinks("gpt_oss"):
        models |= {
            f"gpt_oss by a kernel, {name}": compared("gpt_oss", checkpointing)
            for name, checkpointing in kept.items()
        }
    reached = {tokens: reaches_back(tokens) for tokens in OWN_TOKENS}
    return Report(models, reached, Memory(_peak(_attention), _peak(together)))
