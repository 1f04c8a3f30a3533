"""One real sampler (vLLM on CPU, two adapter slots) against transformers + PEFT in float32."""

from __future__ import annotations

import asyncio
import math

import grpc
import pytest
import torch
from transformers import AutoTokenizer

from services.common.process.tasks import cancel_all
from services.common.state import registry
from services.common.state.redis_client import connect
from tests.component.sampler.process import (
    BASE_MODEL,
    CONTEXT,
    NEVER,
    VOCAB,
    Sampler,
    floats,
    ints,
    make_adapter,
    prompt,
    request,
    sample,
    status,
    until_running,
    write_snapshot,
)
from tests.reference import Reference, check_logprobs
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import sampling_pb2, types_pb2

pytestmark = pytest.mark.heavy

STOP, LENGTH = sampling_pb2.STOP_REASON_STOP, sampling_pb2.STOP_REASON_LENGTH


async def test_sampled_logprobs_are_the_models_at_any_temperature(stub, judge) -> None:
    for version in (0, 1):
        result = await sample(
            stub, request(prompt(1, 20), version, n=3, temperature=0.7, top_k=50, top_p=0.9, max_tokens=24)
        )
        for sequence in result.sequences:
            tokens = prompt(1, 20) + ints(sequence.tokens)
            expected = judge(version).sequence_logprobs(tokens)[19:]
            check_logprobs(floats(sequence.logprobs), expected)


async def test_greedy_decoding_takes_the_most_likely_token_and_repeats_itself(stub, judge) -> None:
    wanted = request(prompt(2, 9), 3, n=2, temperature=0.0, max_tokens=12, stop=NEVER)
    again = request(prompt(2, 9), 3, n=2, temperature=0.0, max_tokens=12, stop=NEVER)
    runs = [await sample(stub, each) for each in (wanted, again)]
    found = {tuple(ints(sequence.tokens)) for run in runs for sequence in run.sequences}
    assert found == {tuple(judge(3).greedy(prompt(2, 9), 12))}


async def test_prompt_scores_of_a_mixed_batch_use_each_requests_own_adapter(stub, judge) -> None:
    cases = [(version, prompt(10 + i, 7 + 30 * i)) for i, version in enumerate((0, 1, 2, 0, 2, 1, 0))]
    for _ in range(2):
        # The second round meets slots that are full, so "no adapter" must not mean "the last slot".
        results = await asyncio.gather(
            *(sample(stub, request(p, version, scores=True, topk=4)) for version, p in cases)
        )
        for (version, tokens), result in zip(cases, results, strict=True):
            check_scores(judge(version), tokens, result)


def check_scores(judge: Reference, tokens: list[int], result: sampling_pb2.SampleResult) -> None:
    scores = floats(result.prompt_logprobs)
    assert math.isnan(scores[0])
    distribution = judge.distribution(tokens).detach()
    check_logprobs(scores[1:], judge.sequence_logprobs(tokens))
    ids = torch.tensor(ints(result.topk_prompt_logprobs.token_ids)).view(len(tokens), 4)
    logprobs = floats(result.topk_prompt_logprobs.logprobs).view(len(tokens), 4)
    assert ids[0].tolist() == [0] * 4 and logprobs[0].tolist() == [-99999.0] * 4
    expected = distribution[:-1].topk(4)
    check_logprobs(logprobs[1:], expected.values)
    check_logprobs(distribution[:-1].gather(1, ids[1:].long()), logprobs[1:])
    sampled = ints(result.sequences[0].tokens)
    check_logprobs(
        floats(result.sequences[0].logprobs), judge.sequence_logprobs(tokens + sampled)[len(tokens) - 1 :]
    )


async def test_more_adapters_than_slots_are_served_side_by_side(stub, judge) -> None:
    versions = [1, 2, 3, 0] * 4
    results = await asyncio.gather(
        *(sample(stub, request(prompt(30 + i, 12), v, max_tokens=20)) for i, v in enumerate(versions))
    )
    for i, (version, result) in enumerate(zip(versions, results, strict=True)):
        tokens = prompt(30 + i, 12) + ints(result.sequences[0].tokens)
        expected = judge(version).sequence_logprobs(tokens)[11:]
        check_logprobs(floats(result.sequences[0].logprobs), expected)


