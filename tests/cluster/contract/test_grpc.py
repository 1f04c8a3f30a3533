"""The public gRPC service does what the SDK does, on the same cluster with the same keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, Cluster
from tests.reference import Reference
from tinsmith.v1 import (
    checkpoints_pb2,
    models_pb2,
    results_pb2,
    sampling_pb2,
    service_pb2_grpc,
    sessions_pb2,
    training_pb2,
    types_pb2,
)


@pytest.fixture
def stub(cluster: Cluster) -> Iterator[service_pb2_grpc.TinsmithServiceStub]:
    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        yield service_pb2_grpc.TinsmithServiceStub(channel)


@pytest.fixture
def metadata(cluster: Cluster) -> tuple[tuple[str, str], ...]:
    return (("x-api-key", cluster.api_key),)


def tensor(values: list[float] | list[int], dtype: str) -> types_pb2.Tensor:
    kinds = {
        "int32": types_pb2.DATA_TYPE_INT32,
        "int64": types_pb2.DATA_TYPE_INT64,
        "float32": types_pb2.DATA_TYPE_FLOAT32,
    }
    return types_pb2.Tensor(dtype=kinds[dtype], shape=[len(values)], data=np.array(values, dtype).tobytes())


SEQUENCE = batches.tokens(4, 21)
DATUM = training_pb2.Datum(
    tokens=tensor(SEQUENCE[:-1], "int32"),
    loss_inputs={
        "target_tokens": tensor(SEQUENCE[1:], "int64"),
        "weights": tensor([1.0] * 20, "float32"),
    },
)


def finish(
    stub: service_pb2_grpc.TinsmithServiceStub, request_id: str, metadata: tuple[tuple[str, str], ...]
) -> results_pb2.OperationResult:
    for _ in range(10):
        reply = stub.GetResult(
            results_pb2.GetResultRequest(request_id=request_id, timeout_seconds=20),
            metadata=metadata,
            timeout=60,
        )
        if reply.HasField("result"):
            assert reply.result.WhichOneof("kind") != "error", reply.result.error
            return reply.result
    raise AssertionError(f"{request_id} never resolved")


def test_a_model_is_created_trained_saved_and_sampled_over_grpc(
    cluster: Cluster, stub: service_pb2_grpc.TinsmithServiceStub, metadata: tuple[tuple[str, str], ...]
) -> None:
    models = stub.ListModels(models_pb2.ListModelsRequest(), metadata=metadata, timeout=60).models
    assert [(m.name, m.trainable, m.sampleable) for m in models] == [(BASE_MODEL, True, True)]
    session = stub.CreateSession(
        sessions_pb2.CreateSessionRequest(), metadata=metadata, timeout=60
    ).session_id
    lora = models_pb2.LoraConfig(rank=4, seed=3, train_attn=True, train_mlp=True, train_unembed=False)
    created = stub.CreateModel(
        models_pb2.CreateModelRequest(session_id=session, model_seq_id=0, base_model=BASE_MODEL, lora=lora),
        metadata=metadata,
        timeout=60,
    )
    assert finish(stub, created.request_id, metadata).create_model.lora.rank == 4

    work = training_pb2.ForwardBackward(data=[DATUM], loss_fn="cross_entropy")
    losses = []
    for step in range(3):
        sent = stub.ForwardBackward(
            training_pb2.ForwardBackwardRequest(
                model_id=created.model_id, seq_id=2 * step + 1, forward_backward=work
            ),
            metadata=metadata,
            timeout=60,
        )
        stepped = stub.OptimStep(
            training_pb2.OptimStepRequest(
                model_id=created.model_id,
                seq_id=2 * step + 2,
                adam=training_pb2.AdamParams(learning_rate=0.02, beta1=0.9, beta2=0.95, eps=1e-8),
            ),
            metadata=metadata,
            timeout=60,
        )
        result = finish(stub, sent.request_id, metadata).forward_backward
        losses.append(result.metrics["loss:sum"])
        assert len(result.outputs["logprobs"].data) == 20 * 4
        finish(stub, stepped.request_id, metadata)
    assert losses[2] < losses[1] < losses[0]

    saved = stub.SaveForSampler(
        checkpoints_pb2.SaveForSamplerRequest(model_id=created.model_id, seq_id=7, sampling_session_seq_id=0),
        metadata=metadata,
        timeout=60,
    )
    assert finish(stub, saved.request_id, metadata).save_for_sampler.version == 7
    request = sampling_pb2.SampleRequest(
        sampling_session_id=saved.sampling_session_id,
        seq_id=0,
        prompt=tensor(SEQUENCE[:5], "int32"),
        num_samples=1,
        params=sampling_pb2.SamplingParams(
            max_tokens=6,
            temperature=0.0,
            top_k=-1,
            top_p=1.0,
            stop=sampling_pb2.StopCondition(never=sampling_pb2.StopCondition.Never()),
        ),
    )
    sampled = stub.Sample(request, metadata=metadata, timeout=60)
    result = finish(stub, sampled.request_id, metadata).sample
    tokens = np.frombuffer(result.sequences[0].tokens.data, np.int32).tolist()
    reference = Reference(cluster.model_dir, cluster.snapshot(created.model_id))
    assert tokens == reference.greedy(SEQUENCE[:5], 6)


class Session:
    """Calls methods of the service and waits for what they promise."""

    def __init__(
        self, stub: service_pb2_grpc.TinsmithServiceStub, metadata: tuple[tuple[str, str], ...]
    ) -> None:
        self._stub = stub
        self._metadata = metadata
        self.id = self.call("CreateSession", sessions_pb2.CreateSessionRequest()).session_id

    def call(self, method: str, request: Any) -> Any:
        return getattr(self._stub, method)(request, metadata=self._metadata, timeout=60)

    def run(self, method: str, request: Any) -> results_pb2.OperationResult:
        """The result of a call that starts work."""
        return finish(self._stub, self.call(method, request).request_id, self._metadata)

    def train(self, model_id: str, first_seq_id: int, steps: int) -> list[float]:
        """The loss at each step."""
        losses = []
        for step in range(steps):
            seq_id = first_seq_id + 2 * step
            work = training_pb2.ForwardBackward(data=[DATUM], loss_fn="cross_entropy")
            sent = training_pb2.ForwardBackwardRequest(
                model_id=model_id, seq_id=seq_id, forward_backward=work
            )
            losses.append(self.run("ForwardBackward", sent).forward_backward.metrics["loss:sum"])
            adam = training_pb2.AdamParams(learning_rate=0.02, beta1=0.9, beta2=0.95, eps=1e-8)
            stepped = training_pb2.OptimStepRequest(model_id=model_id, seq_id=seq_id + 1, adam=adam)
            self.run("OptimStep", stepped)
        return losses


def test_state_is_saved_and_continued_and_a_finished_session_leaves_only_checkpoints(
    cluster: Cluster, stub: service_pb2_grpc.TinsmithServiceStub, metadata: tuple[tuple[str, str], ...]
) -> None:
    session = Session(stub, metadata)
    lora = models_pb2.LoraConfig(rank=4, seed=3, train_attn=True, train_mlp=True, train_unembed=False)
    creation = models_pb2.CreateModelRequest(session_id=session.id, base_model=BASE_MODEL, lora=lora)
    session.run("CreateModel", creation)
    first = f"{session.id}:train:0"
    session.train(first, 1, steps=1)
    save = checkpoints_pb2.SaveStateRequest(model_id=first, seq_id=3, name="here")
    path = session.run("SaveState", save).save_state.path
    assert path == f"tinker://{first}/weights/here"
    went_on = session.train(first, 4, steps=2)

    again = models_pb2.CreateModelFromStateRequest(
        session_id=session.id, model_seq_id=1, path=path, optimizer=True
    )
    session.run("CreateModelFromState", again)
    second = f"{session.id}:train:1"
    np.testing.assert_allclose(session.train(second, 1, steps=2), went_on, rtol=1e-6)
    load = checkpoints_pb2.LoadStateRequest(model_id=second, seq_id=5, path=path)
    session.run("LoadState", load)
    np.testing.assert_allclose(session.train(second, 6, steps=1), went_on[:1], rtol=1e-6)
    unnamed = checkpoints_pb2.SaveForSamplerRequest(model_id=second, seq_id=8)
    session.run("SaveForSampler", unnamed)

    unload = models_pb2.UnloadModelRequest(model_id=second, seq_id=9)
    assert session.run("UnloadModel", unload).HasField("unload_model")
    state = cluster.data_dir / "state"
    wait_until(lambda: not (state / second).exists(), "the unloaded model's training state is deleted")
    assert cluster.snapshot(second, 8).is_dir()
    info = session.call("GetModelInfo", models_pb2.GetModelInfoRequest(model_id=second)).model
    assert info.status == models_pb2.MODEL_STATUS_UNLOADED
    assert (state / first).is_dir()
    assert first in resident(cluster)
    session.call("Heartbeat", sessions_pb2.HeartbeatRequest(session_id=session.id))
    session.call("FinishSession", sessions_pb2.FinishSessionRequest(session_id=session.id))
    wait_until(lambda: not (state / first).exists(), "the finished session's training state is deleted")
    assert not {first, second} & resident(cluster)
    assert (cluster.data_dir / "checkpoints" / first / "weights" / "here").is_dir()


def test_status_hears_from_a_trainer_on_a_cpu_that_it_computes_shared_prefixes_once(
    cluster: Cluster,
) -> None:
    said = [each.get("status", {}) for each in cluster.status()["services"]]
    trainers = [status for status in said if "world_size" in status]
    assert trainers and all(trainer.get("shares_prefixes") for trainer in trainers)


def resident(cluster: Cluster) -> set[str]:
    """Ids of the models in the trainer's memory."""
    services = cluster.status()["services"]
    return {model["model_id"] for one in services for model in one.get("status", {}).get("models", [])}


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"after {seconds:.0f} s it is not so that {what}"
        time.sleep(0.1)


