"""Probes of the ServiceClient, of `tinker.auth` and of what can be chosen when a model is created."""

from __future__ import annotations

import os
from unittest import mock

import tinker
import torch
from tinker.lib.retry_handler import RetryConfig

from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, CONTEXT
from tests.cluster.contract.compatibility.walk import ClientOnly, Walk, probe

_CONSOLE = "a constant of the SDK: a page of the hosted service, which knows nothing of this cluster"


@probe("ServiceClient()")
def service_client(walk: Walk) -> None:
    (found,) = (
        walk.rest.search_sessions(tinker.types.SessionSearchRequest(session_id=walk.session_id))
        .result()
        .sessions
    )
    assert (found.display_name, found.project_id) == ("a walk", "walk")
    assert (found.user_metadata or {})["by"] == "walk"


@probe("RestClient()")
def rest_client(walk: Walk) -> None:
    assert walk.rest.list_sessions(limit=1).result().sessions


@probe("AdminClient()")
def admin_client(walk: Walk) -> None:
    assert walk.admin is not None


@probe("ServiceClient.holder")
def holder(walk: Walk) -> None:
    assert walk.service.holder.get_session_id() == walk.session_id


@probe("ServiceClient.close")
def close(walk: Walk) -> None:
    client = tinker.ServiceClient(base_url=walk.cluster.base_url, api_key=walk.cluster.api_key)
    session = client.holder.get_session_id()
    walk.call(client, "close", status="errored", detail="the walk says so")
    (found,) = (
        walk.rest.search_sessions(tinker.types.SessionSearchRequest(session_id=session)).result().sessions
    )
    assert "errored" in str(found.status) and "the walk says so" in str(found.status)


@probe("ServiceClient.get_console_url")
def get_console_url(walk: Walk) -> None:
    assert walk.call(walk.service, "get_console_url").startswith("https://")
    raise ClientOnly(_CONSOLE)


@probe("ServiceClient.get_telemetry")
def get_telemetry(walk: Walk) -> str:
    walk.call(walk.service, "get_telemetry")
    return "events about the SDK itself are taken and dropped"


@probe("ServiceClient.get_server_capabilities")
def get_server_capabilities(walk: Walk) -> None:
    (model,) = walk.call(walk.service, "get_server_capabilities").supported_models
    assert (model.model_name, model.max_context_length) == (BASE_MODEL, CONTEXT)
    assert model.trainable and model.sampleable


@probe("ServiceClient.create_rest_client")
def create_rest_client(walk: Walk) -> None:
    assert isinstance(walk.call(walk.service, "create_rest_client"), tinker.RestClient)


@probe("ServiceClient.create_lora_training_client")
def create_lora_training_client(walk: Walk) -> None:
    training = walk.call(
        walk.service,
        "create_lora_training_client",
        base_model=BASE_MODEL,
        rank=4,
        seed=3,
        train_mlp=False,
        train_attn=True,
        train_unembed=False,
        user_metadata={"a": "b"},
        optimizer=tinker.AdamOptimizerConfig(),
    )
    run = walk.rest.get_training_run(training.model_id).result()
    assert (run.lora_rank, run.user_metadata) == (4, {"a": "b"})
    info = walk.rest.get_weights_info_by_tinker_path(training.save_state("a").result().path).result()
    assert (info.train_mlp, info.train_attn, info.train_unembed) == (False, True, False)


@probe("ServiceClient.create_lora_training_client", "rank=0")
def full(walk: Walk) -> str:
    training = walk.call(walk.service, "create_lora_training_client", base_model=BASE_MODEL, rank=0)
    assert walk.rest.get_training_run(training.model_id).result().is_lora is False
    return "trains all weights; a seed has nothing to begin there and changes nothing"


@probe("ServiceClient.create_lora_training_client", "base_model=NAME:peft:N")
def variant(walk: Walk) -> str:
    training = walk.call(
        walk.service, "create_lora_training_client", base_model=f"{BASE_MODEL}:peft:{CONTEXT}", rank=4
    )
    assert training.get_info().model_data.model_name == BASE_MODEL
    return "is NAME where its context is as long"


