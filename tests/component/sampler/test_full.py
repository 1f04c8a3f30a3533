"""Full snapshots in a real sampler: every weight replaced, and exactly, against transformers in float32."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

import grpc
import pytest
import torch

from services.common import weights
from services.common.contract.tensors import HostTensor
from services.common.state import keys, registry
from services.common.state.redis_client import connect
from services.trainer.files.base import Base
from services.trainer.publish.broadcast import Broadcaster
from services.trainer.publish.publisher import Publisher
from tests.component.sampler.process import (
    BASE_MODEL,
    MODEL_ID,
    NEVER,
    Sampler,
    floats,
    ints,
    join,
    make_full,
    prompt,
    request,
    sample,
    status,
    until_running,
    write_full,
)
from tests.reference import Reference
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import sampling_pb2, types_pb2

pytestmark = pytest.mark.heavy

TOLERANCE = 1e-5
# Adapters add sums of products as large as the base's.
ADAPTER_TOLERANCE = 1e-4
DTYPES = {
    torch.float32: types_pb2.DATA_TYPE_FLOAT32,
    torch.bfloat16: types_pb2.DATA_TYPE_BFLOAT16,
}
FULL = (201, 202)


@pytest.fixture(scope="module", autouse=True)
def stored(sampler: Sampler) -> Iterator[None]:
    """Two full versions lie in the store from the beginning."""
    for version in FULL:
        sampler.store_full(version)
    yield


async def send(stub, group: weights.WeightGroup, version: int, tensors: dict[str, torch.Tensor]) -> None:
    """Broadcasts a full snapshot as the trainer does."""
    buffer, specs = weights.pack(tensors)
    incoming = sampler_pb2.ReceiveSnapshotRequest(
        epoch=group.epoch,
        snapshot=sampler_pb2.Snapshot(model_id=MODEL_ID, version=version),
        tensors=[
            sampler_pb2.TensorSpec(name=s.name, dtype=DTYPES[tensors[s.name].dtype], shape=s.shape)
            for s in specs
        ],
        checksum=weights.checksum(buffer),
        timeout_seconds=120,
    )
    sent = asyncio.create_task(
        asyncio.to_thread(group.broadcast_buckets, buffer.split(weights.BUCKET_BYTES), 120)
    )
    await stub.ReceiveSnapshot(incoming, timeout=150)
    await sent


def check(
    judge: Reference, tokens: list[int], result: sampling_pb2.SampleResult, tolerance: float = TOLERANCE
) -> None:
    """Prompt scores, greedy tokens and their log-probabilities are the judge's."""
    (sequence,) = result.sequences
    sampled = ints(sequence.tokens)
    expected = judge.sequence_logprobs(tokens + sampled)
    scores = floats(result.prompt_logprobs)[1:]
    torch.testing.assert_close(scores, expected[: len(tokens) - 1], atol=tolerance, rtol=0)
    torch.testing.assert_close(floats(sequence.logprobs), expected[len(tokens) - 1 :], atol=tolerance, rtol=0)
    assert sampled == judge.greedy(tokens, len(sampled))


def greedy(tokens: list[int], version: int, count: int = 8) -> sampler_pb2.SampleRequest:
    return request(tokens, version, scores=True, temperature=0.0, max_tokens=count, stop=NEVER)


def snapshot(version: int) -> sampler_pb2.Snapshot:
    return sampler_pb2.Snapshot(model_id=MODEL_ID, version=version)


async def test_a_stored_full_version_answers_exactly_and_base_comes_back_bit_for_bit(stub, judge) -> None:
    before = [await sample(stub, greedy(prompt(i, 40), 0, 30)) for i in (0, 1)]
    for version in (*FULL, FULL[0]):
        check(judge(version), prompt(2, 40), await sample(stub, greedy(prompt(2, 40), version)))
        assert (await status(stub)).weights == snapshot(version)
    after = [await sample(stub, greedy(prompt(i, 40), 0, 30)) for i in (0, 1)]
    assert not (await status(stub)).HasField("weights")
    assert [r.SerializeToString() for r in before] == [r.SerializeToString() for r in after]


async def test_it_announces_whose_weights_its_engine_has(stub, sampler: Sampler) -> None:
    client = connect(sampler.redis_url)
    for version, name in ((201, f"{MODEL_ID}@201"), (0, "")):
        await sample(stub, greedy(prompt(1, 5), version))
        async with asyncio.timeout(120):
            while [r.weights for r in await registry.live(client, "sampler")] != [name]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await client.aclose()


