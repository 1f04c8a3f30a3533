"""Every setting of a sample, through the SDK and over raw HTTP: it changes what it should, or is refused."""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.proto import response_conv
from transformers import GenerationConfig

from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, CONTEXT, VOCAB, Cluster
from tests.reference import Reference


@pytest.fixture(scope="module")
def base(cluster: Cluster) -> tinker.SamplingClient:
    return cluster.service_client().create_sampling_client(base_model=BASE_MODEL).result()


@pytest.fixture(scope="module")
def reference(cluster: Cluster) -> Reference:
    return Reference(cluster.model_dir)


def sequences(
    client: tinker.SamplingClient, prompt: list[int], n: int = 1, **params: object
) -> list[types.SampledSequence]:
    settings: dict = {"max_tokens": 20, "temperature": 1.0, "stop": []} | params
    future = client.sample(types.ModelInput.from_ints(prompt), n, types.SamplingParams(**settings))
    return list(future.result().sequences)


def ranks(reference: Reference, prompt: list[int], tokens: list[int], temperature: float) -> torch.Tensor:
    """For each token: how many are likelier, and their probability at this temperature: float [T, 2]."""
    with torch.no_grad():
        rows = reference.distribution(prompt + tokens)[len(prompt) - 1 : -1]
    probabilities = (rows / temperature).softmax(-1)
    own = probabilities.gather(1, torch.tensor(tokens)[:, None])
    likelier = probabilities > own
    return torch.stack([likelier.sum(1).float(), (probabilities * likelier).sum(1)], dim=1)


def test_top_k_keeps_the_k_most_likely_tokens(base: tinker.SamplingClient, reference: Reference) -> None:
    prompt = batches.tokens(1, 8)
    found = sequences(base, prompt, 8, top_k=5, temperature=2.0)
    seen = torch.cat([ranks(reference, prompt, s.tokens, 2.0) for s in found])[:, 0]
    assert seen.max() == 4 and len(seen.unique()) == 5
    for all_of_them in (VOCAB + 10_000, 0, -1):
        everything = sequences(base, prompt, 8, top_k=all_of_them, temperature=2.0)
        assert torch.cat([ranks(reference, prompt, s.tokens, 2.0) for s in everything])[:, 0].max() > 100
    assert sequences(base, prompt, top_k=1)[0].tokens == reference.greedy(prompt, 20)


def test_top_p_keeps_the_smallest_set_that_reaches_p(
    base: tinker.SamplingClient, reference: Reference
) -> None:
    prompt = batches.tokens(2, 8)
    for temperature in (0.7, 2.0):
        found = sequences(base, prompt, 16, top_p=0.3, temperature=temperature, seed=1)
        before = torch.cat([ranks(reference, prompt, s.tokens, temperature) for s in found])[:, 1]
        # What is likelier than a token that was kept has not reached p; and the set is used to its end.
        assert before.max() < 0.3 + 1e-5
        assert before.max() > 0.25
    assert sequences(base, prompt, top_p=1e-9)[0].tokens == reference.greedy(prompt, 20)


def test_samples_follow_softmax_at_the_temperature(base: tinker.SamplingClient, reference: Reference) -> None:
    prompt = batches.tokens(3, 8)
    with torch.no_grad():
        row = reference.distribution(prompt)[-1]
    for temperature in (0.01, 0.3, 1.5):
        found = sequences(base, prompt, 512, max_tokens=1, temperature=temperature, seed=9)
        drawn = torch.tensor([s.tokens[0] for s in found])
        probabilities = (row.double() / temperature).softmax(-1)
        mean = (probabilities * row).sum()
        error = (probabilities * (row - mean).square()).sum().div(512).sqrt()
        assert abs(row[drawn].double().mean() - mean) < 5 * error + 1e-6, temperature
    greedy = sequences(base, prompt, 4, temperature=0.0, top_p=0.1, top_k=3)
    assert [s.tokens for s in greedy] == [reference.greedy(prompt, 20)] * 4