def sampling_session(
    stub: service_pb2_grpc.TinsmithServiceStub, metadata: tuple[tuple[str, str], ...]
) -> str:
    """A sampling session on the base model."""
    session = stub.CreateSession(
        sessions_pb2.CreateSessionRequest(), metadata=metadata, timeout=60
    ).session_id
    opening = sampling_pb2.CreateSamplingSessionRequest(session_id=session, base_model=BASE_MODEL)
    return stub.CreateSamplingSession(opening, metadata=metadata, timeout=60).sampling_session_id


def everything(session: str, prompt: list[int]) -> sampling_pb2.SampleRequest:
    """A sample that asks for every kind of score; its targets are sparse."""
    return sampling_pb2.SampleRequest(
        sampling_session_id=session,
        prompt=tensor(prompt, "int32"),
        num_samples=2,
        params=sampling_pb2.SamplingParams(
            max_tokens=5,
            seed=2**64 - 1,
            temperature=1.0,
            top_k=-1,
            top_p=1.0,
            stop=sampling_pb2.StopCondition(never=sampling_pb2.StopCondition.Never()),
        ),
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs=types_pb2.Matrix(
            values=tensor([7, 500], "int64"),
            crow_indices=tensor([0] * (len(prompt) - 2) + [1, 2], "int64"),
            col_indices=tensor([9, 0], "int64"),
            shape=[len(prompt) - 1, 10],
        ),
        prompt_alt_tokens_k=4,
        prompt_logprobs_last_n=2,
    )


