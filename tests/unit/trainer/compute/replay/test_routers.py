"""Routers that are given their choice: of every family with experts, gates, numbers and gradients are what
plain PyTorch makes of the same experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from services.common.contract.experts.routing import Routing
from services.trainer.compute.blocks.checkpointing import checkpoint_blocks
from services.trainer.compute.replay.routers import OWN, Replay
from tests.unit.trainer.compute.architectures import FLAT, SINGLE, config_of, random_model
from tests.unit.trainer.compute.plain import adapted
from tests.unit.trainer.compute.test_models import WITH_EXPERTS, Trained, close, logprobs_of

TOKENS = torch.randint(1, 64, (11,), generator=torch.Generator().manual_seed(6))

Gates = Callable[[Any, Tensor, Tensor], Tensor]
"""A router, its logits [tokens, experts] and the experts of each token -> their gates."""


def of_softmax(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    gates = logits.softmax(-1).gather(-1, ids)
    return gates / gates.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else gates


def of_the_chosen(_: Any, logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(-1, ids).softmax(-1)


def of_sigmoids(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    gates = logits.sigmoid().gather(-1, ids)
    if router.norm_topk_prob:
        gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
    return gates * router.routed_scaling_factor


GATES: dict[str, Gates] = {"gpt_oss": of_the_chosen, "glm4_moe": of_sigmoids, "deepseek_v3": of_sigmoids}


def routers(model: Any) -> list[Any]:
    return [each for each in model.modules() if hasattr(each, "top_k") and hasattr(each, "weight")]


def force(model: Any, chosen: Tensor, gates: Gates) -> None:
    """Writes routers anew that know nothing but the experts that they are told."""

    def forward(router: Any, ids: Tensor) -> Callable[[Tensor], Any]:
        def route(hidden: Tensor) -> Any:
            logits = nn.functional.linear(
                hidden.reshape(-1, router.weight.shape[1]), router.weight, getattr(router, "bias", None)
            )
            return logits, gates(router, logits, ids), ids

        return route

    for layer, router in enumerate(routers(model)):
        router.forward = forward(router, chosen[:, layer].long())


def own_choice(model: Any, tokens: Tensor) -> Tensor:
    """int32 [tokens, layers, top_k]."""
    seen: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _module, _given, made: seen.append(made[2]))
        for router in routers(model)
    ]
    model(tokens[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1).int()


@pytest.fixture(scope="module", params=WITH_EXPERTS)
def family(request: pytest.FixtureRequest) -> tuple[str, Trained, Replay]:
    trained = Trained.of(request.param)
    return request.param, trained, Replay(trained.model)


def others(routing: Routing) -> Tensor:
    """Experts that no router chose."""
    scores = torch.rand(
        len(TOKENS), routing.layers, routing.experts, generator=torch.Generator().manual_seed(7)
    )
    return scores.topk(routing.top_k).indices.int()


def routing_of(replay: Replay) -> Routing:
    assert replay.routing is not None
    return replay.routing


def test_with_other_experts_it_is_plain_pytorch_with_these(family: tuple[str, Trained, Replay]) -> None:
    name, trained, replay = family
    chosen = others(routing_of(replay))
    adapter = trained.adapter("a")
    free, _ = trained.pass_([adapter], [TOKENS])
    with replay.given(chosen):
        logprobs, (gradient,) = trained.pass_([adapter], [TOKENS])
    assert (logprobs - free).abs().max() > 1e-2
    model, matrices = adapted(trained.plain, adapter)
    force(model, chosen, GATES.get(name, of_softmax))
    expected = logprobs_of(model, TOKENS)
    expected.sum().backward()
    close(logprobs, expected.detach())
    found = adapter.views(gradient)
    for key, values in matrices.items():
        assert values.grad is not None
        close(found[key], values.grad)


def test_with_the_experts_that_it_would_choose_nothing_changes(family: tuple[str, Trained, Replay]) -> None:
    _, trained, replay = family
    chosen = own_choice(trained.plain, TOKENS)
    # Without an adapter, as this is the base model's choice.
    adapter = trained.adapter("a")
    adapter.flat.zero_()
    free, (free_gradient,) = trained.pass_([adapter], [TOKENS])
    for given, exactly in ((chosen, True), (chosen.flip(-1), False)):
        with replay.given(given):
            logprobs, (gradient,) = trained.pass_([adapter], [TOKENS])
        if exactly:
            assert torch.equal(logprobs, free) and torch.equal(gradient, free_gradient)
        torch.testing.assert_close(logprobs, free, rtol=0, atol=1e-5)
        close(gradient, free_gradient)


def test_tokens_that_are_given_none_have_their_own(family: tuple[str, Trained, Replay]) -> None:
    _, trained, replay = family
    adapter = trained.adapter("a")
    free, (free_gradient,) = trained.pass_([adapter], [TOKENS])
    chosen = others(routing_of(replay))
    with replay.given(torch.full_like(chosen, OWN)):
        logprobs, (gradient,) = trained.pass_([adapter], [TOKENS])
    assert torch.equal(logprobs, free) and torch.equal(gradient, free_gradient)
    chosen[:-3] = OWN
    with replay.given(chosen):
        late, _ = trained.pass_([adapter], [TOKENS])
    # No token sees one after it.
    torch.testing.assert_close(late[:-3], free[:-3], rtol=0, atol=1e-5)
    assert (late[-3:] - free[-3:]).abs().max() > 1e-3


def test_a_block_that_is_computed_again_has_the_same_experts() -> None:
    trained = Trained.of("qwen3_moe")
    replay = Replay(trained.model)
    adapter, chosen = trained.adapter("a"), others(routing_of(replay))
    with replay.given(chosen):
        expected, (gradient,) = trained.pass_([adapter], [TOKENS])
        checkpoint_blocks(trained.model)
        logprobs, (again,) = trained.pass_([adapter], [TOKENS])
    assert torch.equal(logprobs, expected) and torch.equal(again, gradient)


def test_the_weights_of_a_router_learn_by_the_gates_of_the_given_experts() -> None:
    config = config_of("qwen3_moe", FLAT["qwen3_moe"])
    model, plain = random_model(config, "eager"), random_model(config, "eager")
    replay = Replay(model)
    chosen = others(routing_of(replay))
    with replay.given(chosen):
        logprobs_of(model, TOKENS).sum().backward()
    force(plain, chosen, of_softmax)
    logprobs_of(plain, TOKENS).sum().backward()
    for router, expected in zip(routers(model), routers(plain), strict=True):
        assert expected.weight.grad.abs().max() > 0
        close(router.weight.grad, expected.weight.grad)


@pytest.mark.parametrize(("name", "settings"), [("llama", {}), ("llama4_text", SINGLE["llama4_text"])])
def test_a_model_that_routes_nothing_or_in_a_way_of_its_own_takes_none(name: str, settings: dict) -> None:
    assert Replay(random_model(config_of(name, settings), "eager")).routing is None


def test_a_model_that_takes_none_is_not_computed_with_its_own_choice_instead() -> None:
    replay = Replay(random_model(config_of("llama", {}), "eager"))
    with replay.given(None):
        pass
    with pytest.raises(RuntimeError, match="takes no experts"), replay.given(torch.zeros(3, 1, 2)):
        pass


def test_a_router_that_chooses_twice_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(config_of("qwen3_moe", FLAT["qwen3_moe"]), "eager")
    kind = type(routers(model)[0])
    once = kind.forward

    def twice(self: Any, hidden: Tensor) -> Any:
        torch.rand(len(hidden), self.num_experts).topk(self.top_k)
        return once(self, hidden)

    monkeypatch.setattr(kind, "forward", twice)
    assert Replay(model).routing is None
