"""A sequence that vLLM is asked for: its outputs are one, and whatever ends the wait frees the engine."""

from __future__ import annotations

import asyncio
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists

from services.sampler.engine.calls import asked
from services.sampler.engine.logprobs.front import unpack
from services.sampler.engine.logprobs.kept import KeptLogprobs


class Llm:
    """Takes a sequence on, and has what is `put` for it. It stands for its own parts, too."""

    def __init__(self, refuses: Exception | None = None, errored: bool = False) -> None:
        self.refuses, self.errored = refuses, errored
        self.collector = RequestOutputCollector(RequestOutputKind.DELTA, "name")
        self.sent: list[str] = []
        self.aborted: list[str] = []
        self.input_processor = self.engine_core = self
        self.output_processor: Any = self
        self.request_states = {
            "name": SimpleNamespace(
                logprobs_processor=LogprobsProcessor(None, FlatLogprobs(), None, 0.0, 0, None),
                detokenizer=IncrementalDetokenizer(),
            )
        }

    def _run_output_handler(self) -> None:
        pass

    def process_inputs(self, name: str, *_: object, **__: object) -> SimpleNamespace:
        if self.refuses is not None:
            raise self.refuses
        return SimpleNamespace(request_id=name, external_req_id=None)

    def add_request(self, request: SimpleNamespace, _: None, queue: RequestOutputCollector) -> None:
        assert request.external_req_id == request.request_id
        self.collector = queue

    async def add_request_async(self, request: SimpleNamespace) -> None:
        self.sent.append(request.request_id)

    async def abort(self, name: str) -> None:
        self.aborted.append(name)


def made(*tokens: int, finished: bool = False) -> RequestOutput:
    logprobs: Any = KeptLogprobs(array("i", tokens), array("f", [-0.5] * len(tokens)))
    completion = CompletionOutput(0, "", list(tokens), None, logprobs, "length" if finished else None)
    return RequestOutput("name", None, [1], None, [completion], finished)


def ask(llm: Any, told: list[tuple[list[int], int]]) -> asyncio.Task[RequestOutput]:
    def take(output: RequestOutput, since: int) -> None:
        told.append((list(output.outputs[0].token_ids), since))

    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    return asyncio.create_task(asked.output(llm, "name", tokens_input([1]), params, None, take))


async def test_outputs_of_a_stream_are_told_as_they_come_and_are_one_in_the_end() -> None:
    llm, told = Llm(), []  # type: ignore[var-annotated]
    asking = ask(llm, told)
    await asyncio.sleep(0.01)
    for output in (made(5, 6), made(7), made(8, finished=True)):
        llm.collector.put(output)
        await asyncio.sleep(0.01)
    whole = (await asking).outputs[0]
    assert told == [([5, 6], 0), ([7], 2), ([8], 3)]
    kept: Any = whole.logprobs
    assert whole.token_ids == list(kept.token_ids) == [5, 6, 7, 8]
    assert llm.aborted == []


def asked_for(llm: Llm, logprobs: int, kind: RequestOutputKind) -> None:
    """Has vLLM's own front end take the sequence on, which ends with "more"."""
    words = Tokenizer(WordLevel({"none": 0, "some": 1, "more": 2}, "none"))
    llm.output_processor = OutputProcessor(PreTrainedTokenizerFast(tokenizer_object=words), log_stats=False)
    params = SamplingParams(stop=["more"], logprobs=logprobs, flat_logprobs=True, output_kind=kind)
    request = EngineCoreRequest("name", [0], None, params, None, 0.0, None, None, None)
    llm.process_inputs = lambda *_, **__: request  # type: ignore[method-assign,assignment]


async def test_text_is_made_to_find_stop_strings_and_of_no_token_that_has_a_log_probability() -> None:
    llm, told = Llm(), []  # type: ignore[var-annotated]
    asked_for(llm, 1, RequestOutputKind.DELTA)
    asking = ask(llm, told)
    await asyncio.sleep(0.01)
    for token in (1, 2):
        cells = np.array([[token, 0]]), np.array([[-0.5, -1.0]]), np.array([1])
        output = EngineCoreOutput("name", [token], new_logprobs=LogprobsLists(*cells))
        llm.output_processor.process_outputs([output])
    found = (await asking).outputs[0]
    assert (found.token_ids, found.finish_reason) == ([1, 2], "stop")
    assert isinstance(found.logprobs, FlatLogprobs)
    assert found.logprobs.token_ids == [1, 0, 2, 0]
    assert found.logprobs.decoded_tokens == [None] * 4


