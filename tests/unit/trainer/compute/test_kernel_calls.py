"""What a micro-batch costs by its adapters, counted on tensors without values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from services.trainer.compute.attention import FLAT_ATTENTION, Sequences, register
from services.trainer.compute.base_model import Scorer, find_linears
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.logprobs import Targets
from services.trainer.compute.lora.adapter import HEAD, Adapter, select_targets
from services.trainer.compute.lora.grouped import LoraRouter, Segment
from tests.unit.trainer.compute.architectures import config_of

TOKENS, SEQUENCES = 1024, 64


class Kernels(TorchDispatchMode):
    """Counts what would run on a device: neither views nor questions about a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        computes = func.namespace == "aten" and not func.is_view and "detach" not in func.name()
        self.calls += computes
        return func(*args, **(kwargs or {}))


@contextmanager
def without_values() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def calls(layers: int, ranks: list[int]) -> int:
    """Kernels of one forward and backward pass over a model with adapters of these ranks."""
    register()
    config = config_of("qwen3", {"num_hidden_layers": layers})
    sequences = Sequences.of([TOKENS // SEQUENCES] * SEQUENCES, "cpu")
    with without_values():
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=FLAT_ATTENTION, dtype=torch.bfloat16
        ).requires_grad_(False)
        router, linears = LoraRouter(), find_linears(model)
        for name in linears.keys() - {HEAD}:
            router.hook(model.get_submodule(name), name)
        scorer = Scorer(model, router, detached=False)
        targets = select_targets(linears, LoraSpec(8))
        adapters = {
            rank: Adapter(LoraSpec(rank), targets, "m", "cpu", config.hidden_size, torch.bfloat16)
            for rank in set(ranks)
        }
        each = TOKENS // len(ranks)
        segments = [Segment(each, adapters[rank], torch.zeros_like(adapters[rank].flat)) for rank in ranks]
        tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
        with Kernels() as kernels, router.route(segments):
            logprobs, _ = scorer(tokens, Targets(tokens[0], ((TOKENS, 1),)), sequences)
            logprobs.sum().backward()
    return kernels.calls


def calls_of_36_layers(ranks: list[int]) -> int:
    few, one_more = calls(1, ranks), calls(2, ranks)
    return few + 35 * (one_more - few)


@pytest.mark.parametrize("ranks", [[32] * 64, [8, 16, 32, 5] * 2], ids=["64 of one rank", "of several ranks"])
def test_many_adapters_cost_about_as_many_kernels_as_one(ranks: list[int]) -> None:
    assert calls_of_36_layers(ranks) <= 1.3 * calls_of_36_layers([32])
