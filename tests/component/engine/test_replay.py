"""Rows that say which experts their tokens go to, in an engine: beside others, with prefixes in common, with
checkpointed activations and of a model that trains all weights, they are what plain PyTorch makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.common.contract.experts.routing import Routing
from services.trainer.compute.data import Row, RowResult
from services.trainer.compute.engine import Engine
from tests.component.engine.data import (
    LORA,
    NO_CLIP,
    ce_row,
    flat,
    given_experts,
    op,
    trained_model,
    work,
)
from tests.component.engine.engines import engine_of
from tests.component.engine.reference import values
from tests.unit.trainer.compute.replay.test_routers import force, of_softmax

pytestmark = pytest.mark.heavy

ROUTING = Routing(layers=2, top_k=2, experts=4)


@pytest.fixture(scope="module", params=[False, True], ids=["kept", "checkpointed"])
def routing_engine(experts: Path, one_rank: None, request: pytest.FixtureRequest) -> Iterator[Engine]:
    yield engine_of(experts, activation_checkpointing=request.param)


def group() -> list[Row]:
    """Rows that begin with the same 48 tokens: two of them with the same experts there, one with other ones,
    and one that leaves it to the model. And one that begins otherwise."""
    first = np.frombuffer(ce_row(1, 48).tokens, "<i4")
    rows = []
    for seed, length in ((2, 60), (3, 55), (4, 60), (5, 57)):
        row = ce_row(seed, length)
        tokens = np.frombuffer(row.tokens, "<i4").copy()
        tokens[:48] = first
        rows.append(msgspec.structs.replace(row, tokens=tokens.tobytes()))
    same = [given_experts(row, ROUTING, seed=1) for row in rows[:2]]
    return [*same, given_experts(rows[2], ROUTING, seed=2), rows[3], given_experts(ce_row(6, 20), ROUTING)]


def logprobs(results: list[RowResult]) -> list[np.ndarray]:
    assert not any(result.failure for result in results)
    return [values(result.outputs["logprobs"]) for result in results]


def plain(directory: Path, row: Row) -> np.ndarray:
    """Of the base model, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if row.routed is not None:
        force(model, torch.from_numpy(row.routed.values().astype(np.int32)), of_softmax)
    tokens = torch.from_numpy(np.frombuffer(row.tokens, "<i4").astype(np.int64))
    targets = torch.from_numpy(values(row.loss_inputs["target_tokens"]).copy())
    with torch.no_grad():
        scores = model(tokens[None]).logits[0].float().log_softmax(-1)
    return scores.gather(-1, targets[:, None])[:, 0].numpy()


def test_the_engine_says_how_its_model_routes(routing_engine: Engine, engine: Engine) -> None:
    assert routing_engine.routing == ROUTING
    assert engine.routing is None


@pytest.mark.parametrize("forward_only", [False, True])
def test_log_probabilities_are_those_of_the_given_experts(
    experts: Path, routing_engine: Engine, forward_only: bool
) -> None:
    # An adapter that was not trained changes nothing.
    routing_engine.create_model("fresh", LORA)
    rows = group()
    found = logprobs(routing_engine.run_pass(work((op("fresh", forward_only=forward_only), rows))))
    routing_engine.drop_model("fresh")
    for row, got in zip(rows, found, strict=True):
        np.testing.assert_allclose(got, plain(experts, row), rtol=0, atol=2e-5)


def test_a_step_of_rows_together_is_that_of_the_rows_alone(routing_engine: Engine) -> None:
    assert routing_engine.shares_prefixes
    states, outputs = [], []
    for together in (True, False):
        trained_model(routing_engine, "a")
        cut = None if together else [[(0, index)] for index in range(5)]
        outputs.append(logprobs(routing_engine.run_pass(work((op("a"), group()), cut=cut))))
        routing_engine.optim_step("a", NO_CLIP)
        states.append(flat(routing_engine.state("a")))
        routing_engine.drop_model("a")
    for one, other in zip(*outputs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)
    np.testing.assert_allclose(states[0], states[1], rtol=1e-4, atol=1e-5)


def test_a_model_that_trains_all_weights_computes_with_them(experts: Path, routing_engine: Engine) -> None:
    routing_engine.create_model("full", None)
    rows = group()
    found = logprobs(routing_engine.run_pass(work((op("full", forward_only=True), rows))))
    trained = logprobs(routing_engine.run_pass(work((op("full"), rows))))
    routing_engine.drop_model("full")
    for row, forward, backward in zip(rows, found, trained, strict=True):
        expected = plain(experts, row)
        np.testing.assert_allclose(forward, expected, rtol=0, atol=2e-5)
        np.testing.assert_allclose(backward, expected, rtol=0, atol=2e-5)
