"""Adapters of routed experts: each token's own, and in as many kernels for many adapters as for few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tinker_cookbook.hyperparam_utils import get_lora_param_count
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from services.trainer.compute.data import LoraSpec
from services.trainer.compute.lora import products
from services.trainer.compute.lora.adapter import Adapter, LinearShape, layout_of, select_targets
from services.trainer.compute.lora.experts import shapes_of
from services.trainer.compute.lora.grouped import LoraRouter
from services.trainer.compute.lora.products import Groups, outer, product
from services.trainer.compute.lora.stack import Segment
from services.trainer.compute.lora.targets import find_linears
from tests.unit.trainer.compute.plain import PlainExperts

NAME, HIDDEN, EXPERTS, CHOICES = "layer.mlp.experts", 16, 6, 2
OTHER = {"layer.self_attn.q_proj": LinearShape(HIDDEN, HIDDEN)}


def experts_of(family: str) -> Any:
    """Random experts of a family."""
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": CHOICES}
    if family == "gpt_oss":
        config = AutoConfig.for_model(family, num_local_experts=EXPERTS, intermediate_size=24, **sizes)
        made: Any = GptOssExperts(config)
    else:
        config = AutoConfig.for_model(family, num_experts=EXPERTS, moe_intermediate_size=24, **sizes)
        made = Qwen3MoeExperts(config)
    config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_(std=0.3, generator=generator)
    return made.requires_grad_(False)


def adapter(experts: Any, seed: int, rank: int, *, adapted: bool = True) -> Adapter:
    """One whose matrices are all random; `adapted`: of the experts too."""
    own = {f"{NAME}.{part}": shape for part, shape in shapes_of(experts).items()}
    made = Adapter(LoraSpec(rank), own if adapted else OTHER, "m", "cpu", HIDDEN)
    made.flat.normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
    return made


def routed(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the experts of each token, and their weights. One expert has no token."""
    generator = torch.Generator().manual_seed(9)
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    scores = torch.rand(tokens, EXPERTS - 1, generator=generator)
    weights, chosen = scores.topk(CHOICES)
    return hidden, chosen, weights


