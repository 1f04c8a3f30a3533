"""An answer takes no more memory than it counts for, from what a sampler told to the bytes for a client."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from services.gateway.access.answer_room import SCORED_TIMES, TEXT_TIMES
from services.gateway.edge.http.routes import reply
from services.gateway.edge.openai import answers, chats, completions
from services.gateway.inference import convert
from services.gateway.inference.inference import Model
from services.gateway.inference.question import Done, Question
from services.gateway.sampling.accept import Weights
from services.gateway.text.tokenizer import Tokenizer
from services.launcher.tiny_model import write_tokenizer
from tests.unit.gateway.edge.talking import floats, ints, topk
from tinsmith.v1 import results_pb2, sampling_pb2

WEIGHTS = Weights("org/base", "", 0, "", full=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, 512, 512)
    return Model(WEIGHTS, Tokenizer((directory / "tokenizer.json").read_text(), "", {}))


def told(tokens: int, likely: int) -> bytes:
    """A result of one sequence, as a sampler tells it."""
    outcome = results_pb2.OperationResult()
    outcome.sample.sequences.append(
        sampling_pb2.SampledSequence(
            tokens=ints([65 + place % 60 for place in range(tokens)]),
            logprobs=floats([-1 / (3 + place) for place in range(tokens)]),
            topk_logprobs=topk([list(range(65, 65 + likely))] * tokens) if likely else None,
            stop_reason=sampling_pb2.STOP_REASON_LENGTH,
        )
    )
    return outcome.SerializeToString()


def chat(model: Model, question: Question, done: Done) -> Any:
    call: Any = None
    asked = chats._Chat(call, "org/base", model, question, None, scored=question.scored, counted=False)
    return chats._choices(asked, done)


def completion(model: Model, question: Question, done: Done) -> Any:
    logprobs = question.likely if question.scored else None
    return completions._choices(
        completions._Asked("org/base", model, question, None, logprobs, False), [done]
    )


@pytest.mark.parametrize("choices", [chat, completion])
@pytest.mark.parametrize(("tokens", "likely"), [(5_000, None), (2_000, 0), (2_000, 1), (500, 20)])
def test_an_answer_takes_no_more_memory_than_it_is_counted_for(
    model: Model, choices: Callable[..., Any], tokens: int, likely: int | None
) -> None:
    head = answers.Head.new("x", "x", "org/base", WEIGHTS)
    tracemalloc.start()
    try:
        raw = told(tokens, likely or 0)
        tracemalloc.reset_peak()
        question = Question([[1]], scored=likely is not None, likely=likely or 0)
        done = convert.done(raw, question, 0)
        response = reply(head.of(choices(model, question, done), answers.usage([done])))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    (choice,) = json.loads(response.body)["choices"]
    assert len(done.sequences[0].tokens) == tokens
    assert (choice["logprobs"] is None) == (likely is None)
    assert question.times == (TEXT_TIMES if likely is None else SCORED_TIMES)
    assert peak < question.times * len(raw)