@pytest.mark.parametrize("reads", ["each step", "at the end"])
@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
async def test_numbers_of_a_steps_array_end_with_the_stop_string_as_their_tokens_do(
    kind: RequestOutputKind, reads: str
) -> None:
    llm, told = Llm(), []  # type: ignore[var-annotated]
    asked_for(llm, 0, kind)
    asking = ask(llm, told)
    await asyncio.sleep(0.01)
    # A step makes several tokens where drafts hold.
    for tokens in ([1], [0, 1], [1, 2, 0, 1]):
        # Of another request, too, which is not known here any more.
        outputs = [EngineCoreOutput("aborted", [2, 2]), EngineCoreOutput("name", list(tokens))]
        numbers = np.array([-9.0, -9.0, *(-token / 8 for token in tokens)], np.float32)
        counts = np.array([2, len(tokens)])
        outputs[0].new_logprobs = LogprobsLists(np.empty(0, np.int32), numbers, counts)
        unpack(outputs)
        llm.output_processor.process_outputs(outputs)
        if reads == "each step":
            await asyncio.sleep(0.01)
    found = (await asking).outputs[0]
    assert (found.token_ids, found.finish_reason) == ([1, 0, 1, 1, 2], "stop")
    kept: Any = found.logprobs
    assert list(kept.token_ids) == found.token_ids
    assert list(kept.logprobs) == [-token / 8 for token in found.token_ids]
    assert found.cumulative_logprob == sum(kept.logprobs)
    steps = kind is RequestOutputKind.DELTA and reads == "each step"
    assert told == ([([1], 0), ([0, 1], 1), ([1, 2], 3)] if steps else [([1, 0, 1, 1, 2], 0)])


async def test_a_caller_that_is_cancelled_leaves_nothing_in_the_engine() -> None:
    llm = Llm()
    asking = ask(llm, [])
    await asyncio.sleep(0.01)
    llm.collector.put(made(5))
    await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert llm.aborted == ["name"]


@pytest.mark.parametrize("fails", [ValueError("a shape"), TypeError("a type")])
async def test_what_goes_wrong_in_vllm_is_aborted_and_no_fault_of_the_request(fails: Exception) -> None:
    llm = Llm()
    asking = ask(llm, [])
    await asyncio.sleep(0.01)
    llm.collector.put(fails)
    with pytest.raises(EngineGenerateError if isinstance(fails, ValueError) else type(fails)):
        await asking
    assert llm.aborted == ["name"]


@pytest.mark.parametrize(
    ("llm", "error"),
    [(Llm(errored=True), EngineDeadError), (Llm(VLLMValidationError("no such token")), VLLMValidationError)],
)
async def test_an_engine_that_is_dead_or_refused_was_sent_nothing_and_has_nothing_to_abort(
    llm: Llm, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await ask(llm, [])
    assert (llm.sent, llm.aborted) == ([], [])


async def test_of_calls_together_the_others_end_with_the_one_that_fails() -> None:
    ended = []

    async def waits() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")
        return 0

    async def fails() -> int:
        raise EngineDeadError

    async def gives(number: int) -> int:
        return number

    with pytest.raises(EngineDeadError):
        await asked.together([waits(), fails()], "job")
    assert ended == ["waits"]
    assert [await asked.together([gives(one) for one in some], "job") for some in ([], [3], [4, 5])] == [
        [],
        [3],
        [4, 5],
    ]


async def test_of_many_sequences_a_few_begin_in_each_turn_of_the_loop() -> None:
    begun: list[int] = []

    async def call(index: int) -> int:
        begun.append(index)
        await asyncio.sleep(0.05)
        return index

    asking = asyncio.create_task(asked.together([call(index) for index in range(100)], "name"))
    seen = 0
    while len(begun) < 100:
        await asyncio.sleep(0)
        assert len(begun) - seen <= 8
        seen = len(begun)
    assert await asking == list(range(100))


@pytest.mark.parametrize("turns", range(1, 5))
@pytest.mark.filterwarnings("error")
async def test_sequences_that_have_not_begun_never_do_when_their_job_is_cancelled(turns: int) -> None:
    begun: list[int] = []

    async def call(index: int) -> None:
        begun.append(index)
        await asyncio.Event().wait()

    asking = asyncio.create_task(asked.together([call(index) for index in range(100)], "name"))
    for _ in range(turns):
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert len(begun) < 40
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1