async def test_a_third_busy_tenant_gets_its_turn_although_two_never_leave_their_slots(stub) -> None:
    served = dict.fromkeys((1, 2, 3), 0)

    async def keep_asking(version: int, lane: int) -> None:
        while True:
            seed = 100 * version + lane
            # Lanes end at different times, so the adapter always has a request in the engine.
            await sample(
                stub, request(prompt(seed, 8), version, max_tokens=40 + 25 * lane, stop=NEVER, seed=seed)
            )
            served[version] += 1

    tasks = [asyncio.create_task(keep_asking(version, lane)) for version in (1, 2) for lane in range(4)]
    try:
        async with asyncio.timeout(300):
            while not (served[1] and served[2]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            tasks += [asyncio.create_task(keep_asking(3, lane)) for lane in range(4)]
            while served[3] < 8:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            before = dict(served)
            while not all(served[version] > before[version] for version in (1, 2, 3)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await cancel_all(tasks)
    await until_running(stub, lambda running: running == 0)


async def test_cached_prefixes_are_reused_within_a_version_and_never_across_versions(stub, judge) -> None:
    tokens = prompt(50, 300)
    for version in (0, 1, 3):
        cold, warm = [await sample(stub, request(tokens, version, seed=5)) for _ in range(2)]
        assert (cold.prompt_cache_hit_tokens, warm.prompt_cache_hit_tokens) == (0, 256), version
        for result in (cold, warm):
            sequence = result.sequences[0]
            expected = judge(version).sequence_logprobs(tokens + ints(sequence.tokens))[299:]
            check_logprobs(floats(sequence.logprobs), expected)


async def test_cached_prefixes_of_the_base_model_are_shared_within_a_namespace_only(stub) -> None:
    tokens = prompt(51, 300)
    hits = []
    for namespace in ("owner/ann", "owner/ann", "owner/bob", ""):
        wanted = request(tokens)
        wanted.cache_namespace = namespace
        hits.append((await sample(stub, wanted)).prompt_cache_hit_tokens)
    assert hits == [0, 256, 0, 0]


async def test_a_seed_decides_the_tokens_and_sequence_i_uses_seed_plus_i(stub) -> None:
    async def tokens(seed: int, n: int = 1) -> list[list[int]]:
        result = await sample(stub, request(prompt(3, 6), n=n, seed=seed, max_tokens=16, stop=NEVER))
        return [ints(sequence.tokens) for sequence in result.sequences]

    together = await tokens(2**64 - 2, n=4)
    assert len({tuple(sequence) for sequence in together}) == 4
    assert together == await tokens(2**64 - 2, n=4)
    alone = [(await tokens(seed))[0] for seed in (2**64 - 2, 2**64 - 1, 0, 1)]
    assert together == alone
    assert await tokens(1) != await tokens(2**32 + 1)


async def test_without_a_seed_samples_differ(stub) -> None:
    result = await sample(stub, request(prompt(3, 6), n=4, max_tokens=16, stop=NEVER))
    assert len({tuple(ints(sequence.tokens)) for sequence in result.sequences}) == 4


async def test_end_of_sequence_stops_and_is_returned_unless_told_never(stub, sampler: Sampler) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sampler.model_dir)
    ends = set(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    wanted = {"n": 32, "seed": 9, "temperature": 2.0, "max_tokens": 100}
    stopped = await sample(stub, request(prompt(4, 5), **wanted))
    endless = await sample(stub, request(prompt(4, 5), **wanted, stop=NEVER))
    reasons = {sequence.stop_reason for sequence in stopped.sequences}
    assert reasons == {STOP, LENGTH}
    for short, full in zip(stopped.sequences, endless.sequences, strict=True):
        tokens, whole = ints(short.tokens), ints(full.tokens)
        assert (full.stop_reason, len(whole)) == (LENGTH, 100)
        assert whole[: len(tokens)] == tokens
        assert not ends & set(tokens[:-1])
        assert (tokens[-1] in ends) == (short.stop_reason == STOP)
        assert short.stop_reason == STOP or len(tokens) == 100


async def test_stop_tokens_and_strings_end_a_sequence_and_are_in_it_once(
    stub, judge, sampler: Sampler
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sampler.model_dir)
    greedy = {"temperature": 0.0, "max_tokens": 30}
    full = judge(0).greedy(prompt(5, 8), 30)
    index = next(i for i in range(3, 30) if full[i] not in full[:i])
    by_token = sampling_pb2.StopCondition(tokens={"ids": [full[index]]})
    sequence = (await sample(stub, request(prompt(5, 8), stop=by_token, **greedy))).sequences[0]
    assert (ints(sequence.tokens), sequence.stop_reason) == (full[: index + 1], STOP)

    # A stop string may be a special token, and may begin and end inside other tokens.
    special = tokenizer.convert_tokens_to_ids("<|im_start|>")
    draw = {"n": 32, "seed": 3, "temperature": 2.0, "max_tokens": 100}
    by_string = sampling_pb2.StopCondition(strings={"values": ["<|im_start|>", "qq"]})
    reasons = []
    for sequence in (await sample(stub, request(prompt(5, 8), stop=by_string, **draw))).sequences:
        tokens = ints(sequence.tokens)
        text = tokenizer.decode(tokens[:-1], skip_special_tokens=False)
        assert special not in tokens[:-1] and "qq" not in text
        if tokens[-1] == special:
            assert sequence.stop_reason == STOP
            reasons.append("special")
        assert len(floats(sequence.logprobs)) == len(tokens)
    assert "special" in reasons


async def test_a_stop_string_of_a_prompt_that_ends_within_a_character_ends_nothing(
    stub, sampler: Sampler
) -> None:
    tokens = AutoTokenizer.from_pretrained(sampler.model_dir).encode("User: wait é")
    by_string = sampling_pb2.StopCondition(strings={"values": ["User: wait"]})
    for ends in (tokens, tokens[:-1]):
        sequence = (await sample(stub, request(ends, stop=by_string, seed=5))).sequences[0]
        assert (len(ints(sequence.tokens)), sequence.stop_reason) == (8, LENGTH)


async def test_without_max_tokens_generation_runs_to_the_context_length(stub) -> None:
    for limit in ({}, {"max_tokens": 10**6}):
        wanted = request(prompt(6, CONTEXT - 12), stop=NEVER, **limit)
        if not limit:
            wanted.params.ClearField("max_tokens")
        sequence = (await sample(stub, wanted)).sequences[0]
        assert (len(ints(sequence.tokens)), sequence.stop_reason) == (12, LENGTH)


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (request([VOCAB]), "token_out_of_range"),
        (request([1] * CONTEXT), "prompt_length"),
        (request([]), "prompt_length"),
        (request([1], temperature=-1.0), "invalid_request"),
        (request([1], n=0), "invalid_request"),
    ],
)
async def test_a_wrong_request_is_the_users_error(stub, wanted, code: str) -> None:
    response = await stub.Sample(wanted, timeout=150)
    assert response.error.category == types_pb2.ERROR_CATEGORY_USER
    assert response.error.code == code


