"""Log-probabilities of a step's sampled tokens are one array on their way, and each output's own before and
after it."""

from __future__ import annotations

import ast
import tracemalloc
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from services.common.contract.errors import Internal
from services.sampler.engine import answers
from services.sampler.engine.logprobs import core, front
from services.sampler.engine.sampling import Change
from tests.unit.sampler.worker.written import fits, written

OURS = "services.sampler.engine.logprobs."


class Asked(NamedTuple):
    """A request in a step.

    Attributes:
        tokens: it has in the end.
        likely: tokens that it wants at each place.
        rows: the step has of it, for as many tokens or more; the token of each.
    """

    tokens: list[int]
    likely: int = 0
    rows: list[int] | None = None

    @property
    def computed(self) -> list[int]:
        # A request whose prompt is not read to its end has a row, and no token.
        return (self.tokens or [99]) if self.rows is None else self.rows


def number(token: int) -> float:
    """The log-probability of a token wherever it is sampled."""
    return -token / 8


def computed(asked: Mapping[str, Asked]) -> ModelRunnerOutput:
    """What the workers made of a step; with drafts, where a request has several rows."""
    width = 1 + max(one.likely for one in asked.values())
    tokens = [token for one in asked.values() for token in one.computed]
    ids = np.array([[token, *range(500, 499 + width)] for token in tokens], np.int32)
    numbers = np.array([[number(token)] * width for token in tokens], np.float32)
    starts = [0, *np.cumsum([len(one.computed) for one in asked.values()]).tolist()]
    drafted = len(tokens) != len(asked)
    rows = LogprobsLists(ids, numbers, np.ones(len(tokens), np.int64), starts if drafted else None)
    names = list(asked)
    return ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, logprobs=rows)


