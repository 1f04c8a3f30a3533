"""What is put into a slot at once is what vLLM puts there layer by layer."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.lora.layers.column_parallel_linear import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearVariableSliceWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
)
from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.lora.layers.replicated_linear import ReplicatedLinearWithLoRA
from vllm.lora.layers.row_parallel_linear import RowParallelLinearWithLoRA
from vllm.lora.layers.vocab_parallel_embedding import VocabParallelEmbeddingWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear

from services.common.contract.errors import InvalidRequest
from services.sampler.worker.adapters.slots import PackedAdapter, WorkerSlots

SLOTS, MOST, HIDDEN, INNER, EXPERTS, VOCABULARY = 3, 8, 16, 24, 6, 50
LORA = SimpleNamespace(
    max_loras=SLOTS,
    max_lora_rank=MOST,
    lora_dtype=torch.bfloat16,
    fully_sharded_loras=False,
    enable_moe_shared_loras=True,
)


class Filled:
    """Numbers that are all different."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(1)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).bfloat16()


def linear(kind: Any, base: Any, tp: tuple[int, int], width: int, **its: Any) -> Any:
    """One of vLLM's layers of a model that is not there, on one of several workers."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.base_layer = base.__new__(base)
    torch.nn.Module.__init__(layer.base_layer)
    layer.tp_rank, layer.tp_size = tp
    layer.device, layer.input_size, layer.n_slices = torch.device("cpu"), width, 1
    for name, value in its.items():
        setattr(layer, name, value)
    layer.create_lora_weights(SLOTS, LORA)
    return layer


def in_slices(kind: Any, tp: tuple[int, int], sizes: tuple[int, ...]) -> Any:
    rank, size = tp
    parts = tuple(each // size for each in sizes)
    its = {"output_sizes": sizes, "output_slices": parts, "n_slices": len(sizes), "output_size": sum(parts)}
    layer = linear(kind, ColumnParallelLinear, tp, HIDDEN, output_ids=(rank,) * len(sizes), **its)
    layer.base_layer.output_sizes = list(sizes)
    return layer


def head() -> LogitsProcessorWithLoRA:
    layer = LogitsProcessorWithLoRA.__new__(LogitsProcessorWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.base_layer = torch.nn.Module()
    layer.base_layer.vocab_size = VOCABULARY
    layer.hidden_size, layer.device, layer.sharded_to_full_mapping = HIDDEN, torch.device("cpu"), None
    layer.create_lora_weights(SLOTS, LORA)
    return layer


def experts(tp: tuple[int, int], number: int = EXPERTS) -> FusedMoEWithLoRA:
    rank, size = tp
    layer = FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.moe_config = SimpleNamespace(
        hidden_dim=HIDDEN,
        num_local_experts=number,
        intermediate_size_per_partition=INNER // size,
        moe_parallel_config=SimpleNamespace(use_ep=False),
    )
    layer._w13_slices, layer.device, layer.tp_size, layer.tp_rank = 2, torch.device("cpu"), size, rank
    layer.create_lora_weights(SLOTS, LORA)
    return layer


def layers_of(tp: tuple[int, int]) -> dict[str, Any]:
    """One of each kind."""
    column = {"is_merged_col_linear": False, "output_size": INNER // tp[1]}
    return {
        "column": linear(ColumnParallelLinearWithLoRA, ColumnParallelLinear, tp, HIDDEN, **column),
        "qkv": in_slices(MergedQKVParallelLinearWithLoRA, tp, (16, 8, 8)),
        "gate_up": in_slices(MergedColumnParallelLinearWithLoRA, tp, (INNER, INNER)),
        "in_proj": in_slices(MergedColumnParallelLinearVariableSliceWithLoRA, tp, (8, 4, 4, 4)),
        "row": linear(RowParallelLinearWithLoRA, RowParallelLinear, tp, INNER // tp[1], output_size=HIDDEN),
        "replicated": linear(ReplicatedLinearWithLoRA, ReplicatedLinear, tp, HIDDEN, output_size=EXPERTS),
        "head": head(),
        "experts": experts(tp),
    }


def matrices(rank: int) -> dict[str, Any]:
    """What an adapter has for each kind of layer, before workers take their slices."""
    some = Filled()
    pairs = {
        "column": (some(rank, HIDDEN), some(INNER, rank)),
        "qkv": (
            [some(rank, HIDDEN), None, some(rank, HIDDEN)],
            [some(16, rank), None, some(8, rank)],
        ),
        "gate_up": ([some(rank, HIDDEN) for _ in "gu"], [some(INNER, rank) for _ in "gu"]),
        # For all slices of the layer.
        "in_proj": (some(rank, HIDDEN), some(20, rank)),
        "row": (some(rank, INNER), some(HIDDEN, rank)),
        "replicated": (some(rank, HIDDEN), some(EXPERTS, rank)),
        "head": (some(rank, HIDDEN), some(VOCABULARY, rank)),
        "experts": (
            [some(1, rank, HIDDEN), some(EXPERTS, rank, INNER), some(1, rank, HIDDEN)],
            [some(EXPERTS, INNER, rank), some(1, HIDDEN, rank), some(EXPERTS, INNER, rank)],
        ),
    }
    return {name: SimpleNamespace(lora_a=a, lora_b=b) for name, (a, b) in pairs.items()}


def slots_of(layers: dict[str, Any], loras: dict[str, Any], staged: bool) -> WorkerSlots:
    """The slots of layers, and an adapter that is scaled and merged already."""
    manager = SimpleNamespace(modules=layers, _get_lora_layer_weights=lambda _, name: loras.get(name))
    return WorkerSlots(SimpleNamespace(_adapter_manager=manager), staged)


def packed(slots: WorkerSlots, rank: int) -> PackedAdapter:
    return slots.pack(LoRAModel(1, rank, {}))


def stacked(layer: Any) -> list[torch.Tensor]:
    """All that a layer has of all slots."""
    found = []
    for name, value in vars(layer).items():
        if name == "adapter_enabled" or (name.endswith("_stacked") and not isinstance(value, list)):
            found += [value] if torch.is_tensor(value) else value
    return found


@pytest.fixture(autouse=True)
def without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.sampler.worker.adapters.slots.PIN_MEMORY", False)


@pytest.mark.parametrize("tp", [(0, 1), (0, 2), (1, 2)], ids=["alone", "first of two", "second of two"])
@pytest.mark.parametrize("rank", [3, MOST])
@pytest.mark.parametrize("staged", [False, True])
def test_a_slot_is_what_vllms_own_layers_make_of_it(tp: tuple[int, int], rank: int, staged: bool) -> None:
    layers = layers_of(tp)
    for tensor in (each for layer in layers.values() for each in stacked(layer)):
        # Of an adapter before.
        tensor.fill_(7)
    expected = copy.deepcopy(layers)
    loras = matrices(rank)
    for lacking in ("column", "experts"):
        for layer_slot, mine in enumerate((loras, {k: v for k, v in loras.items() if k != lacking})):
            for name, layer in expected.items():
                if name in mine:
                    layer.set_lora(layer_slot, mine[name].lora_a, mine[name].lora_b)
                else:
                    layer.reset_lora(layer_slot)
            slots = slots_of(layers, mine, staged)
            slots.fill(layer_slot, packed(slots, rank))
        for name, layer in layers.items():
            assert len(stacked(layer)) >= 2
            for mine_, its in zip(stacked(layer), stacked(expected[name]), strict=True):
                assert torch.equal(mine_, its), (name, lacking)


class Operations(TorchDispatchMode):
    """Writes down what PyTorch does, but for views."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.names: list[str] = []
        self._fails = fails

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not operation.is_view:
            self.names.append(operation.overloadpacket.__name__)
        if self._fails == operation.overloadpacket.__name__:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return operation(*args, **(kwargs or {}))


