"""Text from a real cluster, through the `openai` package, against what the tinker SDK samples."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest
import tinker
from tokenizers import Tokenizer

from tests.cluster.conftest import BASE_MODEL, Cluster

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.base_url}/oai/api/v1", api_key=cluster.api_key)


@pytest.fixture
def tokenizer(cluster: Cluster) -> Tokenizer:
    return Tokenizer.from_file(str(cluster.model_dir / "tokenizer.json"))


def sampled(
    sampler: tinker.SamplingClient, tokenizer: Tokenizer, text: str, **params: object
) -> tinker.SampledSequence:
    prompt = tinker.ModelInput.from_ints(tokenizer.encode(text).ids)
    settings = tinker.SamplingParams(**params)  # type: ignore[arg-type]
    return sampler.sample(prompt, num_samples=1, sampling_params=settings).result().sequences[0]


def test_a_completion_is_what_the_sdk_samples(
    cluster: Cluster, client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    sampler = cluster.service_client().create_sampling_client(base_model=BASE_MODEL).result()
    expected = sampled(sampler, tokenizer, "The quick", max_tokens=12, temperature=0.7, seed=5)
    answer = client.completions.create(
        model=BASE_MODEL, prompt="The quick", max_tokens=12, temperature=0.7, seed=5, logprobs=2
    )
    (choice,) = answer.choices
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected.tokens)
    assert choice.text == tokenizer.decode(expected.tokens)
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert expected.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx(
        expected.logprobs[: len(choice.logprobs.token_logprobs)], abs=1e-5
    )


def test_a_stream_has_the_text_of_the_whole_answer(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    # Long ones, so that many parts come of them also to a reader whom the engine leaves little of its cores.
    ends = {str(tokenizer.token_to_id(name)): -100 for name in ("<|im_end|>", "<|endoftext|>")}
    asked = {"model": BASE_MODEL, "messages": HELLO, "max_tokens": 400, "seed": 9, "n": 2, "logit_bias": ends}
    whole = client.chat.completions.create(**asked)
    texts = ["", ""]
    chunks = 0
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        chunks += 1
    assert texts == [choice.message.content for choice in whole.choices]
    assert chunks > 10, "the answer came when it was done"


def test_a_checkpoint_answers_with_its_own_weights_and_keeps_them(
    cluster: Cluster, client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    training = cluster.service_client().create_lora_training_client(base_model=BASE_MODEL, rank=8).result()
    tokens = tokenizer.encode("hello" * 8).ids
    data = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]),
            "weights": tinker.TensorData(
                data=[1.0] * (len(tokens) - 1), dtype="float32", shape=[len(tokens) - 1]
            ),
        },
    )
    for _ in range(4):
        training.forward_backward([data], "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=0.02)).result()
    path = training.save_weights_for_sampler("inference").result().path
    sampler = cluster.service_client().create_sampling_client(model_path=path).result()
    expected = sampled(sampler, tokenizer, "hello", max_tokens=10, temperature=0.0)
    for name in (path, f"{BASE_MODEL};{path}"):
        answer = client.completions.create(
            model=name, prompt="hello", max_tokens=10, temperature=0.0, logprobs=0
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None
        assert expected.logprobs is not None
        assert logprobs.token_logprobs == pytest.approx(
            expected.logprobs[: len(logprobs.token_logprobs)], abs=1e-4
        )
    base = client.completions.create(model=BASE_MODEL, prompt="hello", max_tokens=10, temperature=0.0)
    assert base.system_fingerprint != answer.system_fingerprint
    with pytest.raises(openai.BadRequestError, match="checkpoint path"):
        client.completions.create(model=f"{BASE_MODEL};nothing", prompt="hello")


def test_an_answer_matches_its_schema_and_a_required_call_is_one(client: openai.OpenAI) -> None:
    # Of an object, a model that knows nothing may write white space for ever.
    schema = {"enum": ["Paris", "Rome", 17]}
    for seed in range(3):
        answer = client.chat.completions.create(
            model=BASE_MODEL,
            messages=HELLO,
            seed=seed,
            response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
        )
        assert json.loads(answer.choices[0].message.content or "") in schema["enum"]
    function = {"name": "pick", "parameters": {"enum": [{}]}}
    answer = client.chat.completions.create(
        model=BASE_MODEL,
        messages=HELLO,
        seed=1,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("pick", {})
    assert answer.choices[0].finish_reason == "tool_calls"


def test_anthropics_messages_are_answered_whole_and_in_streams(cluster: Cluster) -> None:
    client = anthropic.Anthropic(base_url=f"{cluster.base_url}/anthropic/api", api_key=cluster.api_key)
    counted = client.messages.count_tokens(model=BASE_MODEL, messages=HELLO)
    whole = client.messages.create(
        model=BASE_MODEL, messages=HELLO, max_tokens=20, extra_body={"temperature": 0.0}
    )
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    with client.messages.stream(
        model=BASE_MODEL, messages=HELLO, max_tokens=20, extra_body={"temperature": 0.0}
    ) as events:
        text = "".join(events.text_stream)
    assert text == "".join(block.text for block in whole.content if block.type == "text")
    assert whole.usage.output_tokens <= 20


def test_a_schema_that_is_none_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model=BASE_MODEL,
            messages=HELLO,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "city", "schema": {"type": "thing"}},
            },
        )