class Scheduler:
    """Makes outputs as vLLM's does, for clients of which each has every second request."""

    def __init__(self, asked: Mapping[str, Asked], clients: int = 1) -> None:
        self._asked, self._clients = asked, clients
        self.requests = {
            name: SimpleNamespace(sampling_params=SimpleNamespace(num_logprobs=one.likely))
            for name, one in asked.items()
        }

    def update_from_output(self, _: object, made: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        outputs = {client: EngineCoreOutputs(outputs=[]) for client in range(self._clients)}
        for name, one in self._asked.items():
            place = made.req_id_to_index[name]
            own = made.logprobs and made.logprobs.slice_request(place, len(one.tokens))
            # What has ended is forgotten at once.
            del self.requests[name]
            if one.tokens:
                output = EngineCoreOutput(name, list(one.tokens), new_logprobs=own)
                outputs[place % self._clients].outputs.append(output)
        return outputs


def stepped(asked: Mapping[str, Asked], made: ModelRunnerOutput | None = None) -> list[EngineCoreOutput]:
    """The outputs of a step as they are sent."""
    scheduler: Any = Scheduler(asked)
    core.install(scheduler)
    outputs: list[EngineCoreOutput] = scheduler.update_from_output(None, made or computed(asked))[0].outputs
    return outputs


def received(outputs: Sequence[EngineCoreOutput]) -> list[EngineCoreOutput]:
    message = MsgpackEncoder().encode(EngineCoreOutputs(outputs=list(outputs)))
    told: EngineCoreOutputs = MsgpackDecoder(EngineCoreOutputs).decode(message)
    front.unpack(told.outputs)
    return told.outputs


def processor(likely: int = 0) -> front.Processor:
    return front.Processor.of(LogprobsProcessor(None, FlatLogprobs(), None, 0.0, likely, None))


def kept(output: EngineCoreOutput, likely: int = 0) -> tuple[list[int], list[float]]:
    """What the front end has of an output."""
    of = processor(likely)
    of.update_from_output(output)
    return places(of.logprobs)


def places(told: Any) -> tuple[list[int], list[float]]:
    """What is kept of all places, wherever."""
    return list(told.token_ids), list(told.logprobs)


def alone(tokens: list[int]) -> tuple[list[int], list[float]]:
    return tokens, [number(token) for token in tokens]


def has_array(outputs: Sequence[EngineCoreOutput]) -> list[bool]:
    return [output.new_logprobs is not None for output in outputs]


def test_the_numbers_of_a_step_are_one_array_and_each_output_has_its_own() -> None:
    asked = {"first": Asked([3]), "reads": Asked([]), "second": Asked([5]), "third": Asked([4])}
    sent = stepped(asked)
    assert has_array(sent) == [True, False, False]
    assert [kept(output) for output in received(sent)] == [alone([3]), alone([5]), alone([4])]


def test_drafts_that_held_come_with_theirs_and_rows_behind_them_with_none() -> None:
    asked = {
        "holds": Asked([3, 4, 5]),
        "ends early": Asked([6], rows=[6, 7, 8]),
        "without": Asked([9]),
        "reads": Asked([], rows=[]),
        "two": Asked([1, 2], rows=[1, 2, 7]),
    }
    sent = stepped(asked)
    assert has_array(sent) == [True, False, False, False]
    told = [alone(one.tokens) for one in asked.values() if one.tokens]
    assert [kept(output) for output in received(sent)] == told


@pytest.mark.parametrize("first", ["plain", "likely"])
def test_requests_that_want_likely_tokens_have_vllms_own_way_beside_others(first: str) -> None:
    asked = {"plain": Asked([3, 4]), "likely": Asked([5], likely=2), "plain too": Asked([6])}
    asked = {name: asked[name] for name in sorted(asked, key=lambda name: name != first)}
    sent = stepped(asked)
    own = {output.request_id: output.new_logprobs for output in sent}
    assert own["plain too"] is None
    assert own["likely"] is not None and own["likely"].logprobs.shape == (1, 3)
    told = {output.request_id: kept(output, asked[output.request_id].likely) for output in received(sent)}
    assert told["plain"] == alone([3, 4])
    assert told["plain too"] == alone([6])
    assert told["likely"] == ([5, 500, 501], [number(5)] * 3)


def test_a_step_in_which_all_want_likely_tokens_is_as_vllm_made_it() -> None:
    asked = {"one": Asked([3], likely=1), "two": Asked([4], likely=1)}
    sent = stepped(asked)
    assert has_array(sent) == [True, True]
    assert [kept(output, 1) for output in received(sent)] == [
        ([3, 500], [number(3)] * 2),
        ([4, 500], [number(4)] * 2),
    ]


def test_a_step_without_numbers_and_one_without_tokens_have_no_array() -> None:
    asked = {"one": Asked([3]), "two": Asked([4])}
    made = computed(asked)
    made.logprobs = None
    assert has_array(stepped(asked, made)) == [False, False]
    assert stepped({"reads": Asked([])}) == []


def test_numbers_of_other_tokens_than_were_sampled_are_that_requests_error_alone() -> None:
    asked = {"well": Asked([3, 4]), "ill": Asked([5, 6], rows=[5, 7]), "well too": Asked([8])}
    sent = stepped(asked)
    assert has_array(sent) == [True, True, False]
    told = received(sent)
    assert [kept(told[0]), kept(told[2])] == [alone([3, 4]), alone([8])]
    of = processor()
    of.update_from_output(told[1])
    completion = CompletionOutput(0, "", [5, 6], None, of.logprobs, finish_reason="length")
    with pytest.raises(Internal, match="other tokens than it sampled"):
        answers.sequence(completion, 0, (Change(0, 1),))


def test_rows_that_are_not_there_are_their_requests_error_alone() -> None:
    asked = {"well": Asked([3]), "ill": Asked([5, 6], rows=[5])}
    told = received(stepped(asked))
    assert kept(told[0]) == alone([3])
    of = processor()
    of.update_from_output(told[1])
    completion = CompletionOutput(0, "", [5, 6], None, of.logprobs, finish_reason="length")
    with pytest.raises(Internal, match="for not all of 2 tokens"):
        answers.sequence(completion, 0, (Change(0, 1),))


def test_each_front_end_has_an_array_of_its_own_requests() -> None:
    asked = {str(token): Asked([token]) for token in range(1, 6)}
    scheduler: Any = Scheduler(asked, clients=2)
    core.install(scheduler)
    sent = scheduler.update_from_output(None, computed(asked))
    assert [has_array(of_client.outputs) for of_client in sent.values()] == [
        [True, False, False],
        [True, False],
    ]
    for client, tokens in enumerate(([1, 3, 5], [2, 4])):
        told = received(sent[client].outputs)
        assert [kept(output) for output in told] == [alone([token]) for token in tokens]


def test_who_else_reads_what_the_workers_made_finds_it_as_it_was() -> None:
    asked = {"one": Asked([3])}
    made = computed(asked)
    before = made.logprobs
    stepped(asked, made)
    assert made.logprobs is before and type(before) is LogprobsLists


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [2, 1], [1, 0]])
def test_a_message_that_does_not_come_out_even_is_refused(counts: list[int]) -> None:
    sent = stepped({"one": Asked([3]), "two": Asked([4])})
    assert sent[0].new_logprobs is not None
    sent[0].new_logprobs = sent[0].new_logprobs._replace(sampled_token_ranks=np.array(counts))
    with pytest.raises(ValueError, match="2 log-probabilities came with 2 outputs"):
        front.unpack(sent)
    assert not any(isinstance(output.new_logprobs, front.Sampled) for output in sent)


def test_a_sequence_keeps_what_came_by_either_way_and_all_else_that_came() -> None:
    of = processor()
    (first,) = received(stepped({"one": Asked([3, 4])}))
    scores: Any = SimpleNamespace(numpy=lambda: np.array([[-7.0]]))
    first.prompt_token_id_logprobs = scores
    of.update_from_output(first)
    own = LogprobsLists(np.array([[5]]), np.array([[number(5)]]), np.array([1]))
    of.update_from_output(EngineCoreOutput("one", [5], new_logprobs=own))
    of.update_from_output(EngineCoreOutput("one", []))
    of.update_from_output(received(stepped({"one": Asked([6])}))[0])
    assert places(of.logprobs) == alone([3, 4, 5, 6])
    assert of.cumulative_logprob == sum(map(number, (3, 4, 5, 6)))
    assert of.pop_prompt_token_id_logprobs() == [[-7.0]]
    # As the outputs of a stream have it, and as those are one again.
    kept: Any = of.logprobs
    joined = kept[:1]
    joined.extend(kept[-3:])
    assert (*places(joined), len(joined)) == (*alone([3, 4, 5, 6]), 4)
    assert (*places(kept), len(kept), len(kept[:0])) == (*alone([3, 4, 5, 6]), 4, 0)