@probe("optimizer", "AdamOptimizerConfig")
def adam(walk: Walk) -> None:
    training = walk.service.create_lora_training_client(
        BASE_MODEL, rank=4, optimizer=tinker.AdamOptimizerConfig()
    ).result()
    training.forward_backward([batches.cross_entropy(1, 6)], "cross_entropy").result()
    training.optim_step(tinker.AdamParams()).result()


@probe("optimizer", "DimuonOptimizerConfig")
def dimuon(walk: Walk) -> None:
    training = walk.service.create_lora_training_client(
        BASE_MODEL, rank=4, optimizer=tinker.DimuonOptimizerConfig()
    ).result()
    training.forward_backward([batches.cross_entropy(1, 6)], "cross_entropy").result()
    training.optim_step(tinker.DimuonParams(learning_rate=1e-3)).result()


@probe("ServiceClient.create_training_client_from_state")
def create_training_client_from_state(walk: Walk) -> None:
    training = walk.call(
        walk.service,
        "create_training_client_from_state",
        path=walk.state,
        base_model=BASE_MODEL,
        user_metadata={"c": "d"},
        weights_access_token=walk.cluster.api_key,
        optimizer=tinker.AdamOptimizerConfig(),
    )
    assert training.get_info().lora_rank == 8
    assert walk.rest.get_training_run(training.model_id).result().user_metadata == {"c": "d"}


@probe("ServiceClient.create_training_client_from_state_with_optimizer")
def create_training_client_from_state_with_optimizer(walk: Walk) -> None:
    training = walk.call(
        walk.service,
        "create_training_client_from_state_with_optimizer",
        path=walk.state,
        base_model=BASE_MODEL,
        user_metadata={"c": "d"},
        weights_access_token=walk.cluster.api_key,
    )
    assert training.get_info().lora_rank == 8


@probe("ServiceClient.copy_weights")
def copy_weights(walk: Walk) -> None:
    copied = walk.call(
        walk.service,
        "copy_weights",
        path=walk.state,
        ttl_seconds=7200,
        weights_access_token=walk.cluster.api_key,
    )
    assert walk.rest.get_weights_info_by_tinker_path(copied).result().lora_rank == 8


@probe("ServiceClient.create_sampling_client")
def create_sampling_client(walk: Walk) -> None:
    base = walk.call(
        walk.service, "create_sampling_client", base_model=BASE_MODEL, retry_config=RetryConfig()
    )
    tuned = walk.call(walk.service, "create_sampling_client", model_path=walk.weights)
    assert base.get_base_model() == tuned.get_base_model() == BASE_MODEL


@probe("ServiceClient.create_sampling_client", "record_stability_info=True")
def stability_of_service(walk: Walk) -> None:
    sampler = walk.call(
        walk.service, "create_sampling_client", base_model=BASE_MODEL, record_stability_info=True
    )
    sampler.sample(tinker.ModelInput.from_ints([1, 2]), 1, tinker.SamplingParams(max_tokens=1)).result()


@probe("ServiceClient.create_custom_loss")
def create_custom_loss(walk: Walk) -> str:
    def halved(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -(logprobs * weights).sum() / 2
        return loss, {"custom/halved:sum": loss}

    handle = walk.call(
        walk.service, "create_custom_loss", fn=halved, input_ranks={"logprobs": 1, "weights": 1}
    )
    data = [batches.cross_entropy(1, 6)]
    answer = walk.training.forward_backward_custom(data, handle).result()
    plain = walk.training.forward(data, "cross_entropy").result()
    assert abs(answer.metrics["custom/halved:sum"] * 2 - plain.metrics["loss:sum"]) < 1e-3
    return "runs on the client, from log-probabilities that the cluster computes"


@probe("auth.get_tinker_token")
def get_tinker_token(walk: Walk) -> None:
    with mock.patch.dict(os.environ, walk.environment):
        assert walk.call(tinker.auth, "get_tinker_token", of="auth") == walk.cluster.api_key


@probe("auth.tinker_has_credentials")
def tinker_has_credentials(walk: Walk) -> None:
    with mock.patch.dict(os.environ, walk.environment):
        assert walk.call(tinker.auth, "tinker_has_credentials", of="auth")


@probe("auth.raise_if_tinker_not_accessible")
def raise_if_tinker_not_accessible(walk: Walk) -> None:
    with mock.patch.dict(os.environ, walk.environment):
        walk.call(tinker.auth, "raise_if_tinker_not_accessible", of="auth")
