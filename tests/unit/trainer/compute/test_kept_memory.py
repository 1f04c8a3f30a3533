"""What a token keeps in memory for the backward pass, counted on tensors without values."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from services.trainer.compute.attention import FLAT_ATTENTION, Sequences, register
from services.trainer.compute.base_model import Scorer, checkpoint_blocks, find_linears
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.logprobs import Targets
from services.trainer.compute.lora.adapter import HEAD, Adapter, select_targets
from services.trainer.compute.lora.grouped import LoraRouter, Segment

TOKENS, LAYERS = 4096, 36
QWEN3_8B = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


class Made(TorchDispatchMode):
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


def kept(layers: int, checkpointing: bool) -> int:
    """Bytes that are in use between the forward and the backward pass of one adapter of rank 32."""
    register()
    config = AutoConfig.for_model("qwen3", num_hidden_layers=layers, **QWEN3_8B)
    sequences = Sequences.of([TOKENS // 4] * 4, "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=FLAT_ATTENTION, dtype=torch.bfloat16
        ).requires_grad_(False)
        if checkpointing:
            checkpoint_blocks(model.eval())
        router, linears = LoraRouter(), find_linears(model)
        for name in linears.keys() - {HEAD}:
            router.hook(model.get_submodule(name), name)
        spec = LoraSpec(32)
        targets = select_targets(linears, spec)
        adapter = Adapter(spec, targets, "m", "cpu", config.hidden_size, torch.bfloat16)
        gradient = torch.zeros_like(adapter.flat)
        scorer = Scorer(model, router, detached=False)
        tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
        with router.route([Segment(TOKENS, adapter, gradient)]), Made() as made:
            logprobs, _ = scorer(tokens, Targets(tokens[0], ((TOKENS, 1),)), sequences)
            held = made.bytes
            logprobs.sum().backward()
    return held


def kept_per_token(checkpointing: bool) -> float:
    few, one_more = kept(1, checkpointing), kept(2, checkpointing)
    return (few + (LAYERS - 1) * (one_more - few)) / TOKENS


def test_a_checkpointed_qwen3_8b_keeps_at_most_half_a_megabyte_a_token() -> None:
    assert kept_per_token(checkpointing=True) <= 0.5e6


def test_without_checkpointing_it_keeps_many_times_that() -> None:
    assert kept_per_token(checkpointing=False) >= 4e6
