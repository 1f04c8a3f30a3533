"""Log-probabilities of what tokens are drawn from, on vLLM's own V1 sampler: whose rows have them, and that
nothing else changes by a bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from services.sampler.worker.prompt_scores import SAMPLED_KEY
from services.sampler.worker.v1.sampled_logprobs import SampledLogprobs
from tests.component.vllm.test_drafts import REQUESTS, VOCAB, generators, metadata

pytestmark = pytest.mark.heavy

LOGITS = 3 * torch.randn(REQUESTS, VOCAB, generator=torch.Generator().manual_seed(4))
OUTPUTS = [[3, 5], [7], [7, 7, 9], [5], []]
ASKS = SamplingParams(extra_args={SAMPLED_KEY: True})
PLAIN = SamplingParams()


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """As in a sampler on a CPU, which compiles nothing."""
    with torch.compiler.set_stance("force_eager"):
        yield


def corrected(*rows: int) -> tuple[Sampler, SampledLogprobs]:
    """A sampler that is told that the requests of these rows ask."""
    sampler = Sampler()
    made = SampledLogprobs(sampler)
    made.update_state(added({row: ASKS if row in rows else PLAIN for row in range(REQUESTS)}))
    return sampler, made


def added(params: dict[int, SamplingParams], **more: Any) -> BatchUpdate:
    new = [(row, each, None, []) for row, each in params.items()]
    return BatchUpdate(REQUESTS, **({"removed": [], "moved": []} | more), added=new)


def step(kind: str) -> SamplingMetadata:
    made = metadata([list(output) for output in OUTPUTS], {} if kind == "greedy" else generators())
    if kind == "greedy":
        return dataclasses.replace(made, all_greedy=True, temperature=None, top_k=None, top_p=None)
    if kind == "random":
        return dataclasses.replace(made, all_random=True, temperature=torch.full((REQUESTS,), 0.7))
    return made


def sampled(sampler: Sampler, kind: str) -> SamplerOutput:
    # For the request without a seed of its own.
    torch.manual_seed(9)
    return sampler(LOGITS.clone(), step(kind))


@pytest.mark.parametrize("kind", ["greedy", "random", "mixed"])
@pytest.mark.parametrize("rows", [(), (0,), (1, 3), tuple(range(REQUESTS))])
def test_rows_that_ask_are_of_what_was_drawn_from_and_all_else_is_the_same_bits(
    kind: str, rows: tuple[int, ...]
) -> None:
    sampler, _ = corrected(*rows)
    found = sampled(sampler, kind)
    own = sampled(Sampler(), kind)
    # vLLM by itself has the one or the other for all requests.
    drawn = sampled(Sampler("processed_logprobs"), kind)
    assert torch.equal(found.sampled_token_ids, own.sampled_token_ids)
    for row in range(REQUESTS):
        expected = drawn if row in rows else own
        for part in (0, 1):
            assert torch.equal(found.logprobs_tensors[part][row], expected.logprobs_tensors[part][row])


def test_a_step_without_such_a_request_writes_nothing_of_one_before_it() -> None:
    sampler, made = corrected(2)
    sampled(sampler, "mixed")
    made.update_state(added({2: PLAIN}))
    found, own = sampled(sampler, "mixed"), sampled(Sampler(), "mixed")
    assert torch.equal(found.logprobs_tensors.logprobs, own.logprobs_tensors.logprobs)


def test_a_request_asks_wherever_in_the_batch_it_goes() -> None:
    _, made = corrected(1, 3)
    swapped = [(1, 0, MoveDirectionality.SWAP), (3, 2, MoveDirectionality.UNIDIRECTIONAL)]
    made.update_state(added({}, moved=swapped))
    assert set(made._asks) == {0, 2}
    made.update_state(added({0: PLAIN}, removed=[2]))
    assert not made._asks
