"""Probes of the TrainingClient, of its losses and settings, and of futures."""

from __future__ import annotations

from collections.abc import Callable

import tinker
import torch
from tinker import types
from tinker.lib.retry_handler import RetryConfig

from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL
from tests.cluster.contract.compatibility.service import _CONSOLE
from tests.cluster.contract.compatibility.walk import ClientOnly, Walk, probe

LOSSES: dict[str, dict[str, float | str]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_high_threshold": 2.0},
    "dro": {"beta": 0.05},
    "gspo": {},
    "stable_reinforce": {},
    "custom": {"loss_id": "none"},
}
_AGE = "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p"


def _data(seed: int = 1) -> list[types.Datum]:
    return [batches.cross_entropy(seed, 6)]


def _loss(name: str) -> Callable[[Walk], None]:
    def run(walk: Walk) -> None:
        datum = _data()[0] if name == "cross_entropy" else batches.policy(1, 6, [-5.0] * 6, [1.0] * 6)
        answer = walk.training.forward_backward([datum], name, LOSSES[name] or None).result()  # type: ignore[arg-type]
        assert answer.metrics["loss:sum"] != 0

    return run


for _name in LOSSES:
    probe("loss_fn", _name)(_loss(_name))


def _chunk(make: Callable[[], types.ModelInputChunk]) -> Callable[[Walk], None]:
    def run(walk: Walk) -> None:
        prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1, 2]), make()])
        walk.sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()

    return run


probe("chunk", "EncodedTextChunk")(_chunk(lambda: types.EncodedTextChunk(tokens=[3])))
probe("chunk", "ImageChunk")(_chunk(lambda: types.ImageChunk(data=b"\x89PNG", format="png")))
probe("chunk", "ImageAssetPointerChunk")(
    _chunk(lambda: types.ImageAssetPointerChunk(location="tinker://image", format="png"))
)
probe("chunk", "DmelChunk")(_chunk(lambda: types.DmelChunk(dmel=b"\xfe\x00\x01\x01")))


def _adam(field: str, value: float) -> Callable[[Walk], None]:
    def run(walk: Walk) -> None:
        walk.training.forward_backward(_data(), "cross_entropy")
        walk.training.optim_step(types.AdamParams(**{field: value})).result()

    return run


ADAM = {
    "learning_rate": 1e-3,
    "beta1": 0.8,
    "beta2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "grad_clip_norm": 1.0,
}
for _name, _value in ADAM.items():
    probe("AdamParams", _name)(_adam(_name, _value))


@probe("TrainingClient.get_console_url")
def get_console_url(walk: Walk) -> None:
    assert walk.call(walk.training, "get_console_url").startswith("https://")
    raise ClientOnly(_CONSOLE)


@probe("TrainingClient.get_telemetry")
def get_telemetry(walk: Walk) -> None:
    walk.call(walk.training, "get_telemetry")


@probe("TrainingClient.forward")
def forward(walk: Walk) -> None:
    answer = walk.call(
        walk.training,
        "forward",
        data=[batches.policy(1, 6, [-5.0] * 6, [1.0] * 6)],
        loss_fn="ppo",
        loss_fn_config={"clip_high_threshold": 1.5},
    )
    assert answer.loss_fn_outputs[0]["logprobs"].to_torch().shape == (6,)


@probe("TrainingClient.forward_backward")
def forward_backward(walk: Walk) -> None:
    answer = walk.call(
        walk.training,
        "forward_backward",
        data=[batches.policy(1, 6, [-5.0] * 6, [1.0] * 6)],
        loss_fn="ppo",
        loss_fn_config={"clip_high_threshold": 1.5},
    )
    assert "loss:sum" in answer.metrics


@probe("TrainingClient.forward_backward_custom")
def forward_backward_custom(walk: Walk) -> None:
    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        value = -sum(one.sum() for one in logprobs)
        assert isinstance(value, torch.Tensor)
        return value, {"seen": float(len(data))}

    answer = walk.call(
        walk.training, "forward_backward_custom", data=_data(), loss_fn=loss, loss_type_input="logprobs"
    )
    assert answer.metrics["seen"] == 1.0


@probe("TrainingClient.optim_step")
def optim_step(walk: Walk) -> None:
    walk.training.forward_backward(_data(), "cross_entropy")
    walk.call(walk.training, "optim_step", optim_params=types.AdamParams())
    walk.training.forward_backward(_data(), "cross_entropy")
    walk.call(walk.training, "optim_step", adam_params=types.AdamParams())


