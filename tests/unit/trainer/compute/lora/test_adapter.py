"""What an adapter is made of: its targets, its initial values, its seed."""

import math

import pytest
import torch

from services.common.contract.errors import InvalidRequest
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.lora.adapter import Adapter, LinearShape, kind_of, select_targets

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


def test_an_adapter_that_a_state_is_loaded_into_draws_no_numbers_and_is_that_state_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fresh = adapter(rank=64)
    monkeypatch.setattr(torch, "Generator", lambda: pytest.fail("numbers were drawn"))
    lora = LoraSpec(64, seed=7)
    made = Adapter(lora, select_targets(LINEARS, lora), "m", "cpu", hidden_size=8, drawn=False)
    assert not made.flat.any()
    made.load(fresh.flat)
    assert torch.equal(made.low, fresh.low)


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


def test_experts_are_feed_forward_wherever_they_are() -> None:
    assert kind_of("model.layers.0.experts.w1") == kind_of("model.layers.0.mlp.experts.w1") == "train_mlp"
    assert kind_of("model.layers.0.mlp.gate.weight") is None