def test_a_seed_decides_the_tokens_whatever_else_runs(base: tinker.SamplingClient) -> None:
    prompt = batches.tokens(4, 12)
    alone = sequences(base, prompt, 4, seed=2**64 - 3, max_tokens=30)
    load = [
        base.sample(
            types.ModelInput.from_ints(batches.tokens(100 + index, 5 + 9 * index)),
            4,
            types.SamplingParams(max_tokens=40, stop=[], top_k=3 + index, seed=index if index % 2 else None),
            include_prompt_logprobs=index % 3 == 0,
        )
        for index in range(12)
    ]
    beside = [sequences(base, prompt, 4, seed=2**64 - 3, max_tokens=30) for _ in range(3)]
    for future in load:
        future.result()
    expected = [s.tokens for s in alone]
    assert len({tuple(tokens) for tokens in expected}) == 4
    for found in beside:
        assert [s.tokens for s in found] == expected
    single = [
        sequences(base, prompt, seed=seed % 2**64, max_tokens=30)[0] for seed in range(2**64 - 3, 2**64 + 1)
    ]
    assert [s.tokens for s in single] == expected
    assert sequences(base, prompt, seed=2**32 - 3, max_tokens=30)[0].tokens not in expected


def test_a_seed_decides_the_tokens_also_when_the_prompt_is_prefilled_in_steps(
    base: tinker.SamplingClient,
) -> None:
    """Sixteen long prompts at once are more than one engine step can prefill."""
    prompts = [batches.tokens(200 + index, CONTEXT - 12 - index) for index in range(16)]
    params = [types.SamplingParams(max_tokens=8, seed=index, stop=[]) for index in range(16)]
    together = [
        base.sample(types.ModelInput.from_ints(prompt), 1, settings)
        for prompt, settings in zip(prompts, params, strict=True)
    ]
    found = [future.result().sequences[0].tokens for future in together]
    alone = [
        sequences(base, p, seed=s.seed, max_tokens=8)[0].tokens for p, s in zip(prompts, params, strict=True)
    ]
    assert found == alone


def test_generation_stops_at_end_of_sequence_unless_told_never(
    cluster: Cluster, base: tinker.SamplingClient
) -> None:
    ends = set(GenerationConfig.from_pretrained(cluster.model_dir).eos_token_id)
    assert len(ends) == 2
    draw: dict = {"n": 16, "seed": 5, "temperature": 2.0, "max_tokens": 300}
    prompt = batches.tokens(6, 4)
    never = [s.tokens for s in sequences(base, prompt, stop=[], **draw)]
    default = sequences(base, prompt, stop=None, **draw)
    assert any(s.stop_reason == "stop" for s in default)
    for whole, cut in zip(never, default, strict=True):
        assert len(whole) == 300
        first = next((i + 1 for i, token in enumerate(whole) if token in ends), 300)
        assert cut.tokens == whole[:first]
        assert cut.stop_reason == ("stop" if whole[first - 1] in ends else "length")


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"temperature": 0.005}, "temperature is 0.005"),
        ({"temperature": 2.5}, "temperature is 2.5"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -2}, "top_k is -2"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [VOCAB]}, "stop token"),
        ({"stop": ""}, "stop string"),
        ({"stop": ["x"] * 257}, "256"),
    ],
)
def test_a_setting_that_cannot_be_kept_is_refused_at_once(
    base: tinker.SamplingClient, params: dict, says: str
) -> None:
    with pytest.raises(tinker.BadRequestError, match=says):
        sequences(base, [1, 2, 3], **params)


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        ({"topk_prompt_logprobs": 65}, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": 65}, "topk_sample_logprobs"),
        ({"prompt_alt_tokens_k": 65}, "prompt_alt_tokens_k"),
        ({"prompt_logprobs_last_n": 3, "include_prompt_logprobs": True}, "follows nothing"),
        ({"target_prompt_logprobs": types.TensorData([[1]], "int64", [1, 1])}, "needs 2"),
        ({"target_prompt_logprobs": types.TensorData([1, VOCAB], "int64", [2, 1])}, str(VOCAB)),
        ({"target_prompt_logprobs": types.TensorData([-1, -1], "int64", [2, 1])}, "no token"),
        ({"target_prompt_logprobs": types.TensorData([1], "int64", [2, 9], [0, 1, 1], [9])}, "0 to 8"),
    ],
)
def test_a_score_that_does_not_exist_is_refused_at_once(
    base: tinker.SamplingClient, scores: dict, says: str
) -> None:
    prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=1)
    with pytest.raises(tinker.BadRequestError, match=says):
        base.sample(prompt, 1, params, **scores).result()