@probe("TrainingClient.save_state")
def save_state(walk: Walk) -> None:
    name = walk.name()
    for overwrite in (False, True):
        saved = walk.call(
            walk.training,
            "save_state",
            name=name,
            ttl_seconds=7200,
            overwrite=overwrite,
            user_metadata={"step": "1"},
        )
    assert saved.path == f"tinker://{walk.training.model_id}/weights/{name}"


@probe("TrainingClient.load_state")
def load_state(walk: Walk) -> None:
    token = walk.cluster.api_key
    assert walk.call(walk.training, "load_state", path=walk.state, weights_access_token=token).path


@probe("TrainingClient.load_state_with_optimizer")
def load_state_with_optimizer(walk: Walk) -> None:
    token = walk.cluster.api_key
    answer = walk.call(
        walk.training, "load_state_with_optimizer", path=walk.state, weights_access_token=token
    )
    assert answer.path


@probe("TrainingClient.save_weights_for_sampler")
def save_weights_for_sampler(walk: Walk) -> None:
    saved = walk.call(
        walk.training,
        "save_weights_for_sampler",
        name=walk.name(),
        ttl_seconds=7200,
        user_metadata={"a": "b"},
    )
    assert "/sampler_weights/" in saved.path


@probe("TrainingClient.save_weights_external")
def save_weights_external(walk: Walk) -> None:
    saved = walk.call(
        walk.training,
        "save_weights_external",
        name=walk.name(),
        ttl_seconds=7200,
        age_encryption_recipients=[_AGE],
    )
    urls = walk.rest.get_external_weights_urls(saved.path).result().urls
    assert sorted(urls) == ["adapter_config.json.age", "adapter_model.safetensors.age"]


@probe("TrainingClient.get_info")
def get_info(walk: Walk) -> None:
    info = walk.call(walk.training, "get_info")
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == (BASE_MODEL, True, 8)


@probe("TrainingClient.get_tokenizer")
def get_tokenizer(walk: Walk) -> None:
    assert walk.call(walk.training, "get_tokenizer").encode("ab")


@probe("TrainingClient.create_sampling_client")
def create_sampling_client(walk: Walk) -> None:
    sampler = walk.call(
        walk.training, "create_sampling_client", model_path=walk.weights, retry_config=RetryConfig()
    )
    assert sampler.get_base_model() == BASE_MODEL


@probe("TrainingClient.create_sampling_client", "record_stability_info=True")
def stability(walk: Walk) -> None:
    sampler = walk.call(
        walk.training, "create_sampling_client", model_path=walk.weights, record_stability_info=True
    )
    _sample(sampler)


@probe("TrainingClient.save_weights_and_get_sampling_client")
def save_weights_and_get_sampling_client(walk: Walk) -> str:
    sampler = walk.call(
        walk.training,
        "save_weights_and_get_sampling_client",
        name="ignored",
        retry_config=RetryConfig(),
        kind="snapshot",
    )
    _sample(sampler)
    return "the SDK itself drops `name`"


@probe("TrainingClient.save_weights_and_get_sampling_client", "record_stability_info=True")
def stability_of_snapshot(walk: Walk) -> None:
    _sample(walk.call(walk.training, "save_weights_and_get_sampling_client", record_stability_info=True))


def _kind(kind: str) -> Callable[[Walk], None]:
    def run(walk: Walk) -> None:
        _sample(walk.call(walk.training, "save_weights_and_get_sampling_client", kind=kind))

    return run


for _name in ("snapshot", "inflight"):
    probe("kind of sampling client", _name)(_kind(_name))


def _sample(sampler: tinker.SamplingClient) -> None:
    answer = sampler.sample(
        types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=2)
    ).result()
    assert len(answer.sequences[0].tokens) <= 2


def _future(walk: Walk) -> tinker.APIFuture[types.ForwardBackwardOutput]:
    return walk.training.forward(_data(), "cross_entropy")


@probe("APIFuture.result")
def future_result(walk: Walk) -> None:
    future = _future(walk)
    walk.call(future, "result", of="APIFuture", timeout=60.0)
    assert future.result().metrics and walk.wait(future.result_async(60.0)).metrics


@probe("APIFuture.future")
def future_future(walk: Walk) -> None:
    assert walk.call(_future(walk), "future", of="APIFuture").result(60).metrics


@probe("APIFuture.coroutine")
def future_coroutine(walk: Walk) -> None:
    async def waited() -> types.ForwardBackwardOutput:
        return await _future(walk).coroutine()

    assert walk.wait(waited()).metrics
    walk.used["APIFuture.coroutine"].update()