def array(tensor: types_pb2.Tensor) -> np.ndarray:
    kinds = {types_pb2.DATA_TYPE_INT32: np.int32, types_pb2.DATA_TYPE_FLOAT32: np.float32}
    return np.frombuffer(tensor.data, kinds[tensor.dtype]).reshape(list(tensor.shape))


def test_every_score_can_be_asked_for_over_grpc(
    cluster: Cluster, stub: service_pb2_grpc.TinsmithServiceStub, metadata: tuple[tuple[str, str], ...]
) -> None:
    prompt = batches.tokens(12, 9)
    request = everything(sampling_session(stub, metadata), prompt)
    sampled = stub.Sample(request, metadata=metadata, timeout=60)
    result = finish(stub, sampled.request_id, metadata).sample
    reference = Reference(cluster.model_dir)
    rows = reference.distribution(prompt)[:-1].detach().numpy()
    scores = array(result.prompt_logprobs)
    assert np.isnan(scores[:-2]).all()
    np.testing.assert_allclose(scores[-2:], [rows[6, prompt[7]], rows[7, prompt[8]]], atol=1e-4)
    likely = array(result.topk_prompt_logprobs.logprobs)
    assert (likely[:-2] == -99999).all()
    np.testing.assert_allclose(likely[-2:], -np.sort(-rows[-2:])[:, :2], atol=1e-4)
    targets = result.target_prompt_logprobs
    assert targets.crow_indices == request.target_prompt_logprobs.crow_indices
    assert targets.col_indices == request.target_prompt_logprobs.col_indices
    np.testing.assert_allclose(array(targets.values), [rows[6, 7], rows[7, 500]], atol=1e-4)
    drawn = result.prompt_alt_tokens
    expected = np.take_along_axis(rows, array(drawn.token_ids).astype(np.int64), axis=1)
    np.testing.assert_allclose(array(drawn.logprobs), expected, atol=1e-4)
    assert expected.shape == (8, 4)
    for sequence in result.sequences:
        tokens = array(sequence.tokens).tolist()
        after = reference.distribution(prompt + tokens)[8:-1].detach().numpy()
        likely = -np.sort(-after)[:, :3]
        np.testing.assert_allclose(array(sequence.topk_logprobs.logprobs), likely, atol=1e-4)


def test_what_http_refuses_grpc_refuses_with_the_same_words(
    stub: service_pb2_grpc.TinsmithServiceStub, metadata: tuple[tuple[str, str], ...]
) -> None:
    session = sampling_session(stub, metadata)
    for change, says in (
        ({"prompt_logprobs_last_n": 9}, "follows nothing"),
        ({"topk_sample_logprobs": 65}, "topk_sample_logprobs is 65"),
        ({"target_prompt_logprobs": types_pb2.Matrix(shape=[8, 1])}, "target_prompt_logprobs"),
        ({"params": sampling_pb2.SamplingParams(temperature=0.001)}, "temperature is 0.001"),
    ):
        request = everything(session, batches.tokens(12, 9))
        for name in change:
            request.ClearField(name)
        request.MergeFrom(sampling_pb2.SampleRequest(**change))
        with pytest.raises(grpc.RpcError, match=says) as caught:
            stub.Sample(request, metadata=metadata, timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_a_call_without_a_key_is_unauthenticated(stub: service_pb2_grpc.TinsmithServiceStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ListModels(models_pb2.ListModelsRequest(), timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]


def test_an_unknown_model_is_not_found(
    stub: service_pb2_grpc.TinsmithServiceStub, metadata: tuple[tuple[str, str], ...]
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.OptimStep(
            training_pb2.OptimStepRequest(model_id="nobody:train:0", seq_id=1), metadata=metadata, timeout=60
        )
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
