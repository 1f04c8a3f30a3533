"""Probes of the SamplingClient and of what a sample can be asked for."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import tinker
from tinker import types
from tinker.lib.retry_handler import RetryConfig

from services.launcher.cli import main as tinsmith
from tests.cluster.conftest import BASE_MODEL
from tests.cluster.contract.compatibility.walk import ClientOnly, Walk, probe

PROMPT = types.ModelInput.from_ints([1, 2, 3, 4])

PARAMS: dict[str, Any] = {
    "max_tokens": 3,
    "seed": 2**63 + 5,
    "stop": [[7], ["a", "bc"], "a"],
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.9,
}


def _field(name: str, values: list[Any]) -> Callable[[Walk], None]:
    def run(walk: Walk) -> None:
        for value in values:
            params = types.SamplingParams(**{"max_tokens": 3, name: value})
            answer = walk.sampler.sample(PROMPT, 1, params).result()
            assert 0 < len(answer.sequences[0].tokens) <= 3

    return run


for _name, _value in PARAMS.items():
    probe("SamplingParams", _name)(_field(_name, _value if isinstance(_value, list) else [_value]))


@probe("SamplingClient.create")
def create(walk: Walk) -> None:
    # The method takes the inside of another client; users have create_sampling_client.
    holder = walk.service.holder
    for given in (
        {"base_model": BASE_MODEL, "retry_config": RetryConfig()},
        {"model_path": walk.weights, "record_stability_info": False},
        {"sampling_session_id": walk.sampler.get_sampler_handle().split("/")[-1], "base_model": BASE_MODEL},
    ):
        client = walk.call(tinker.SamplingClient, "create", of="SamplingClient", holder=holder, **given)
        assert client.get_base_model() == BASE_MODEL


@probe("SamplingClient.sample")
def sample(walk: Walk) -> None:
    answer = walk.call(
        walk.sampler,
        "sample",
        prompt=PROMPT,
        num_samples=2,
        sampling_params=types.SamplingParams(max_tokens=3),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=2,
        target_prompt_logprobs=types.TensorData(data=[5, 6, 7], dtype="int64", shape=[3, 1]),
        prompt_alt_tokens_k=2,
        prompt_logprobs_last_n=None,
    )
    assert len(answer.sequences) == 2 and len(answer.prompt_logprobs) == 4
    assert len(answer.topk_prompt_logprobs) == 4
    last = walk.call(
        walk.sampler,
        "sample",
        prompt=PROMPT,
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=1,
    )
    assert last.prompt_logprobs[:3] == [None] * 3 and math.isfinite(last.prompt_logprobs[3])


@probe("SamplingClient.compute_logprobs")
def compute_logprobs(walk: Walk) -> None:
    scored = walk.call(walk.sampler, "compute_logprobs", prompt=PROMPT)
    last = walk.call(walk.sampler, "compute_logprobs", prompt=PROMPT, prompt_logprobs_last_n=1)
    assert abs(scored[3] - last[3]) < 1e-4 and last[2] is None


@probe("SamplingClient.get_tokenizer")
def get_tokenizer(walk: Walk) -> str:
    with mock.patch.dict(os.environ, walk.environment), contextlib.chdir(walk.directory):
        assert tinsmith(["tokenizer", BASE_MODEL]) == 0
        found = walk.call(walk.sampler, "get_tokenizer")
    text = "The quick brown fox 123"
    assert found.encode(text) == walk.training.get_tokenizer().encode(text)
    return (
        "once `tinsmith tokenizer NAME` has put it where the SDK looks, unless the hub has it under that name"
    )


@probe("SamplingClient.get_base_model")
def get_base_model(walk: Walk) -> None:
    assert walk.call(walk.sampler, "get_base_model") == BASE_MODEL


@probe("SamplingClient.get_telemetry")
def get_telemetry(walk: Walk) -> None:
    walk.call(walk.sampler, "get_telemetry")


@probe("SamplingClient.get_sampler_handle")
def get_sampler_handle(walk: Walk) -> None:
    assert walk.call(walk.sampler, "get_sampler_handle")


@probe("SamplingClient.from_sampler_handle")
def from_sampler_handle(walk: Walk) -> None:
    handle = walk.sampler.get_sampler_handle()
    with mock.patch.dict(os.environ, walk.environment):
        client = walk.call(
            tinker.SamplingClient,
            "from_sampler_handle",
            of="SamplingClient",
            handle=handle,
            api_key=walk.cluster.api_key,
        )
    assert client.compute_logprobs(PROMPT).result()
    assert pickle.loads(pickle.dumps(walk.sampler)).compute_logprobs(PROMPT).result()


@probe("SamplingClient.on_queue_state_change")
def on_queue_state_change(walk: Walk) -> None:
    from tinker.lib.api_future_impl import QueueState

    walk.call(
        walk.sampler,
        "on_queue_state_change",
        queue_state=QueueState.ACTIVE,
        queue_state_reason="it is idle",
    )
    raise ClientOnly("called by the SDK with the queue state and its reason, which the cluster sends")