def test_more_samples_than_are_served_at_once_are_refused(base: tinker.SamplingClient) -> None:
    with pytest.raises(tinker.BadRequestError, match="num_samples must be 1 to 1024"):
        sequences(base, [1], 1025)


def test_stability_info_is_refused_with_the_losses_to_use_instead(cluster: Cluster) -> None:
    client = cluster.service_client().create_sampling_client(
        base_model=BASE_MODEL, record_stability_info=True
    )
    with pytest.raises(tinker.BadRequestError, match="importance_sampling"):
        sequences(client.result(), [1, 2])


def test_images_and_audio_are_refused(base: tinker.SamplingClient) -> None:
    image = types.ImageChunk(data=b"\x89PNG", format="png")
    prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1, 2]), image])
    with pytest.raises(tinker.BadRequestError, match="images and audio"):
        base.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()


class Http:
    """The bare HTTP interface."""

    def __init__(self, cluster: Cluster) -> None:
        self._url = f"{cluster.base_url}/api/v1/"
        self._headers = {"X-API-Key": cluster.api_key, "Content-Type": "application/json"}

    def post(self, path: str, body: dict) -> tuple[int, str, bytes]:
        """Status, content type and body of the answer."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, reply.headers["content-type"], reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers["content-type"], error.read()

    def json(self, path: str, body: dict) -> dict:
        status, _, data = self.post(path, body)
        assert status == 200, data
        return json.loads(data)


def test_a_sample_over_bare_http_names_its_sequences_and_answers_in_protobuf(
    cluster: Cluster, reference: Reference
) -> None:
    http = Http(cluster)
    session = http.json("create_session", {"tags": [], "sdk_version": "0"})["session_id"]
    opening = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    sampling = http.json("create_sampling_session", opening)["sampling_session_id"]
    prompt = batches.tokens(8, 6)
    body = {
        "sampling_session_id": sampling,
        "seq_id": 0,
        "num_samples": 3,
        "prompt": {"chunks": [{"tokens": prompt, "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 4, "temperature": 0.0, "stop": []},
    }
    audio = {"type": "dmel", "dmel": base64.b64encode(b"x").decode()}
    for wrong in ({"prompt": {"chunks": [audio]}}, {"num_samples": 0}, {"beam_width": 4}):
        status, _, reason = http.post("asample", {**body, **wrong})
        assert status == 400 and json.loads(reason)["detail"]
    # What was refused has used up nothing: its seq_id is still free.
    accepted = http.json("asample", body)
    assert len(set(accepted["sample_sequence_ids"])) == 3
    deadline = time.monotonic() + 60
    status = 408
    while status == 408 and time.monotonic() < deadline:
        status, kind, data = http.post("retrieve_future", {"request_id": accepted["request_id"]})
    assert (status, kind) == (200, "application/x-protobuf")
    response = response_conv.deserialize_sample_response(data)
    assert [list(s.tokens) for s in response.sequences] == [reference.greedy(prompt, 4)] * 3
    whole = prompt + list(response.sequences[0].tokens)
    expected = reference.sequence_logprobs(whole)[len(prompt) - 1 :]
    np.testing.assert_allclose(response.sequences[0].logprobs, expected, atol=1e-4)
