"""What follows from the trainer's structure alone, counted on tensors without values: no weights, no clock.

Invariant: what is counted is the trainer's own code on the shapes of a real model; only the numbers in the
tensors are missing.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from services.common.contract.tensors import from_values
from services.trainer.compute.attention import FLAT_ATTENTION, Sequences, register
from services.trainer.compute.base_model import Scorer
from services.trainer.compute.blocks.checkpointing import checkpoint_blocks
from services.trainer.compute.collate import collate, in_order
from services.trainer.compute.data import LoraSpec, Row
from services.trainer.compute.logprobs import Targets
from services.trainer.compute.lora.adapter import Adapter, select_targets
from services.trainer.compute.lora.grouped import LoraRouter
from services.trainer.compute.lora.stack import Segment
from services.trainer.compute.lora.targets import find_linears, hook_adapters

LAYERS = 36
QWEN3_8B = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
"""Of the same family: how many kernels run does not depend on sizes, but on the vocabulary's."""


def kernel_calls(ranks: Sequence[int], tokens: int = 1024, vocabulary: int = 64) -> Counter[str]:
    """Kernels of a forward and backward pass over 36 layers by their names, with an adapter of each of these
    ranks, each of other tokens than the next: such ones a CPU multiplies in a loop, and a GPU in one kernel.
    Norms, rotations and attention are written out here, which on CUDA are a kernel or few each. So what
    adapters add is to be seen apart: without ranks there are none, and gradients go down to the embeddings.
    Logits of many tokens and of a large vocabulary are computed in chunks, each with its own kernels.
    """
    few, one_more = (_kernel_calls(layers, tuple(ranks), tokens, vocabulary) for layers in (1, 2))
    return Counter({name: few[name] + (LAYERS - 1) * (calls - few[name]) for name, calls in one_more.items()})


def kept_per_token(*, checkpointing: bool) -> float:
    """Bytes that a Qwen3-8B with an adapter of rank 32 keeps of a token for the backward pass."""
    few, one_more = kept(1, checkpointing), kept(2, checkpointing)
    return (few + (LAYERS - 1) * (one_more - few)) / KEPT_TOKENS


def padding(lengths: Sequence[int]) -> int:
    """Tokens that a micro-batch of datums of these lengths computes and nobody sent."""
    rows = []
    for index, length in enumerate(lengths):
        inputs = {"target_tokens": from_values(np.zeros(length, np.int64))}
        rows.append(Row(0, index, np.full(length, index, "<i4").tobytes(), inputs))
    return collate(in_order(rows), "cpu", shared=True).tokens.numel() - sum(lengths)


_CALL_SEQUENCES, KEPT_TOKENS = 64, 4096
_NO_KERNELS = {"detach", "_unsafe_view"}
_NOT_A_CPU = "meta"
"""A device that is no CPU and that torch has in every build: on it the trainer does as on CUDA, but for what
asks for that by name."""


class _Kernels(TorchDispatchMode):
    """Counts what would run on a device: neither views nor questions about a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        if func.namespace == "aten" and not func.is_view and name not in _NO_KERNELS:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


class _Made(TorchDispatchMode):
    """The memory that operations made and that is still in use."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                storage = tensor.untyped_storage()
                self._made[StorageWeakRef(storage)] = storage.nbytes()
        return result

    @property
    def bytes(self) -> int:
        gc.collect()
        return sum(size for reference, size in self._made.items() if not reference.expired())


class _Adapted:
    """A model without values whose linears are adapted, in bfloat16. Make and use it on fake tensors."""

    def __init__(
        self, shape: dict[str, int], layers: int, ranks: set[int], checkpointing: bool, device: str = "cpu"
    ) -> None:
        config = AutoConfig.for_model("qwen3", num_hidden_layers=layers, **shape)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=FLAT_ATTENTION, dtype=torch.bfloat16
            ).requires_grad_(False)
        if checkpointing:
            checkpoint_blocks(model.eval())
        self.router, linears = LoraRouter(), find_linears(model)
        hook_adapters(model, self.router)
        self.scorer = Scorer(model, self.router, detached=not ranks)
        targets = select_targets(linears, LoraSpec(min(ranks, default=1)))
        self.adapters = {
            rank: Adapter(LoraSpec(rank), targets, "m", device, config.hidden_size, torch.bfloat16)
            for rank in ranks
        }

    def segment(self, tokens: int, rank: int) -> Segment:
        adapter = self.adapters[rank]
        return Segment(tokens, adapter, torch.zeros_like(adapter.flat))


@cache
def _kernel_calls(layers: int, ranks: tuple[int, ...], tokens: int, vocabulary: int) -> Counter[str]:
    register()
    cut = Sequences.of([tokens // _CALL_SEQUENCES] * _CALL_SEQUENCES, "cpu")
    # Of each adapter more tokens than of the one before.
    ends = [round(tokens * ((number + 1) / len(ranks)) ** 1.5) for number in range(len(ranks))]
    lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        shape = {**SMALL, "vocab_size": vocabulary}
        model = _Adapted(shape, layers, set(ranks), checkpointing=False, device=_NOT_A_CPU)
        segments = [model.segment(length, rank) for length, rank in zip(lengths, ranks, strict=True)]
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=_NOT_A_CPU)
        sequences = replace(
            cut,
            offsets=torch.empty_like(cut.offsets, device=_NOT_A_CPU),
            positions=torch.empty_like(cut.positions, device=_NOT_A_CPU),
        )
        with _Kernels() as kernels, model.router.route(segments):
            logprobs, _ = model.scorer(ids, Targets(ids[0], ((tokens, 1),)), sequences)
            logprobs.sum().backward()
    return kernels.calls


@cache
def kept(layers: int, checkpointing: bool) -> int:
    """Bytes that are in use between the forward and the backward pass."""
    register()
    sequences = Sequences.of([KEPT_TOKENS // 4] * 4, "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = _Adapted(QWEN3_8B, layers, {32}, checkpointing)
        segments = [model.segment(KEPT_TOKENS, 32)]
        tokens = torch.zeros(1, KEPT_TOKENS, dtype=torch.int64)
        with model.router.route(segments), _Made() as made:
            logprobs, _ = model.scorer(tokens, Targets(tokens[0], ((KEPT_TOKENS, 1),)), sequences)
            held = made.bytes
            logprobs.sum().backward()
    return held