async def test_a_snapshot_that_is_nowhere_is_not_found(stub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Sample(request([1], 999), timeout=150)
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    assert dict(error.value.trailing_metadata())["tinsmith-code"] == "snapshot_not_found"


async def test_a_snapshot_that_does_not_fit_fails_its_request_and_not_the_engine(
    stub, sampler: Sampler
) -> None:
    tensors = make_adapter(8, 4, attn=False, unembed=False)
    name = "model.layers.0.mlp.down_proj.lora_A"
    write_snapshot(sampler.stored(80), tensors | {name: torch.ones(4, 999)}, 4)
    write_snapshot(sampler.stored(81), {"model.x.lora_A": torch.ones(4, 8)}, 4)
    write_snapshot(sampler.stored(82), make_adapter(1, 136, mlp=False), 136)
    for version, hint in ((80, "does not fit"), (81, "model.x"), (82, "rank is 136")):
        response = await stub.Sample(request([1], version), timeout=60)
        assert hint in response.error.message
    assert len(ints((await sample(stub, request([1], stop=NEVER))).sequences[0].tokens)) == 8


async def test_weights_that_give_no_numbers_fail_their_request_and_not_the_engine(
    stub, sampler: Sampler
) -> None:
    tensors = make_adapter(9, 4, attn=False, mlp=False)
    tensors["lm_head.lora_B"].fill_(math.nan)
    write_snapshot(sampler.stored(90), tensors, 4)
    for settings in ({"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 3, "seed": 1, "scores": True}):
        response = await stub.Sample(request(prompt(8, 9), 90, stop=NEVER, **settings), timeout=150)
        assert response.error.code == "diverged_weights"
    assert len(ints((await sample(stub, request([1], stop=NEVER))).sequences[0].tokens)) == 8


async def test_a_repeated_request_joins_what_runs_and_generates_nothing_once_it_is_done(stub) -> None:
    before = (await status(stub)).generated_tokens
    wanted = request(prompt(7, 5), n=3, max_tokens=500, stop=NEVER)
    call = stub.Sample(wanted, timeout=120)
    await until_running(stub, lambda running: running == 1)
    repeat = asyncio.create_task(sample(stub, wanted))
    await asyncio.sleep(0.1)
    # The first caller, a gateway, dies. Nobody else may, either, for a while.
    call.cancel()
    await asyncio.sleep(0.1)
    assert (await status(stub)).running == 1
    joined = await repeat
    assert (await status(stub)).generated_tokens - before == 1500
    for again in [await sample(stub, wanted) for _ in range(3)]:
        assert again == joined
    assert (await status(stub)).generated_tokens - before == 1500


async def test_a_request_whose_only_gateway_died_goes_on_for_the_one_that_takes_it_over(stub) -> None:
    before = (await status(stub)).generated_tokens
    wanted = request(prompt(7, 6), max_tokens=500, stop=NEVER)
    call = stub.Sample(wanted, timeout=120)
    await until_running(stub, lambda running: running == 1)
    call.cancel()
    await asyncio.sleep(0.2)
    found = await stub.FindSample(sampler_pb2.FindSampleRequest(request_id=wanted.request_id), timeout=60)
    assert found.known
    assert len(ints((await sample(stub, wanted)).sequences[0].tokens)) == 500
    assert (await status(stub)).generated_tokens - before == 500


async def test_who_does_not_wait_to_the_end_hears_how_far_a_sample_is(stub) -> None:
    wanted = request(prompt(7, 7), n=2, max_tokens=400, stop=NEVER)
    wanted.wait_seconds = 0.1
    heard = []
    while (reply := await stub.Sample(wanted, timeout=150)).WhichOneof("kind") == "progress":
        heard.append(reply.progress.tokens)
    assert heard == sorted(heard) and 0 < heard[-1] <= 800
    assert [len(ints(sequence.tokens)) for sequence in reply.result.sequences] == [400, 400]


async def test_a_request_that_is_given_up_frees_its_place_and_a_full_queue_refuses(stub) -> None:
    long = request(prompt(7, 4), n=64, max_tokens=500, stop=NEVER)
    call = stub.Sample(long, timeout=120)
    await until_running(stub, lambda running: running == 1)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Sample(request([1], n=17), timeout=150)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await stub.EndSample(sampler_pb2.EndSampleRequest(request_id=long.request_id), timeout=60)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code() is grpc.StatusCode.CANCELLED
    await until_running(stub, lambda running: running == 0)
    assert len((await sample(stub, request([1], n=64, max_tokens=1))).sequences) == 64


async def test_it_announces_itself_with_what_gateways_need(sampler: Sampler) -> None:
    client = connect(sampler.redis_url)
    (record,) = await registry.live(client, "sampler")
    await client.aclose()
    assert (record.address, record.base_model, record.state) == (sampler.address, BASE_MODEL, "ready")
    assert (record.vocab_size, record.context_length) == (VOCAB, CONTEXT)
    assert (record.arch, record.device, record.dtype) == ("Qwen3ForCausalLM", "cpu", "float32")
    assert (record.world_size, record.max_lora_rank) == (1, 128)
    assert (record.max_sequences, record.queued_sequences) == (64, 16)
    assert record.kv_tokens > 2 * CONTEXT