def test_a_token_of_a_sequence_that_goes_on_takes_a_few_bytes() -> None:
    count = 20000
    outputs = [EngineCoreOutput("one", [token]) for token in range(count)]
    of = processor()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for token, output in enumerate(outputs):
        own: Any = front.Sampled([number(token)])
        output.new_logprobs = own
        of.update_from_output(output)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert of.logprobs is not None and len(of.logprobs) == count
    assert taken < 12 * count


async def test_a_front_end_hands_an_output_out_when_it_has_its_numbers() -> None:
    sent = EngineCoreOutputs(outputs=stepped({"one": Asked([3]), "two": Asked([4])}))

    async def get() -> EngineCoreOutputs:
        return sent

    llm: Any = SimpleNamespace(engine_core=SimpleNamespace(get_output_async=get))
    front.install(llm)
    told = await llm.engine_core.get_output_async()
    assert [output.new_logprobs for output in told.outputs] == [[number(3)], [number(4)]]


def test_a_vllm_that_lacks_what_is_replaced_does_not_start() -> None:
    with pytest.raises(
        RuntimeError, match=r"has no update_from_output; check services\.sampler\.engine\.logprobs"
    ):
        core.install(SimpleNamespace(requests={}))
    with pytest.raises(
        RuntimeError, match=r"has no get_output_async; check services\.sampler\.engine\.logprobs"
    ):
        front.install(SimpleNamespace(engine_core=SimpleNamespace()))


SCHEDULER, PROCESSOR = "vllm.v1.core.sched.scheduler", "vllm.v1.engine.output_processor"


@pytest.mark.parametrize(
    ("module", "call", "ours", "name"),
    [
        ("vllm.v1.engine.core", "self.scheduler.update_from_output", "core", "install.updated"),
        (SCHEDULER, "logprobs.slice_request", "core", "StepRows.slice_request"),
        ("vllm.v1.engine.async_llm", "engine_core.get_output_async", "front", "install.got"),
        (PROCESSOR, "output.new_logprobs.slice_request", "front", "Sampled.slice_request"),
        (
            *(PROCESSOR, "req_state.logprobs_processor.update_from_output"),
            *("front", "Processor.update_from_output"),
        ),
    ],
)
def test_what_stands_in_vllms_place_takes_what_vllm_gives_it(
    module: str, call: str, ours: str, name: str
) -> None:
    calls = written(module).calls(call)
    assert calls, f"{module} does not call {call} any more"
    takes = written(OURS + ours).signature(name)
    assert [ast.unparse(each) for each in calls if not fits(each, takes)] == []


def test_what_stands_for_vllms_rows_is_asked_for_what_it_has_and_no_more() -> None:
    asked = written("vllm.outputs").taken_of("completion.logprobs")
    asked |= written("vllm.logprobs").taken_of("request_logprobs")
    # The other one is of FlatLogprobs.
    assert asked == {"extend", "append", "append_fast"}
    has = written(OURS + "kept").members("KeptLogprobs")
    assert {"extend", "append", "__len__", "__getitem__"} <= has


def test_vllm_reads_nothing_else_of_what_stands_in_its_place() -> None:
    assert written(SCHEDULER).taken_of("logprobs") == {"slice_request"}
    assert written(PROCESSOR).taken_of("output.new_logprobs") == {"slice_request"}
    assert written(PROCESSOR).taken_of("engine_core_output.new_logprobs") == set()


@pytest.mark.parametrize(
    ("module", "kind", "names"),
    [
        (SCHEDULER, "Scheduler", ["requests", "update_from_output"]),
        ("vllm.v1.outputs", "ModelRunnerOutput", ["req_ids", "logprobs"]),
        ("vllm.v1.engine", "EngineCoreOutput", ["request_id", "new_token_ids", "new_logprobs"]),
        (
            *("vllm.v1.engine.logprobs", "LogprobsProcessor"),
            ["tokenizer", "num_logprobs", "logprobs", "cumulative_logprob"],
        ),
        ("vllm.logprobs", "FlatLogprobs", ["start_indices", "end_indices", "token_ids", "logprobs"]),
    ],
)
def test_vllms_objects_have_what_they_are_asked_for(module: str, kind: str, names: list[str]) -> None:
    assert set(names) - written(module).members(kind) == set()


def test_vllms_rows_are_what_they_are_taken_for() -> None:
    fields = ["logprob_token_ids", "logprobs", "sampled_token_ranks", "cu_num_generated_tokens"]
    assert list(LogprobsLists._fields) == fields
