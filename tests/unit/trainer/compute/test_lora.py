"""Adapters of several tenants on one linear: values, isolation, initial state."""

import math

import pytest
import torch
from torch import nn

from services.common.contract.errors import InvalidRequest
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.lora import Adapter, LinearShape, LoraRouter, Segment, select_targets

LINEARS = {
    "model.layers.0.self_attn.q_proj": LinearShape(8, 12),
    "model.layers.0.self_attn.o_proj": LinearShape(12, 8),
    "model.layers.0.mlp.down_proj": LinearShape(20, 8),
    "lm_head": LinearShape(8, 30),
}
Q = "model.layers.0.self_attn.q_proj"


def adapter(model_id: str = "m", **spec: int | bool | str | None) -> Adapter:
    lora = LoraSpec(**{"rank": 4, "seed": 7, **spec})  # type: ignore[arg-type]
    return Adapter(lora, select_targets(LINEARS, lora), model_id, "cpu", hidden_size=8)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ((True, False, False), ["q_proj", "o_proj"]),
        ((False, True, False), ["down_proj"]),
        ((False, False, True), ["lm_head"]),
        ((True, True, True), ["q_proj", "o_proj", "down_proj", "lm_head"]),
    ],
)
def test_the_flags_choose_what_is_adapted(flags: tuple[bool, bool, bool], names: list[str]) -> None:
    chosen = select_targets(LINEARS, LoraSpec(4, 0, *flags))
    assert [name.rpartition(".")[2] for name in chosen] == names


def test_an_adapter_that_would_train_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="train nothing"):
        select_targets(LINEARS, LoraSpec(4, 0, False, False, False))


def test_a_flag_the_base_model_has_nothing_for_is_refused() -> None:
    without_mlp = {name: shape for name, shape in LINEARS.items() if "mlp" not in name}
    with pytest.raises(InvalidRequest, match="set train_mlp to false"):
        select_targets(without_mlp, LoraSpec(4))


@pytest.mark.parametrize("rank", [0, -1, 257])
def test_a_rank_out_of_range_is_refused(rank: int) -> None:
    with pytest.raises(InvalidRequest, match="rank"):
        select_targets(LINEARS, LoraSpec(rank))


def test_a_fresh_adapter_has_uniform_a_and_zero_b() -> None:
    for name, matrix in adapter(rank=64).views(adapter(rank=64).flat).items():
        if name.endswith("lora_B"):
            assert not matrix.any()
        else:
            bound = 1 / math.sqrt(matrix.shape[1])
            assert bound * 0.95 < float(matrix.abs().max()) <= bound
            assert abs(float(matrix.mean())) < bound / 10


def test_the_seed_decides_the_initial_values_and_without_one_the_model_id_does() -> None:
    assert torch.equal(adapter("a", seed=1).flat, adapter("b", seed=1).flat)
    assert not torch.equal(adapter("a", seed=1).flat, adapter("a", seed=2).flat)
    assert torch.equal(adapter("a", seed=None).flat, adapter("a", seed=None).flat)
    assert not torch.equal(adapter("a", seed=None).flat, adapter("b", seed=None).flat)


def test_a_modules_initial_values_do_not_depend_on_what_else_is_adapted() -> None:
    whole, part = adapter(), adapter(train_mlp=False, train_unembed=False)
    name = f"{Q}.lora_A"
    assert torch.equal(whole.views(whole.flat)[name], part.views(part.flat)[name])