def many(number: int, staged: bool) -> WorkerSlots:
    """Slots of so many layers of each kind, of which an adapter has half."""
    layers, loras = layers_of((0, 1)), matrices(3)
    return slots_of(
        {f"{name}.{layer}": copy.deepcopy(of) for layer in range(2 * number) for name, of in layers.items()},
        {f"{name}.{layer}": of for layer in range(number) for name, of in loras.items()},
        staged,
    )


def test_with_many_layers_the_engines_thread_has_the_operations_of_few_and_one_copy_to_the_device() -> None:
    done = []
    for number in (1, 9):
        slots = many(number, staged=True)
        adapter = packed(slots, 3)
        with Operations() as operations:
            slots.fill(1, adapter)
        done.append(operations.names)
    assert done[0] == done[1]
    assert done[0].count("_to_copy") == 1
    assert set(done[0]) == {"_to_copy", "constant_pad_nd", "_foreach_copy_", "_foreach_zero_"}


def test_vllm_by_itself_has_the_operations_of_each_layer_in_front_of_a_step() -> None:
    done = []
    for number in (1, 9):
        manager: Any = LoRAModelManager.__new__(LoRAModelManager)
        vars(manager).update(vars(many(number, staged=False)._manager))
        vars(manager).update(lora_index_to_id=[None], _active_adapters={})
        manager._registered_adapters = {1: SimpleNamespace(id=1)}
        with Operations() as operations:
            manager.activate_adapter(1)
        done.append(len(operations.names))
    assert done[1] == 9 * done[0]


