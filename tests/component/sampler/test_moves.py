"""One real sampler: generations that go on with newer weights, and what is kept of those that are ended."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from tests.component.sampler.kept import check_kept
from tests.component.sampler.process import (
    MODEL_ID,
    Sampler,
    floats,
    ints,
    make_full,
    prompt,
    request,
    sample,
    write_full,
)
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc
from tinsmith.v1 import sampling_pb2, types_pb2

pytestmark = pytest.mark.heavy

NEVER = sampling_pb2.StopCondition(never={})
CANCELLED, LENGTH = sampling_pb2.STOP_REASON_CANCELLED, sampling_pb2.STOP_REASON_LENGTH
TOLERANCE = 1e-4
FULL = (301, 302)
COPY = 4


@pytest.fixture(scope="module", autouse=True)
def stored(sampler: Sampler) -> Iterator[None]:
    """Two full versions lie in the store beside the adapters."""
    for version in FULL:
        directory = sampler.data_dir.snapshot(MODEL_ID, version)
        write_full(directory, sampler.model_dir, make_full(sampler.model_dir, version))
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
        torch.testing.assert_close(found[start : start + count], expected, atol=TOLERANCE, rtol=0)
        if k:
            likely = floats(sequence.topk_logprobs.logprobs).view(len(sampled), k)[start : start + count]
            torch.testing.assert_close(likely, rows.topk(k).values, atol=TOLERANCE, rtol=0)
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
    torch.testing.assert_close(floats(result.prompt_logprobs)[1:], expected, atol=TOLERANCE, rtol=0)


async def bring(stub: sampler_pb2_grpc.SamplerServiceStub, *versions: int) -> None:
    """Has adapters in memory: a generation that keeps its keys and values goes on while they are loaded, and
    might be over before."""
    for version in versions:
        await sample(stub, request(prompt(1, 3), version, max_tokens=1))


async def test_every_segment_of_a_generation_that_keeps_keys_and_values_is_what_its_weights_give_over_them(
    stub, judge
) -> None:
    await bring(stub, 2, 3)
    tokens = prompt(75, 18)
    wanted = request(tokens, 1, n=3, scores=True, seed=3, max_tokens=490, stop=NEVER)
    wanted.topk_sample_logprobs, wanted.moves, wanted.keeps_kv = 2, True, True
    running = Told(stub, wanted)
    for version in (2, 3):
        await running.read(40)
        await running.move(version)
        await running.move(1)
    result = await running.result()
    for sequence in result.sequences:
        made = [(span.version, span.kv_kept) for span in sequence.versions]
        assert made == [(1, False), (2, True), (3, True)]
        assert (sequence.stop_reason, len(ints(sequence.tokens))) == (LENGTH, 490)
        check_kept(judge, tokens, sequence, 2)
        with pytest.raises(AssertionError):
            check_segments(judge, tokens, sequence)
    expected = judge(1).sequence_logprobs(tokens)
    torch.testing.assert_close(floats(result.prompt_logprobs)[1:], expected, atol=TOLERANCE, rtol=0)


async def test_keys_and_values_that_were_kept_are_found_by_nobody_else_and_those_before_by_their_own_version(
    stub, judge
) -> None:
    await bring(stub, 2)
    tokens = prompt(76, 150)
    wanted = request(tokens, 1, seed=4, max_tokens=300, stop=NEVER)
    wanted.moves = wanted.keeps_kv = True
    running = Told(stub, wanted)
    await running.read(40)
    await running.move(2)
    (made,) = (await running.result()).sequences
    assert [(span.version, span.kv_kept) for span in made.versions] == [(1, False), (2, True)]
    first = len(tokens) + made.versions[0].tokens - 1
    whole, found, differ = tokens + ints(made.tokens), {}, {}
    for version in (1, 2):
        again = await sample(stub, request(whole, version, max_tokens=1, temperature=0.0, stop=NEVER))
        found[version] = again.prompt_cache_hit_tokens
        expected = float(judge(version).distribution(whole)[-1].detach().max())
        differ[version] = abs(float(floats(again.sequences[0].logprobs)[0]) - expected)
    assert max(differ.values()) < TOLERANCE, (differ, found, first)
    # Whole blocks are found.
    assert 0 < found[1] <= first, (found, first)
    assert found[2] == 0


@pytest.mark.parametrize("field", ["penalties", "constraint", "stop string", "nothing"])
async def test_what_looks_back_goes_on_over_a_change_of_weights_that_keeps_keys_and_values(
    sampler: Sampler, stub, field: str
) -> None:
    """A version that is a copy of the one before makes what that would have made."""
    copied = sampler.data_dir.snapshot(MODEL_ID, COPY)
    if not copied.exists():
        copied.symlink_to(sampler.data_dir.snapshot(MODEL_ID, 1))
    await bring(stub, COPY)

    def asked() -> sampler_pb2.SampleRequest:
        wanted = request(prompt(78, 12), 1, seed=9, max_tokens=300, stop=NEVER)
        wanted.moves = wanted.keeps_kv = True
        if field == "penalties":
            wanted.params.frequency_penalty, wanted.params.presence_penalty = 0.5, 0.25
            wanted.params.bad_words.append("ab")
        elif field == "constraint":
            wanted.constraint.regex = "(ab|ba|a){300}"
            wanted.params.stop.CopyFrom(sampling_pb2.StopCondition(model_eos={}))
        elif field == "stop string":
            wanted.params.stop.CopyFrom(sampling_pb2.StopCondition(strings={"values": ["never in it"]}))
        return wanted

    still = await sample(stub, asked())
    running = Told(stub, asked())
    await running.read(20)
    await running.move(COPY)
    (made,) = (await running.result()).sequences
    assert [span.version for span in made.versions] == [1, COPY]
    assert ints(made.tokens) == ints(still.sequences[0].tokens)


async def test_a_generation_of_all_weights_does_not_keep_keys_and_values(stub) -> None:
    wanted = request(prompt(77, 5), FULL[0], max_tokens=5, stop=NEVER)
    wanted.moves = wanted.keeps_kv = True
    answer = await stub.Sample(wanted, timeout=240)
    assert answer.error.category == types_pb2.ERROR_CATEGORY_USER
    assert "let on_update be CONTINUE or FINISH" in answer.error.message


async def test_a_generation_gets_on_however_fast_newer_weights_come(sampler: Sampler, stub) -> None:
    first, most = 1000, 4000
    for version in range(first, most):
        sampler.data_dir.snapshot(MODEL_ID, version).symlink_to(sampler.data_dir.snapshot(MODEL_ID, 2))
    before = measured_updates(sampler)
    wanted = request(prompt(74, 10), first, n=2, max_tokens=20, stop=NEVER, seed=5)
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
    assert [len(ints(sequence.tokens)) for sequence in result.sequences] == [20, 20]
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
    torch.testing.assert_close(told, rows.gather(1, chosen).squeeze(1), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(told, rows.max(1).values, atol=TOLERANCE, rtol=0)
