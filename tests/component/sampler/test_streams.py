"""One real sampler: tokens as they come, constrained text, and the tokenizer that gateways are given."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.component.sampler.process import (
    NEVER,
    Sampler,
    floats,
    ints,
    prompt,
    request,
    sample,
)
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc
from tinsmith.v1 import sampling_pb2, types_pb2

pytestmark = pytest.mark.heavy

# Of an object, a model that knows nothing may write white space for ever.
SCHEMA = {"enum": ["Paris", "Rome", 17]}
EOS = sampling_pb2.StopCondition(model_eos={})


async def streamed(
    stub: sampler_pb2_grpc.SamplerServiceStub, wanted: sampler_pb2.SampleRequest
) -> tuple[list[sampler_pb2.NewTokens], sampler_pb2.SampleResponse]:
    """What a stream told before its last answer, and that."""
    call = stub.StreamSample(sampler_pb2.StreamSampleRequest(sample=wanted), timeout=120)
    told = [answer async for answer in call]
    assert all(answer.WhichOneof("kind") == "new_tokens" for answer in told[:-1])
    return [answer.new_tokens for answer in told[:-1]], told[-1].last


async def test_a_stream_tells_every_token_of_every_sequence_and_then_the_whole_result(stub) -> None:
    wanted = request(prompt(1, 20), n=2, scores=True, max_tokens=400, stop=NEVER, seed=5)
    wanted.topk_sample_logprobs = 2
    told, last = await streamed(stub, wanted)
    assert len(told) > 5, "tokens came when the sample was done, not while it ran"
    tokens: dict[int, list[int]] = {0: [], 1: []}
    logprobs: dict[int, list[float]] = {0: [], 1: []}
    for part in (part for new in told for part in new.sequences):
        assert part.start == len(tokens[part.index])
        assert list(part.added.topk_logprobs.token_ids.shape) == [part.added.tokens.shape[0], 2]
        tokens[part.index] += ints(part.added.tokens)
        logprobs[part.index] += floats(part.added.logprobs).tolist()
    for index, sequence in enumerate(last.result.sequences):
        assert ints(sequence.tokens) == tokens[index]
        assert floats(sequence.logprobs).tolist() == logprobs[index]
    assert len(floats(last.result.prompt_logprobs)) == 20
    whole = request(prompt(1, 20), n=2, scores=True, max_tokens=400, stop=NEVER, seed=5)
    again = await sample(stub, whole)
    assert [ints(sequence.tokens) for sequence in again.sequences] == list(tokens.values())


async def test_a_stream_of_what_has_just_finished_is_its_result(stub) -> None:
    wanted = request(prompt(2, 9))
    result = await sample(stub, wanted)
    told, last = await streamed(stub, wanted)
    assert (told, last.result) == ([], result)


async def test_what_cannot_be_sampled_is_told_as_the_only_answer(stub) -> None:
    told, last = await streamed(stub, request([], stop=EOS))
    assert not told
    assert last.error.code == "prompt_length"


async def test_text_that_is_constrained_by_a_schema_is_json_that_it_admits(stub, sampler: Sampler) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sampler.model_dir)
    wanted = request(prompt(3, 12), n=4, max_tokens=64, stop=EOS, seed=1)
    wanted.constraint.json_schema = json.dumps(SCHEMA)
    result = await sample(stub, wanted)
    for sequence in result.sequences:
        assert sequence.stop_reason == sampling_pb2.STOP_REASON_STOP
        text = tokenizer.decode(ints(sequence.tokens), skip_special_tokens=True)
        assert json.loads(text) in SCHEMA["enum"]


async def test_log_probabilities_of_constrained_text_are_the_models_own(stub, judge) -> None:
    wanted = request(prompt(3, 12), max_tokens=64, stop=EOS, seed=1)
    wanted.constraint.json_schema = json.dumps(SCHEMA)
    wanted.topk_sample_logprobs = 4
    # One that is not constrained shares its steps.
    free = request(prompt(4, 12), max_tokens=30, stop=NEVER, seed=1)
    free.topk_sample_logprobs = 4
    results = await asyncio.gather(sample(stub, wanted), sample(stub, free))
    for asked, result in zip((wanted, free), results, strict=True):
        tokens, (sequence,) = ints(asked.prompt), result.sequences
        expected = judge(0).distribution(tokens + ints(sequence.tokens))[len(tokens) - 1 : -1].detach()
        sampled = torch.tensor(ints(sequence.tokens))
        own = expected.gather(1, sampled[:, None])[:, 0]
        torch.testing.assert_close(floats(sequence.logprobs), own, atol=1e-5, rtol=0)
        likely = floats(sequence.topk_logprobs.logprobs).reshape(-1, 4)
        torch.testing.assert_close(likely, expected.topk(4).values, atol=1e-5, rtol=0)


async def test_a_structural_tag_constrains_what_is_tagged(stub, sampler: Sampler) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sampler.model_dir)
    tag = {
        "type": "tag",
        "begin": "<tool_call>\n",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "\n</tool_call>",
    }
    wanted = request(prompt(4, 12), max_tokens=128, stop=EOS, seed=1)
    wanted.constraint.structural_tag = json.dumps({"type": "structural_tag", "format": tag})
    result = await sample(stub, wanted)
    text = tokenizer.decode(ints(result.sequences[0].tokens), skip_special_tokens=True)
    assert text.startswith("<tool_call>\n")
    assert text.endswith("\n</tool_call>")


@pytest.mark.parametrize("schema", ["{", '{"type": "thing"}', '{"pattern": "(", "type": "string"}'])
async def test_a_schema_that_is_none_is_the_requests_own_fault(stub, schema: str) -> None:
    wanted = request(prompt(5, 4), stop=EOS)
    wanted.constraint.json_schema = schema
    response = await stub.Sample(wanted, timeout=240)
    assert response.error.code == "invalid_request"
    await sample(stub, request(prompt(5, 4)))


async def test_what_would_not_be_enforced_is_refused_and_tools_are_called_after_it(stub) -> None:
    wanted = request(prompt(5, 4), stop=EOS)
    wanted.constraint.json_schema = '{"type": "integer", "multipleOf": 3}'
    response = await stub.Sample(wanted, timeout=240)
    assert (response.error.code, response.error.category) == (
        "constraint_unsupported",
        types_pb2.ERROR_CATEGORY_USER,
    )
    assert "multipleOf" in response.error.message
    wanted = request(prompt(5, 4), stop=EOS, max_tokens=64)
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "b"}, "end": "</a>"}
    wanted.constraint.structural_tag = json.dumps({"type": "structural_tag", "format": tag})
    await sample(stub, wanted)


async def test_a_schema_of_which_no_grammar_can_be_made_fails_alone(stub) -> None:
    wanted = request(prompt(5, 4), stop=EOS)
    wanted.constraint.json_schema = '{"type": "string", "pattern": "^(a|b|ab){1,300}$"}'
    response = await stub.Sample(wanted, timeout=240)
    assert response.error.code == "constraint_too_large"
    await sample(stub, request(prompt(5, 4)))


async def test_a_constraint_that_nothing_goes_on_with_says_so_and_fails_alone(stub) -> None:
    wanted = request(prompt(5, 4), stop=EOS, bad_words=["b"])
    wanted.constraint.regex = "ab"
    response = await stub.Sample(wanted, timeout=240)
    assert (response.error.code, response.error.category) == (
        "constraint_dead_end",
        types_pb2.ERROR_CATEGORY_USER,
    )
    assert "at token 2 " in response.error.message
    assert "bad_words" in response.error.message
    again = request(prompt(5, 4), stop=EOS, bad_words=["b"])
    again.constraint.regex, again.sampled_logprobs = "ab", True
    _, last = await streamed(stub, again)
    assert last.error.code == "constraint_dead_end"
    await sample(stub, request(prompt(5, 4)))


async def test_text_that_is_constrained_ends_where_it_matches_or_is_refused(stub, sampler: Sampler) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sampler.model_dir)
    (comma,) = tokenizer.encode(",")
    stops = [
        (NEVER, "never"),
        (sampling_pb2.StopCondition(tokens={"ids": [comma]}), "tokens"),
    ]
    for stop, name in stops:
        wanted = request(prompt(5, 4), stop=stop, max_tokens=24)
        wanted.constraint.regex = "a,b"
        response = await stub.Sample(wanted, timeout=240)
        assert response.error.code == "invalid_request", (name, response)
        assert name in response.error.message
    wanted = request(prompt(5, 4), stop=sampling_pb2.StopCondition(strings={"values": [","]}))
    wanted.constraint.regex = "a,b"
    (sequence,) = (await sample(stub, wanted)).sequences
    assert tokenizer.decode(ints(sequence.tokens)) == "a,"


async def test_the_tokenizer_that_is_told_is_the_models(stub, sampler: Sampler) -> None:
    answer = await stub.GetTokenizer(sampler_pb2.GetTokenizerRequest(), timeout=60)
    told = Tokenizer.from_str(answer.tokenizer_json)
    own = AutoTokenizer.from_pretrained(sampler.model_dir)
    text = "Grüße, <|im_start|>user\nhow are you?"
    assert told.encode(text).ids == own.encode(text)
    assert answer.chat_template == own.chat_template
    assert answer.special_tokens["eos_token"] == "<|im_end|>"


async def test_a_stream_that_nobody_reads_any_more_does_not_end_the_generation(stub) -> None:
    wanted = request(prompt(6, 8), max_tokens=200, stop=NEVER, seed=3)
    call = stub.StreamSample(sampler_pb2.StreamSampleRequest(sample=wanted), timeout=240)
    assert (await call.read()).WhichOneof("kind") == "new_tokens"
    call.cancel()
    found = await stub.FindSample(sampler_pb2.FindSampleRequest(request_id=wanted.request_id), timeout=60)
    assert found.known
    result = await sample(stub, wanted)
    assert len(ints(result.sequences[0].tokens)) == 200


async def test_new_streams_are_refused_with_a_code(stub) -> None:
    wanted = request(prompt(6, 8), version=77)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await streamed(stub, wanted)
    assert failed.value.code() is grpc.StatusCode.NOT_FOUND