def test_each_segment_of_tokens_gets_its_own_adapter_and_gradient() -> None:
    linear = nn.Linear(8, 12).requires_grad_(False)
    router = LoraRouter()
    router.hook(linear, Q)
    tenants = [adapter("a", rank=2), adapter("b", rank=5)]
    for number, tenant in enumerate(tenants):
        tenant.flat.copy_(torch.randn(tenant.flat.shape, generator=torch.Generator().manual_seed(number)))
    gradients = [torch.zeros_like(tenant.flat) for tenant in tenants]
    pairs = [tenant.leaves(gradient).pairs for tenant, gradient in zip(tenants, gradients, strict=True)]
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(9))
    segments = [Segment(3, pairs[0]), Segment(3, {}), Segment(6, pairs[1])]
    with router.route(segments):
        y = linear(x)
        y[:1].square().sum().backward(retain_graph=True)

    def by_hand(rows: slice, tenant: Adapter) -> torch.Tensor:
        views = tenant.views(tenant.flat)
        delta = x[rows] @ views[f"{Q}.lora_A"].T @ views[f"{Q}.lora_B"].T
        return nn.functional.linear(x[rows], linear.weight, linear.bias) + delta * 32 / tenant.spec.rank

    torch.testing.assert_close(y[:1], by_hand(slice(0, 1), tenants[0]))
    assert torch.equal(y[1:2], nn.functional.linear(x, linear.weight, linear.bias)[1:2])
    torch.testing.assert_close(y[2:], by_hand(slice(2, 4), tenants[1]))
    assert gradients[0].any()
    assert not gradients[1].any()


def test_gradients_of_several_batches_add_up_in_the_operations_own_buffer() -> None:
    linear = nn.Linear(8, 12).requires_grad_(False)
    router = LoraRouter()
    router.hook(linear, Q)
    tenant = adapter()
    tenant.flat.normal_(generator=torch.Generator().manual_seed(0))
    once, twice = torch.zeros_like(tenant.flat), torch.zeros_like(tenant.flat)
    x = torch.randn(2, 3, 8)
    for gradient, repeats in ((once, 1), (twice, 2)):
        pairs = tenant.leaves(gradient).pairs
        for _ in range(repeats):
            with router.route([Segment(6, pairs)]):
                linear(x).sum().backward()
    torch.testing.assert_close(twice, 2 * once)
    assert once.any()
    assert tenant.flat.grad is None


def test_nothing_is_routed_after_the_context() -> None:
    linear = nn.Linear(8, 12)
    router = LoraRouter()
    router.hook(linear, Q)
    tenant = adapter()
    tenant.flat.fill_(1.0)
    x = torch.randn(1, 2, 8)
    plain = linear(x)
    with router.route([Segment(2, tenant.leaves().pairs)]):
        assert not torch.equal(linear(x), plain)
    assert torch.equal(linear(x), plain)


def test_a_critic_adapts_no_vocabulary_head_and_has_a_value_head_of_zeros() -> None:
    critic = adapter(role="critic")
    assert not any(name.startswith("lm_head") for name in critic.layout)
    assert critic.layout["value_head.weight"][1] == (1, 8)
    assert not critic.views(critic.flat)["value_head.weight"].any()
    only_head = adapter(role="critic", train_attn=False, train_mlp=False)
    assert only_head.layout.keys() == {"value_head.weight"}
    policy, name = adapter(), f"{Q}.lora_A"
    assert torch.equal(critic.views(critic.flat)[name], policy.views(policy.flat)[name])


def test_a_critic_without_a_trained_head_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="train_unembed of a critic"):
        adapter(role="critic", train_unembed=False)


def test_values_come_from_each_critics_own_head_beside_other_segments() -> None:
    router = LoraRouter()
    critics = [adapter(name, role="critic") for name in ("a", "b")]
    for number, critic in enumerate(critics):
        critic.flat.normal_(generator=torch.Generator().manual_seed(number))
    gradients = [torch.zeros_like(critic.flat) for critic in critics]
    heads = [critic.leaves(gradient).value_head for critic, gradient in zip(critics, gradients, strict=True)]
    hidden = torch.randn(5, 8)
    with router.route([Segment(4, {}), Segment(2, {}, heads[0]), Segment(3, {}, heads[1])]):
        values = router.values(hidden)
        assert router.head_parts(1, 4) == [(3, None)]
        values[:2].sum().backward()
    expected = [
        hidden[rows] @ critic.views(critic.flat)["value_head.weight"][0]
        for critic, rows in zip(critics, (slice(0, 2), slice(2, 5)), strict=True)
    ]
    torch.testing.assert_close(values, torch.cat(expected))
    head_gradient = critics[0].views(gradients[0])["value_head.weight"]
    torch.testing.assert_close(head_gradient[0], hidden[:2].sum(0))
    assert not gradients[1].any()