async def test_a_broadcast_version_is_a_flip_and_running_requests_finish_on_their_own_weights(
    stub, judge, sampler: Sampler
) -> None:
    group = await join(stub, sampler, epoch=10)
    running = asyncio.create_task(sample(stub, request(prompt(3, 10), 0, seed=4, max_tokens=500, stop=NEVER)))
    await until_running(stub, lambda running: running == 1)
    # Not in the store: the wire is the only way they can arrive. One in float32, one as a bfloat16 model.
    sent = {
        203: make_full(sampler.model_dir, 203),
        204: {name: t.bfloat16() for name, t in make_full(sampler.model_dir, 204).items()},
    }
    for version, tensors in sent.items():
        await send(stub, group, version, tensors)
        assert snapshot(version) in (await status(stub)).resident
    assert not running.done()
    results = await asyncio.gather(*(sample(stub, greedy(prompt(4, 20), version)) for version in sent))
    assert running.done()
    tokens = prompt(3, 10) + ints((await running).sequences[0].tokens)
    torch.testing.assert_close(
        floats((await running).sequences[0].logprobs),
        judge(0).sequence_logprobs(tokens)[9:],
        atol=TOLERANCE,
        rtol=0,
    )
    for (version, tensors), result in zip(sent.items(), results, strict=True):
        floated = {name: tensor.float() for name, tensor in tensors.items()}
        directory = write_full(sampler.data_dir.root / "judged" / str(version), sampler.model_dir, floated)
        check(Reference(directory), prompt(4, 20), result)
    group.abort()


async def test_what_the_trainer_publishes_is_answered_from_the_wire_and_from_the_store_alike(
    stub, judge, sampler: Sampler
) -> None:
    client = connect(sampler.redis_url)
    # The broadcaster numbers its groups from here.
    await client.set(keys.weight_epoch(BASE_MODEL), 20)
    broadcaster = Broadcaster(client, sampler.redis_url, BASE_MODEL, "cpu", torch.float32)
    publisher = Publisher(sampler.data_dir, Base(BASE_MODEL, str(sampler.model_dir)), broadcaster)
    tensors = {
        name: HostTensor("float32", tuple(tensor.shape), tensor.numpy().tobytes())
        for name, tensor in make_full(sampler.model_dir, 220).items()
    }
    published = await publisher.publish(MODEL_ID, 220, None, tensors)
    assert published.receivers == 1
    assert published.wire_bytes >= sum(len(array.data) for array in tensors.values())
    assert snapshot(220) in (await status(stub)).resident
    received = await sample(stub, greedy(prompt(10, 30), 220))
    check(judge(220), prompt(10, 30), received)
    # The same model under another version, which the sampler has to read.
    shutil.copytree(sampler.stored(220), sampler.stored(221))
    read = await sample(stub, greedy(prompt(10, 30), 221))
    for result, version in ((received, 220), (read, 221)):
        (sequence,) = result.sequences
        assert [span.version for span in sequence.versions] == [version]
        sequence.ClearField("versions")
    assert read.SerializeToString() == received.SerializeToString()
    await broadcaster.close()
    await client.aclose()


async def test_base_adapters_and_two_full_versions_at_once_are_all_right(stub, judge) -> None:
    cases = [(version, prompt(20 + i, 12 + i)) for i, version in enumerate([0, 201, 1, 202, 2] * 4)]
    results = await asyncio.gather(*(sample(stub, greedy(p, version)) for version, p in cases))
    for (version, tokens), result in zip(cases, results, strict=True):
        check(judge(version), tokens, result, ADAPTER_TOLERANCE if version in (1, 2) else TOLERANCE)


async def test_no_version_is_starved_by_another_that_is_always_busy(stub, judge) -> None:
    stop = asyncio.Event()

    async def keep_busy(version: int) -> int:
        done = 0
        while not stop.is_set():
            await sample(stub, request(prompt(5, 8), version, max_tokens=30, stop=NEVER))
            done += 1
        return done

    busy = [asyncio.create_task(keep_busy(0)) for _ in range(3)]
    await until_running(stub, lambda running: running == 3)
    async with asyncio.timeout(300):
        for version in (201, 202):
            check(judge(version), prompt(6, 9), await sample(stub, greedy(prompt(6, 9), version)))
    stop.set()
    assert min(await asyncio.gather(*busy)) > 0


async def test_cached_prefixes_stay_with_their_weights(stub, judge) -> None:
    tokens = prompt(90, 301)
    for cached in (0, 256):
        for version in (0, 201, 202):
            result = await sample(stub, request(tokens, version, temperature=0.0, max_tokens=4, stop=NEVER))
            assert result.prompt_cache_hit_tokens == cached, version
            sampled = ints(result.sequences[0].tokens)
            expected = judge(version).sequence_logprobs(tokens + sampled)[300:]
            torch.testing.assert_close(floats(result.sequences[0].logprobs), expected, atol=TOLERANCE, rtol=0)


