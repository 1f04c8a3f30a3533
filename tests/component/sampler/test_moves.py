"""One real sampler: generations that go on with newer weights, and what is kept of those that are ended."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import NamedTuple

import pytest
import torch

from tests.component.sampler.kept import check_kept
from tests.component.sampler.process import (
    MODEL_ID,
    NEVER,
    Sampler,
    floats,
    ints,
    prompt,
    request,
    sample,
)
from tests.reference import check_logprobs
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc
from tinsmith.v1 import sampling_pb2

pytestmark = pytest.mark.heavy

CANCELLED, LENGTH = sampling_pb2.STOP_REASON_CANCELLED, sampling_pb2.STOP_REASON_LENGTH
FULL = (301, 302, 303)
COPY = 3
"""How much later a copy of a version is."""
ATTEMPTS = 10


@pytest.fixture(scope="module", autouse=True)
def stored(sampler: Sampler) -> Iterator[None]:
    """Full versions lie in the store beside the adapters."""
    for version in FULL:
        sampler.store_full(version)
    yield


class Told:
    """A sample that is followed."""

    def __init__(self, stub: sampler_pb2_grpc.SamplerServiceStub, wanted: sampler_pb2.SampleRequest) -> None:
        self._stub, self._wanted = stub, wanted
        self._answers = self._ask()
        self.tokens: list[list[int]] = [[] for _ in range(wanted.num_samples)]
        self.made = [Counter[int]() for _ in range(wanted.num_samples)]
        """Tokens of each sequence by what was said of their version, in order."""
        self.last = sampler_pb2.SampleResponse()

    async def _ask(self) -> AsyncIterator[sampler_pb2.StreamSampleResponse]:
        asked = sampler_pb2.StreamSampleRequest(sample=self._wanted)
        async for answer in self._stub.StreamSample(asked, timeout=240):
            yield answer

    async def read(self, more: int) -> None:
        """Until every sequence has so many more tokens, or to the end."""
        goal = [len(tokens) + more for tokens in self.tokens]
        while any(len(tokens) < most for tokens, most in zip(self.tokens, goal, strict=True)):
            answer = await anext(self._answers)
            if answer.WhichOneof("kind") == "last":
                self.last = answer.last
                return
            for part in answer.new_tokens.sequences:
                assert part.start == len(self.tokens[part.index])
                self.tokens[part.index] += ints(part.added.tokens)
                self.made[part.index][part.version] += part.added.tokens.shape[0]

    async def move(self, version: int) -> None:
        to = sampler_pb2.Snapshot(model_id=MODEL_ID, version=version)
        moved = sampler_pb2.MoveSampleRequest(request_id=self._wanted.request_id, snapshot=to)
        await self._stub.MoveSample(moved, timeout=60)

    async def result(self) -> sampling_pb2.SampleResult:
        await self.read(10**6)
        assert self.last.HasField("result"), self.last
        assert [ints(sequence.tokens) for sequence in self.last.result.sequences] == self.tokens
        made = [list(one.items()) for one in self.made]
        assert [spans(sequence) for sequence in self.last.result.sequences] == made
        return self.last.result


class Moved(NamedTuple):
    """A generation that went on with newer weights."""

    prompt: list[int]
    made: sampling_pb2.SampledSequence


def spans(sequence: sampling_pb2.SampledSequence) -> list[tuple[int, int]]:
    return [(span.version, span.tokens) for span in sequence.versions]


def check_segments(judge, tokens: list[int], sequence: sampling_pb2.SampledSequence, k: int = 0) -> None:
    """Every token has the log-probability that the weights of its span give it after all before it."""
    sampled, found = ints(sequence.tokens), floats(sequence.logprobs)
    assert sum(count for _, count in spans(sequence)) == len(sampled) == len(found)
    start = 0
    for version, count in spans(sequence):
        distribution = judge(version).distribution(tokens + sampled).detach()
        rows = distribution[len(tokens) - 1 + start : len(tokens) - 1 + start + count]
        own = torch.tensor(sampled[start : start + count]).unsqueeze(1)
        expected = rows.gather(1, own).squeeze(1)
        check_logprobs(found[start : start + count], expected)
        if k:
            likely = floats(sequence.topk_logprobs.logprobs).view(len(sampled), k)[start : start + count]
            check_logprobs(likely, rows.topk(k).values)
        start += count


def measured_updates(sampler: Sampler) -> int:
    """How often its metrics say that newer weights kept a sequence waiting."""
    with urllib.request.urlopen(f"http://127.0.0.1:{sampler.metrics_port}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    (count,) = re.findall(r"^tinsmith_sample_update_seconds_count (\S+)$", text, re.MULTILINE)
    return int(float(count))


@pytest.mark.parametrize("versions", [(1, 2, 3), FULL])
async def test_every_segment_of_a_moved_generation_is_what_its_own_weights_give(
    stub, judge, versions: tuple[int, ...]
) -> None:
    tokens = prompt(71, 18)
    wanted = request(tokens, versions[0], n=2, scores=True, seed=3, max_tokens=490, stop=NEVER)
    wanted.topk_sample_logprobs, wanted.moves = 2, True
    running = Told(stub, wanted)
    for version in versions[1:]:
        await running.read(40)
        await running.move(version)
        # What is older, or the same, moves nothing.
        await running.move(version)
        await running.move(versions[0])
    result = await running.result()
    for sequence in result.sequences:
        made = [version for version, _ in spans(sequence)]
        # What comes between may be passed over before its first token.
        assert (made[0], made[-1], made) == (versions[0], versions[-1], sorted(set(made)))
        assert (sequence.stop_reason, len(ints(sequence.tokens))) == (LENGTH, 490)
        check_segments(judge, tokens, sequence, 2)
    expected = judge(versions[0]).sequence_logprobs(tokens)
    check_logprobs(floats(result.prompt_logprobs)[1:], expected)


async def bring(stub: sampler_pb2_grpc.SamplerServiceStub, *versions: int) -> None:
    """Has adapters in memory: a generation that keeps its keys and values goes on while they are loaded, and
    might be over before."""
    for version in versions:
        await sample(stub, request(prompt(1, 3), version, max_tokens=1))


@pytest.mark.parametrize("versions", [(1, 2, 3), FULL])
async def test_every_segment_of_a_generation_that_keeps_keys_and_values_is_what_its_weights_give_over_them(
    stub, judge, versions: tuple[int, ...]
) -> None:
    if versions != FULL:
        await bring(stub, *versions[1:])
    tokens = prompt(75, 18)
    wanted = request(tokens, versions[0], n=3, scores=True, seed=3, max_tokens=490, stop=NEVER)
    wanted.topk_sample_logprobs, wanted.moves, wanted.keeps_kv = 2, True, True
    running = Told(stub, wanted)
    for version in versions[1:]:
        await running.read(40)
        await running.move(version)
        await running.move(versions[0])
    result = await running.result()
    for sequence in result.sequences:
        made = [(span.version, span.kv_kept) for span in sequence.versions]
        assert made == [(version, version != versions[0]) for version in versions]
        assert (sequence.stop_reason, len(ints(sequence.tokens))) == (LENGTH, 490)
        check_kept(judge, tokens, sequence, 2)
        with pytest.raises(AssertionError):
            check_segments(judge, tokens, sequence)
    expected = judge(versions[0]).sequence_logprobs(tokens)
    check_logprobs(floats(result.prompt_logprobs)[1:], expected)


async def moved(stub, wanted: Iterable[sampler_pb2.SampleRequest], to: int, after: int) -> Moved:
    """The first of these generations that newer weights came to before it had ended, after so many tokens:
    a small model makes hundreds while a busy machine lets nobody else run."""
    for each in wanted:
        running = Told(stub, each)
        await running.read(after)
        await running.move(to)
        (made,) = (await running.result()).sequences
        if len(made.versions) > 1:
            return Moved(ints(each.prompt), made)
    raise AssertionError("newer weights came to none of them")


@pytest.mark.parametrize("versions", [(1, 2), FULL[:2]])
async def test_keys_and_values_that_were_kept_are_found_by_nobody_else_and_those_before_by_their_own_version(
    stub, judge, versions: tuple[int, int]
) -> None:
    former, newer = versions
    if versions != FULL[:2]:
        await bring(stub, newer)

    def asked(attempt: int) -> sampler_pb2.SampleRequest:
        # Each with a prompt of its own, of which nothing is kept yet.
        wanted = request(prompt(760 + attempt, 150), former, seed=4, max_tokens=360, stop=NEVER)
        wanted.moves = wanted.keeps_kv = True
        return wanted

    tokens, made = await moved(stub, map(asked, range(ATTEMPTS)), newer, after=40)
    assert [(span.version, span.kv_kept) for span in made.versions] == [(former, False), (newer, True)]
    first = len(tokens) + made.versions[0].tokens - 1
    whole, found, differ = tokens + ints(made.tokens), {}, {}
    for version in versions:
        again = await sample(stub, request(whole, version, max_tokens=1, temperature=0.0, stop=NEVER))
        found[version] = again.prompt_cache_hit_tokens
        expected = float(judge(version).distribution(whole)[-1].detach().max())
        differ[version] = abs(float(floats(again.sequences[0].logprobs)[0]) - expected)
    assert max(differ.values()) < 1e-4, (differ, found, first)
    # Whole blocks are found.
    assert 0 < found[former] <= first, (found, first)
    assert found[newer] == 0


@pytest.mark.parametrize("original", [1, FULL[0]])
@pytest.mark.parametrize("field", ["penalties", "constraint", "stop string", "nothing"])
async def test_what_looks_back_goes_on_over_a_change_of_weights_that_keeps_keys_and_values(
    sampler: Sampler, stub, field: str, original: int
) -> None:
    """A version that is a copy of the one before makes what that would have made."""
    copy = original + COPY
    copied = sampler.stored(copy)
    if not copied.exists():
        copied.symlink_to(sampler.stored(original))
    if original == 1:
        await bring(stub, copy)

    def asked() -> sampler_pb2.SampleRequest:
        wanted = request(prompt(78, 12), original, seed=9, max_tokens=490, stop=NEVER)
        wanted.moves = wanted.keeps_kv = True
        if field == "penalties":
            wanted.params.frequency_penalty, wanted.params.presence_penalty = 0.5, 0.25
            wanted.params.bad_words.append("ab")
        elif field == "constraint":
            wanted.constraint.regex = "(ab|ba|a){490}"
            wanted.params.stop.CopyFrom(sampling_pb2.StopCondition(model_eos={}))
        elif field == "stop string":
            wanted.params.stop.CopyFrom(sampling_pb2.StopCondition(strings={"values": ["never in it"]}))
        return wanted

    still = await sample(stub, asked())
    _, made = await moved(stub, (asked() for _ in range(ATTEMPTS)), copy, after=20)
    assert [span.version for span in made.versions] == [original, copy]
    assert ints(made.tokens) == ints(still.sequences[0].tokens)


async def test_generations_of_all_weights_keep_their_keys_and_values_once_those_that_finish_beside_them_have(
    stub, judge
) -> None:
    old, new = FULL[:2]
    finishing = request(prompt(80, 18), old, seed=1, max_tokens=150, stop=NEVER)
    moving = [
        request(prompt(81 + index, length), old, scores=True, seed=index, max_tokens=most, stop=NEVER)
        for index, (length, most) in enumerate([(18, 450), (300, 200), (310, 20)])
    ]
    for wanted in moving:
        wanted.moves = wanted.keeps_kv = True
    beside, running = Told(stub, finishing), [Told(stub, wanted) for wanted in moving]
    await asyncio.gather(*(one.read(1) for one in (beside, *running)))
    for one in running:
        await one.move(new)
    after = asyncio.create_task(sample(stub, request(prompt(99, 9), new, max_tokens=9, stop=NEVER)))
    (stayed,) = (await beside.result()).sequences
    assert spans(stayed) == [(old, 150)]
    check_segments(judge, ints(finishing.prompt), stayed)
    for wanted, one in zip(moving, running, strict=True):
        result = await one.result()
        (made,) = result.sequences
        check_kept(judge, ints(wanted.prompt), made)
        scores = judge(old).sequence_logprobs(ints(wanted.prompt))
        check_logprobs(floats(result.prompt_logprobs)[1:], scores)
        kept = [(span.version, span.kv_kept) for span in made.versions]
        # The last one is over before.
        assert kept == ([(old, False)] if wanted is moving[-1] else [(old, False), (new, True)])
    assert running[0].last.result.sequences[0].versions[0].tokens > 100, "it went on with what it had"
    assert spans((await after).sequences[0]) == [(new, 9)]


async def test_a_generation_gets_on_however_fast_newer_weights_come(sampler: Sampler, stub) -> None:
    first, most = 1000, 20_000
    for version in range(first, most):
        sampler.stored(version).symlink_to(sampler.stored(2))
    before = measured_updates(sampler)
    wanted = request(prompt(74, 10), first, n=2, max_tokens=60, stop=NEVER, seed=5)
    wanted.moves = True
    asked = asyncio.create_task(sample(stub, wanted))
    for version in range(first + 1, most):
        if asked.done():
            break
        to = sampler_pb2.Snapshot(model_id=MODEL_ID, version=version)
        moved = sampler_pb2.MoveSampleRequest(request_id=wanted.request_id, snapshot=to)
        await stub.MoveSample(moved, timeout=60)
    else:
        pytest.fail("the updates kept it from its tokens")
    result = await asked
    assert [len(ints(sequence.tokens)) for sequence in result.sequences] == [60, 60]
    updates = sum(len(sequence.versions) - 1 for sequence in result.sequences)
    assert updates > 0
    assert measured_updates(sampler) - before == updates


async def test_a_generation_that_was_not_asked_to_move_keeps_its_weights(stub) -> None:
    still = request(prompt(72, 9), 1, max_tokens=150, stop=NEVER, seed=1)
    running = Told(stub, still)
    await running.read(3)
    await running.move(2)
    (sequence,) = (await running.result()).sequences
    assert spans(sequence) == [(1, 150)]


async def test_what_is_kept_of_an_ended_generation_goes_on_where_it_was(stub, judge) -> None:
    tokens = prompt(73, 12)
    whole = request(tokens, 1, temperature=0.0, max_tokens=500, stop=NEVER)
    running = Told(stub, whole)
    await running.read(5)
    await stub.EndSample(sampler_pb2.EndSampleRequest(request_id=whole.request_id, keep=True), timeout=60)
    found = await running.result()
    (part,) = found.sequences
    kept = ints(part.tokens)
    assert (part.stop_reason, spans(part)) == (CANCELLED, [(1, len(kept))])
    assert len(kept) < 500
    assert await sample(stub, whole) == found, "a repeat is answered with the same"
    rest = request(tokens + kept, 1, temperature=0.0, max_tokens=20, stop=NEVER)
    (further,) = (await sample(stub, rest)).sequences
    distribution = judge(1).distribution(tokens + kept + ints(further.tokens)).detach()
    rows = distribution[len(tokens) - 1 : -1]
    chosen = torch.tensor(kept + ints(further.tokens)).unsqueeze(1)
    told = torch.cat([floats(part.logprobs), floats(further.logprobs)])
    check_logprobs(told, rows.gather(1, chosen).squeeze(1))
    check_logprobs(told, rows.max(1).values)