def computed(
    experts: Any, adapters: Sequence[Adapter], sizes: Sequence[int], *, fresh: bool = False
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """What comes out, the gradients of what went in, and of each adapter."""
    router = LoraRouter()
    router.hook_experts(experts, NAME)
    hidden, chosen, weights = routed(sum(sizes))
    hidden.requires_grad_()
    weights.requires_grad_()
    # Of a fresh one nothing counts that was there, and all is written.
    before = torch.nan if fresh else 1.0
    gradients = [torch.full_like(each.flat, before) for each in adapters]
    with router.route([Segment(*each, fresh) for each in zip(sizes, adapters, gradients, strict=True)]):
        found = experts(hidden, chosen, weights)
        (found * above(found)).sum().backward()
    assert hidden.grad is not None and weights.grad is not None
    return found.detach(), [hidden.grad, weights.grad], [each if fresh else each - 1 for each in gradients]


def above(found: Tensor) -> Tensor:
    return torch.randn(found.shape, generator=torch.Generator().manual_seed(8))


def by_hand(
    experts: Any, adapters: Sequence[Adapter], sizes: Sequence[int]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    hidden, chosen, weights = (part.split(list(sizes)) for part in routed(sum(sizes)))
    inputs = [part.clone().requires_grad_() for part in (*hidden, *weights)]
    outputs, masters = [], [each.flat.clone().requires_grad_() for each in adapters]
    for number, (each, flat) in enumerate(zip(adapters, masters, strict=True)):
        given = inputs[number], chosen[number], inputs[len(sizes) + number]
        if f"{NAME}.w1" in each.targets:
            own = {key.removeprefix(f"{NAME}."): view for key, view in each.views(flat).items()}
            plain = PlainExperts(experts, own, each.scale)
            plain.matrices = own
            outputs.append(plain(*given))
        else:
            outputs.append(type(experts).forward(experts, *given))
    found = torch.cat(outputs)
    (found * above(found)).sum().backward()
    grads = [torch.zeros_like(part) if part.grad is None else part.grad for part in inputs]
    of_adapters = [torch.zeros_like(flat) if flat.grad is None else flat.grad for flat in masters]
    count = len(sizes)
    return found.detach(), [torch.cat(grads[:count]), torch.cat(grads[count:])], of_adapters


COMPANIES = {
    "alone": [(8, True)],
    "alone, of a rank that no kernel takes": [(3, True)],
    "of one shape": [(8, True), (8, True), (8, True)],
    "of one shape that no kernel takes": [(3, True), (3, True)],
    "of many shapes": [(2, True), (16, True), (8, False), (5, True)],
}
SIZES = [5, 9, 3, 4]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("company", COMPANIES)
@pytest.mark.parametrize("fresh", [False, True])
def test_each_token_has_its_own_adapter_of_its_experts(company: str, family: str, fresh: bool) -> None:
    experts = experts_of(family)
    adapters = [
        adapter(experts, seed, rank, adapted=adapted)
        for seed, (rank, adapted) in enumerate(COMPANIES[company])
    ]
    found = computed(experts, adapters, SIZES[: len(adapters)], fresh=fresh)
    expected = by_hand(experts_of(family), adapters, SIZES[: len(adapters)])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_more_groups_than_a_kernel_takes_come_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = experts_of("qwen3_moe")
    adapters = [adapter(experts, seed, 8) for seed in range(3)]
    whole = computed(experts, adapters, SIZES[:3])
    monkeypatch.setattr(products, "_KERNEL_GROUPS", 4)
    torch.testing.assert_close(computed(experts, adapters, SIZES[:3]), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [5, 6, 9, 10, 13, 14])
def test_groups_are_cut_into_calls_without_a_word_from_the_device(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    random = torch.Generator().manual_seed(count)
    rows = torch.randint(0, 4, (count,), generator=random).tolist()
    rows[count // 2] = 0
    x, other = (torch.randn(sum(rows), 16, generator=random) for _ in range(2))
    matrices = torch.randn(count, 16, 8, generator=random)
    known = Groups(torch.tensor(rows, dtype=torch.int32).cumsum(0, dtype=torch.int32))
    by_row = torch.cat([part @ matrix for part, matrix in zip(x.split(rows), matrices, strict=True)])
    by_group = torch.stack([a.T @ b for a, b in zip(x.split(rows), other.split(rows), strict=True)])

    def waits(_: Groups) -> tuple[int, ...]:
        raise AssertionError("the host waits for the device")

    calls, grouped_mm = [], F.grouped_mm

    def counted(*args: Any, offs: Tensor) -> Tensor:
        calls.append(len(offs))
        return grouped_mm(*args, offs=offs)

    monkeypatch.setattr(products, "_KERNEL_GROUPS", 5)
    monkeypatch.setattr(Groups, "rows", property(waits))
    monkeypatch.setattr(F, "grouped_mm", counted)
    torch.testing.assert_close(product(x, matrices, known), by_row, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outer(x, other, known), by_group, rtol=1e-5, atol=1e-5)
    assert len(calls) == 2 * (1 if count <= 5 else -(-count // 4)) and max(calls) <= 5


def test_an_adapter_without_tokens_gets_no_gradient() -> None:
    experts = experts_of("qwen3_moe")
    adapters = [adapter(experts, seed, 8) for seed in range(3)]
    _, _, gradients = computed(experts, adapters, [5, 0, 4])
    assert [bool(each.any()) for each in gradients] == [True, False, True]


def test_the_same_rows_come_to_the_same_bits_each_time() -> None:
    experts = experts_of("qwen3_moe")
    adapters = [adapter(experts, seed, 8) for seed in range(3)]
    first, second = (computed(experts, adapters, SIZES[:3]) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


class Kernels(TorchDispatchMode):
    """Counts what would run on a device."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.namespace == "aten" and not func.is_view and "detach" not in func.name()
        return func(*args, **(kwargs or {}))


def kernels(adapters: int, rank: int = 8) -> int:
    experts = experts_of("qwen3_moe")
    made = [adapter(experts, 1, rank) for _ in range(adapters)]
    with Kernels() as counted:
        computed(experts, made, [2] * adapters)
    return counted.calls


def test_the_number_of_kernels_does_not_grow_with_the_number_of_adapters() -> None:
    of_two = kernels(2)
    # Each adapter's gradient is made, and looked at, by the test.
    assert kernels(64) - of_two <= 62 * 2 + 8


def test_nor_with_the_rank() -> None:
    """One adapter of rank 3 is filled up, and its gradient taken out again."""
    assert kernels(1, rank=3) <= kernels(1) + 40


MODELS = {
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe", 48, 2048, {"num_experts": 128, "moe_intermediate_size": 768}),
    "openai/gpt-oss-120b": ("gpt_oss", 36, 2880, {"num_local_experts": 128, "intermediate_size": 2880}),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_has_as_many_parameters_as_tinkers(name: str) -> None:
    family, layers, hidden, sizes = MODELS[name]
    config = AutoConfig.for_model(family, num_hidden_layers=layers, hidden_size=hidden, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    spec = LoraSpec(8, train_attn=False, train_unembed=False)
    _, elements = layout_of(select_targets(find_linears(model), spec), 8, 0)
    assert elements == get_lora_param_count(name, 8, train_attn=False, train_unembed=False)