async def test_weights_that_do_not_fit_fail_their_requests_and_nothing_else(
    stub, judge, sampler: Sampler
) -> None:
    whole = make_full(sampler.model_dir, 1)
    norm, k_proj = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"
    wrong = {
        210: ({name: t for name, t in whole.items() if name != norm}, norm),
        211: (whole | {k_proj: torch.zeros(3, 3)}, "do not fit"),
        212: (whole | {"model.layers.9.mlp.up_proj.weight": torch.zeros(3, 3)}, "do not fit"),
        213: (whole | {"lm_head.weight": torch.zeros(512, 64)}, "lm_head"),
    }
    for version, (tensors, hint) in wrong.items():
        write_full(sampler.stored(version), sampler.model_dir, tensors)
        response = await stub.Sample(greedy(prompt(7, 9), version), timeout=150)
        assert hint in response.error.message
        assert response.error.category == types_pb2.ERROR_CATEGORY_USER
        for good in (201, 0):
            check(judge(good), prompt(7, 9), await sample(stub, greedy(prompt(7, 9), good)))
    tied = whole | {"lm_head.weight": whole["model.embed_tokens.weight"].clone()}
    write_full(sampler.stored(214), sampler.model_dir, tied)
    check(judge(214), prompt(7, 9), await sample(stub, greedy(prompt(7, 9), 214)))


async def test_a_refused_version_leaves_the_weights_that_are_served_in_the_engine(
    stub, judge, sampler: Sampler
) -> None:
    whole = make_full(sampler.model_dir, 1)
    write_full(
        sampler.stored(215),
        sampler.model_dir,
        whole | {"model.norm.weight": torch.zeros(3)},
    )
    check(judge(202), prompt(7, 9), await sample(stub, greedy(prompt(7, 9), 202)))
    # From here on they are in the engine and nowhere else.
    stored = sampler.stored(202)
    aside = stored.rename(stored.with_name("aside"))
    try:
        for _ in range(2):
            response = await stub.Sample(greedy(prompt(7, 9), 215), timeout=60)
            assert "do not fit" in response.error.message
            assert (await status(stub)).weights == snapshot(202)
        check(judge(202), prompt(7, 11), await sample(stub, greedy(prompt(7, 11), 202)))
    finally:
        aside.rename(stored)


async def test_a_damaged_full_broadcast_is_refused_and_nothing_of_it_is_kept(
    stub, judge, sampler: Sampler
) -> None:
    group = await join(stub, sampler, epoch=11)
    tensors = make_full(sampler.model_dir, 205)
    buffer, specs = weights.pack(tensors)
    wanted = sampler_pb2.ReceiveSnapshotRequest(
        epoch=11,
        snapshot=snapshot(205),
        tensors=[
            sampler_pb2.TensorSpec(name=s.name, dtype=types_pb2.DATA_TYPE_FLOAT32, shape=s.shape)
            for s in specs
        ],
        checksum=weights.checksum(buffer) ^ 1,
        timeout_seconds=120,
    )
    sent = asyncio.create_task(
        asyncio.to_thread(group.broadcast_buckets, buffer.split(weights.BUCKET_BYTES), 120)
    )
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.ReceiveSnapshot(wanted, timeout=150)
    await sent
    assert error.value.code() is grpc.StatusCode.DATA_LOSS
    assert snapshot(205) not in (await status(stub)).resident
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Sample(greedy(prompt(8, 9), 205), timeout=150)
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    group.abort()


async def test_a_request_that_gives_up_while_it_waits_holds_nothing(stub, judge) -> None:
    running = asyncio.create_task(sample(stub, request(prompt(9, 10), 201, max_tokens=500, stop=NEVER)))
    await until_running(stub, lambda running: running == 1)
    async with asyncio.timeout(120):
        while (await status(stub)).weights != snapshot(201):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    wanted = greedy(prompt(9, 10), 202)
    call = stub.Sample(wanted, timeout=240)
    async with asyncio.timeout(120):
        while not (await status(stub)).waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await stub.EndSample(sampler_pb2.EndSampleRequest(request_id=wanted.request_id), timeout=60)
    with pytest.raises(grpc.aio.AioRpcError):
        await call
    check(judge(201), prompt(9, 11), await sample(stub, greedy(prompt(9, 11), 201)))
    assert len(ints((await running).sequences[0].tokens)) == 500
    assert ((await status(stub)).waiting, (await status(stub)).running) == (0, 0)