def test_an_adapter_is_packed_with_the_operations_of_a_layer_whatever_its_number_of_experts() -> None:
    counts = []
    for number in (2, 64):
        lora = matrices(3)["experts"]
        lora.lora_a[1], lora.lora_b[0], lora.lora_b[2] = (
            each[:1].expand(number, -1, -1) for each in (lora.lora_a[1], lora.lora_b[0], lora.lora_b[2])
        )
        slots = slots_of({"experts": experts((0, 1), number)}, {"experts": lora}, staged=True)
        with Operations() as operations:
            packed(slots, 3)
        counts.append(len(operations.names))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("lacks_memory_for", ["_to_copy", "constant_pad_nd"])
def test_a_device_without_memory_for_more_than_the_slots_has_the_adapter_all_the_same(
    lacks_memory_for: str,
) -> None:
    slots, without = many(1, staged=False), many(1, staged=True)
    slots.fill(2, packed(slots, 3))
    adapter = packed(without, 3)
    with Operations(fails=lacks_memory_for):
        without.fill(2, adapter)
    for mine, its in zip(*(each._manager.modules.values() for each in (without, slots)), strict=True):
        assert all(torch.equal(*pair) for pair in zip(stacked(mine), stacked(its), strict=True))


def test_an_adapter_is_kept_with_its_own_elements_alone() -> None:
    layers, loras = layers_of((0, 1)), matrices(2)
    slots = slots_of({"row": layers["row"]}, loras, staged=True)
    assert packed(slots, 2).kept.nbytes == 2 * 2 * (INNER + HIDDEN)


def test_of_a_worker_whose_layers_an_adapter_has_nothing_for_nothing_is_kept_and_slots_are_zeros() -> None:
    slots = slots_of(layers_of((0, 1)), {}, staged=True)
    adapter = packed(slots, 2)
    for layer in slots._manager.modules.values():
        for tensor in stacked(layer):
            tensor.fill_(7)
    slots.fill(1, adapter)
    assert adapter.kept.nbytes == 0
    for layer in slots._manager.modules.values():
        assert all((each[1] == 0).all() and (each[0] == 7).all() for each in stacked(layer))


def test_an_adapter_whose_experts_are_others_does_not_fit() -> None:
    lora = matrices(3)["experts"]
    for layer, why in (
        (experts((0, 1), EXPERTS + 1), "expert-dim mismatch"),
        (experts((0, 2)), "must match"),
    ):
        layer.tp_size = 1
        slots = slots_of({"experts": layer}, {"experts": lora}, staged=False)
        with pytest.raises(InvalidRequest, match=f"does not fit this model: .*{why}"):
            packed(slots, 3)


def test_a_layer_that_has_its_adapters_in_another_way_is_seen_at_the_start() -> None:
    layer = VocabParallelEmbeddingWithLoRA.__new__(VocabParallelEmbeddingWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.lora_a_stacked, layer.lora_b_stacked = torch.zeros(2, 50, 8), torch.zeros(2, 1, 16, 8)
    for other in (layer, torch.nn.Linear(2, 2)):
        with pytest.raises(RuntimeError, match=f"{type(other).__name__} has its adapters elsewhere"):
            slots_of({"embed_tokens": other}, {}, staged=False)
