"""What a rank says that it can hold, against what PyTorch keeps."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from bench.counted.counts import KEPT_TOKENS, QWEN3_8B, kept
from services.trainer.compute.attention import FLAT_ATTENTION, Sequences, _seen, register
from services.trainer.compute.data import AdamSpec, LoraSpec
from services.trainer.compute.lora.adapter import Adapter, select_targets
from services.trainer.compute.lora.targets import find_linears
from services.trainer.compute.memory.buffers import FlatBuffers
from services.trainer.compute.memory.capacity import (
    _BESIDE_LINEARS,
    GIB,
    Capacity,
    Footprint,
    _of_linear_attention,
    _width,
    adapter_bytes,
    adapter_host_bytes,
    at_least,
    capacity,
    footprint,
    steady,
    warn_of_halves,
)
from services.trainer.compute.recurrent.layers import begin_anew
from services.trainer.compute.split.asked import Asked
from services.trainer.compute.tenant import LoraTenant
from tests.unit.trainer.compute.architectures import FLAT, SINGLE, config_of

NO_HEAD = (0, 1024)
"""A vocabulary of nothing, beside the tokens of a micro-batch."""


def shape(model_type: str, **settings: Any) -> Any:
    """A model without values."""
    register()
    config = AutoConfig.for_model(model_type, **settings)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=FLAT_ATTENTION, dtype=torch.bfloat16
        )


class MakesMasks(TorchDispatchMode):
    """All the bytes that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.bytes += result.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_token_takes_more_than_the_arithmetic_says_nor_half_of_it(checkpointing: bool) -> None:
    said = footprint(shape("qwen3", num_hidden_layers=2, **QWEN3_8B), 2, checkpointing=checkpointing, ranks=1)
    # One block is computed again at a time, which is not kept at the end of the forward pass.
    again = kept(2, False) - kept(1, False) if checkpointing else 0
    measured = (kept(2, checkpointing) + again) / KEPT_TOKENS
    assert measured <= said.token <= 1.5 * measured
    # What a block adds that keeps its own.
    assert again / KEPT_TOKENS <= said.block <= 1.5 * again / KEPT_TOKENS
    assert said.square == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{}, {"linear_num_key_heads": 4}, {"linear_key_head_dim": 64, "linear_value_head_dim": 256}],
    ids=["as in Qwen3-Next", "more heads of keys", "larger values"],
)
def test_no_token_of_linear_attention_takes_more_than_the_arithmetic_says_nor_half_of_it(
    settings: dict[str, int], dtype: torch.dtype
) -> None:
    few = {"hidden_size": 256, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    config = AutoConfig.for_model("qwen3_next", **{**few, **settings})
    layer = Qwen3NextGatedDeltaNet(config, 0).to(dtype).requires_grad_(False)
    begin_anew(layer)
    weights = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
    held: dict[int, int] = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return saved

    x = torch.randn(1, 1024, 256, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        made = layer(x, sequences=Sequences.of([512, 512], "cpu"))
    measured = sum(held.values()) / x.shape[1]
    assert made.requires_grad
    said = _BESIDE_LINEARS * dtype.itemsize * _width(layer, 1) + _of_linear_attention(layer, dtype.itemsize)
    assert measured <= said <= 2 * measured


def test_blocks_of_linear_attention_count_what_it_keeps() -> None:
    config = config_of("qwen3_next", FLAT["qwen3_next"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = footprint(model, 4, checkpointing=False, ranks=1)
    model.model.layers[0].linear_attn = model.model.layers[0].linear_attn.out_proj
    linears = footprint(model, 4, checkpointing=False, ranks=1)
    # 32 heads of 128 with rows of float32 beside them.
    assert found.token - linears.token > 32 * 4 * 2000


def test_what_ranks_shard_each_has_a_part_of() -> None:
    model = shape("qwen3", num_hidden_layers=2, **QWEN3_8B)
    whole, part = (footprint(model, 2, checkpointing=False, ranks=ranks) for ranks in (1, 8))
    assert part.weights == whole.weights // 8
    assert part.token == whole.token


@pytest.mark.parametrize(("family", "settings"), [*FLAT.items(), *SINGLE.items()])
def test_every_architecture_has_a_footprint(family: str, settings: dict[str, Any]) -> None:
    config = config_of(family, settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = footprint(model, 4, checkpointing=True, ranks=1)
    assert found.token > 0 and found.weights > 0
    assert (found.square > 0) == (family in {"gemma2", "gpt_oss"})


def test_an_architecture_that_no_kernel_computes_has_scores() -> None:
    config = config_of("qwen3_next", FLAT["qwen3_next"])
    with torch.device("meta"):
        found = [
            footprint(
                AutoModelForCausalLM.from_config(config, attn_implementation=attention),
                4,
                checkpointing=True,
                ranks=1,
            )
            for attention in ("sdpa", "eager")
        ]
    assert [each.square > 0 for each in found] == [False, True]


def test_a_longer_sequence_than_the_memory_holds_is_not_promised() -> None:
    for square in (0.0, 40.0):
        taken = Footprint(weights=2 * GIB, token=1e5, square=square)
        found = capacity(16 * GIB, GIB, taken, 10**9, *NO_HEAD)
        longest = found.one_rank_tokens
        assert found.sequence_tokens == longest and found.split_beyond == 0
        room = 16 * GIB - 2 * GIB - GIB // 2 - found.adapter_bytes
        assert longest * 1e5 + square * longest**2 <= room + 1
        assert (longest + 2) * 1e5 + square * (longest + 2) ** 2 > room


@pytest.mark.parametrize("square", [0.0, 40.0])
def test_a_longer_sequence_than_runs_forward_in_the_memory_is_not_promised(square: float) -> None:
    forward = Footprint(weights=2 * GIB, token=1e4, square=square)
    taken = Footprint(weights=2 * GIB, token=1e5, square=2 * square, forward=forward)
    found = capacity(16 * GIB, GIB, taken, 10**9, *NO_HEAD)
    room = 16 * GIB - 2 * GIB - GIB // 2 - found.adapter_bytes
    longest = found.forward_tokens
    assert longest > found.sequence_tokens
    assert forward.of_one(longest) <= room + 1 and forward.of_one(longest + 2) > room
    assert capacity(16 * GIB, GIB, taken, 1000, *NO_HEAD).forward_tokens == 1000


def test_what_can_be_trained_can_run_forward_whatever_the_arithmetic_says() -> None:
    # A token of a training pass was measured, one of a forward pass was not.
    taken = Footprint(weights=2 * GIB, token=1e4, forward=Footprint(2 * GIB, token=2e4))
    found = capacity(16 * GIB, GIB, taken, 10**9, *NO_HEAD)
    assert found.forward_tokens == found.one_rank_tokens


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("family", "settings"), [*FLAT.items(), *SINGLE.items()])
def test_running_forward_takes_one_blocks_part_of_what_training_takes(
    family: str, settings: dict[str, Any], checkpointing: bool
) -> None:
    config = config_of(family, settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sliding = [Asked(4, 2, 96, window=5, kernel=False, plain=True)] * config.num_hidden_layers
    found = footprint(model, 4, checkpointing=checkpointing, ranks=1, asked=sliding)
    assert found.forward is not None
    assert 0 < found.forward.token < found.token
    pairs = 1 if checkpointing else 1 / config.num_hidden_layers
    assert found.forward.square == found.square * pairs
    assert found.forward.window == 5 and 0 < found.forward.masks <= found.masks


def test_ranks_together_hold_more_but_for_what_they_exchange_and_what_each_has_of_all() -> None:
    taken = Footprint(weights=2 * GIB, token=1e5, exchange=2e4)
    one, *several = (capacity(16 * GIB, GIB, taken, 10**9, *NO_HEAD, ranks) for ranks in (1, 2, 4, 8))
    assert one.split_beyond == 0 and one.sequence_tokens == one.one_rank_tokens
    for ranks, found in zip((2, 4, 8), several, strict=True):
        assert found.split_beyond == found.one_rank_tokens == one.one_rank_tokens
        assert found.operation_tokens >= found.sequence_tokens > one.one_rank_tokens * ranks * 0.75
        room = 16 * GIB - 2 * GIB - GIB // 2 - found.adapter_bytes
        own = found.sequence_tokens / ranks
        assert own * 1.2e5 + found.sequence_tokens * 256 <= room + 1


def test_ranks_share_no_sequence_where_one_holds_the_whole_context() -> None:
    found = capacity(64 * GIB, GIB, Footprint(GIB, 1e3, exchange=10.0), 128, *NO_HEAD, ranks=4)
    assert (found.one_rank_tokens, found.sequence_tokens, found.split_beyond) == (128, 128, 0)


def test_what_is_measured_a_little_differently_at_each_start_is_announced_the_same() -> None:
    starts = [
        Capacity(40_000 + noise, 150_000 + noise, 100_000 + noise, 10**6, GIB) for noise in (0, 113, 700)
    ]
    found = {steady(each, 131_072) for each in starts}
    assert len(found) == 1
    (announced,) = found
    assert 40_000 * 7 / 8 <= announced.one_rank_tokens <= 40_000
    assert 150_000 * 7 / 8 <= announced.sequence_tokens <= 150_000
    assert 100_000 * 7 / 8 <= announced.forward_tokens <= 100_000
    assert steady(Capacity(5_000, 5_000, 5_000, 10**6, GIB), 5_000).sequence_tokens == 5_000


def test_the_masks_of_a_window_count_where_no_kernel_does_without_them() -> None:
    model = shape("qwen3", num_hidden_layers=2, **QWEN3_8B)
    sliding = Asked(32, 8, 10_240, window=1024, kernel=False, plain=True)
    full = dataclasses.replace(sliding, window=None)
    kernel = dataclasses.replace(sliding, kernel=True)

    def masks(asked: list[Asked], checkpointing: bool = False) -> float:
        found = footprint(model, 2, checkpointing=checkpointing, ranks=1, asked=asked)
        assert found.square == 0
        assert found.window == (1024 if found.masks else 0)
        return found.masks

    assert masks([full, full]) == masks([kernel, full]) == 0
    assert 0 < masks([sliding, full]) < masks([sliding, sliding])
    assert masks([sliding, sliding], checkpointing=True) == masks([sliding, full])
    tokens = 512
    with MakesMasks() as made:
        _seen(tokens, 64, torch.device("cpu"))
    assert made.bytes <= masks([sliding, full]) * tokens**2


@pytest.mark.parametrize("kernel", [False, True])
def test_sinks_have_scores_where_no_kernel_computes_them(kernel: bool) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("gpt_oss", FLAT["gpt_oss"]))
    sliding = Asked(4, 2, 96, window=5, kernel=kernel, plain=False, sinks=True)
    asked = [sliding, dataclasses.replace(sliding, window=None)]
    found = footprint(model, 2, checkpointing=True, ranks=1, asked=asked)
    assert (found.square > 0, found.masks > 0, found.block > 0) == (not kernel, not kernel, kernel)
    # One layer is enough.
    asked[1] = dataclasses.replace(asked[1], kernel=False)
    assert footprint(model, 2, checkpointing=True, ranks=1, asked=asked).square > 0


def test_of_several_windows_the_shortest_says_where_masks_begin() -> None:
    model = shape("qwen3", num_hidden_layers=2, **QWEN3_8B)
    layers = [Asked(32, 8, 10_240, window, kernel=False, plain=True) for window in (4096, 1024, None)]
    assert footprint(model, 2, checkpointing=True, ranks=1, asked=layers).window == 1024


@pytest.mark.parametrize("square", [0.0, 40.0])
@pytest.mark.parametrize(("window", "longest"), [(1000, "beyond"), (2500, "window"), (100_000, "within")])
def test_masks_take_nothing_of_a_sequence_within_its_window(window: int, longest: str, square: float) -> None:
    taken = Footprint(weights=0, token=1e5, square=square, masks=400.0, window=window)

    def takes(tokens: int) -> float:
        return tokens * taken.token + tokens**2 * (square + (taken.masks if tokens > window else 0))

    found = taken.tokens(room=1e9)
    assert takes(found) <= 1e9 < takes(found + 1)
    assert longest == ("beyond" if found > window else "window" if found == window else "within")
    assert taken.tokens(room=0) == 0


def test_memory_makes_no_context_longer() -> None:
    assert capacity(64 * GIB, GIB, Footprint(GIB, 1e3), 128, *NO_HEAD).sequence_tokens == 128


def test_a_model_that_hardly_fits_still_has_some_room() -> None:
    found = capacity(4 * GIB, GIB, Footprint(8 * GIB, 1e5), 4096, *NO_HEAD)
    assert found.sequence_tokens > 1 and found.adapter_bytes > 0


def test_a_cpu_whose_memory_nobody_gave_takes_a_micro_batch_and_an_adapter_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert at_least(Capacity(100, 200, 300, 1000, GIB), 2048, 2 * GIB) == Capacity(*[2048] * 4, 2 * GIB)
    assert "100 tokens and 1.00 GiB of adapters; 2048 tokens and 2.00 GiB" in caplog.text
    caplog.clear()
    enough = Capacity(4096, 8192, 5000, 9000, GIB)
    assert at_least(enough, 2048, GIB // 2) == enough
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("one_rank_tokens", "context_length", "said"),
    [(700, 4096, True), (1024, 4096, False), (512, 512, False)],
    ids=["less than a micro-batch", "as much", "all of a shorter context"],
)
def test_a_trainer_whose_memory_holds_no_full_micro_batch_says_so(
    one_rank_tokens: int, context_length: int, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_halves(
        Capacity(one_rank_tokens, one_rank_tokens, one_rank_tokens, 10**6, 0), 1024, context_length
    )
    assert ("of up to 1024 tokens, and memory holds about 700" in caplog.text) is said


def test_an_operation_is_as_large_as_the_host_has_room_for_whatever_the_device_has() -> None:
    taken = Footprint(2 * GIB, 1e5)
    small, large = (capacity(memory * GIB, GIB, taken, 10**9, *NO_HEAD) for memory in (16, 139))
    assert small.operation_tokens == large.operation_tokens == GIB // 256
    # But never less than one sequence that it promises.
    assert capacity(139 * GIB, 256, taken, 10**9, *NO_HEAD).operation_tokens == large.sequence_tokens


def test_more_memory_never_holds_less() -> None:
    found = [
        capacity(gib * GIB, gib * GIB // 4, Footprint(4 * GIB, 1e5), 10**9, 2**14, 2**12)
        for gib in range(1, 80)
    ]
    for less, more in pairwise(found):
        assert less.sequence_tokens <= more.sequence_tokens
        assert less.operation_tokens <= more.operation_tokens
        assert less.adapter_bytes <= more.adapter_bytes


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("item", [4, 2])
def test_an_adapter_takes_what_each_rank_holds_of_it_what_fills_parts_up_included(
    role: Any, item: int, ranks: int
) -> None:
    config = config_of("qwen3", FLAT["qwen3"])
    linears = find_linears(AutoModelForCausalLM.from_config(config))
    spec = LoraSpec(3, role=role)
    targets = select_targets(linears, spec)
    dtype = {2: torch.bfloat16, 4: torch.float32}[item]
    for rank in range(ranks):
        adapter = Adapter(spec, targets, "m", "cpu", config.hidden_size, dtype, ranks, rank)
        tenant = LoraTenant(adapter, FlatBuffers())
        gradients = [tenant.take_gradient() for _ in range(2)]
        tenant.due(gradients[0], AdamSpec()).optimizer.start()
        kept = [*gradients, *tenant._optimizer.moments.values()]
        held = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in (*kept, *vars(adapter).values())
            if isinstance(tensor, torch.Tensor)
        }
        # What computes, and a gradient, are once more in the stack of a micro-batch.
        stacked = (item + 4) * adapter.part.padded
        assert adapter_bytes(targets, 3, adapter.value_head, item, ranks) == sum(held.values()) + stacked
        # To the host it goes with one gradient: its operations are complete.
        tenant.begin(1)
        tenant.gradient(1)
        tenant.note_added(1)
        tenant._optimizer.start()
        on_host = adapter_host_bytes(targets, 3, adapter.value_head, item, ranks)
        assert on_host == sum(tensor.nbytes for tensor in tenant.tensors())
        assert on_host == sum(held.values()) - gradients[0].nbytes
        size = adapter.part.size
        copy = 0 if item == 4 else item * size
        if ranks == 1:
            assert sum(held.values()) == 5 * 4 * size + copy
        else:
            # Nothing of what is stepped alone is whole: 2 gradients, what computes, and a part of the rest.
            whole, part = 8 * size + (copy or 4 * size), (8 if item == 4 else 12) * size / ranks
            assert whole + part <= sum(held.values()) < (whole + part) * 1.1
