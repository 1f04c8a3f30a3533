"""Generations that go on with what their model has become, and rollouts that are taken as far as they are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
import torch

from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, CONTEXT, Cluster
from tests.cluster.contract.test_grpc import Session, tensor
from tests.reference import KeptReference, Reference, check_logprobs
from tinsmith.v1 import checkpoints_pb2, models_pb2, results_pb2, sampling_pb2, service_pb2_grpc

PROMPT = batches.tokens(41, 12)
LONG = CONTEXT - len(PROMPT)


class Rollouts:
    """A model that is trained and saved while its rollouts run."""

    def __init__(self, stub: service_pb2_grpc.TinsmithServiceStub, key: str, *, full: bool = False) -> None:
        self._stub, self._metadata = stub, (("x-api-key", key),)
        self._session = Session(stub, self._metadata)
        lora = models_pb2.LoraConfig(rank=4, seed=3, train_attn=True, train_mlp=True, train_unembed=False)
        trained = {"full": models_pb2.FullFineTuning()} if full else {"lora": lora}
        created = models_pb2.CreateModelRequest(session_id=self._session.id, base_model=BASE_MODEL, **trained)
        self._session.run("CreateModel", created)
        self.model, self._next, self._samples = f"{self._session.id}:train:0", 1, 0

    def train(self) -> None:
        self._session.train(self.model, self._next, steps=1)
        self._next += 2

    def save(self) -> tuple[int, str]:
        """Saves for inflight sampling: the version and the sampling session."""
        save = checkpoints_pb2.SaveForSamplerRequest(
            model_id=self.model, seq_id=self._next, sampling_session_seq_id=self._next, inflight=True
        )
        self._next += 1
        saved = self._session.run("SaveForSampler", save).save_for_sampler
        return saved.version, saved.sampling_session_id

    def request(
        self, sampling_session: str, on_update: sampling_pb2.OnUpdate = sampling_pb2.ON_UPDATE_CONTINUE
    ) -> sampling_pb2.SampleRequest:
        self._samples += 1
        never = sampling_pb2.StopCondition(never=sampling_pb2.StopCondition.Never())
        params = sampling_pb2.SamplingParams(
            max_tokens=LONG, seed=7, stop=never, temperature=1.0, top_k=-1, top_p=1.0
        )
        return sampling_pb2.SampleRequest(
            sampling_session_id=sampling_session,
            seq_id=self._samples,
            prompt=tensor(PROMPT, "int32"),
            num_samples=2,
            params=params,
            on_update=on_update,
        )

    def stream(self, request: sampling_pb2.SampleRequest) -> Iterator[sampling_pb2.StreamSampleResponse]:
        asked = sampling_pb2.StreamSampleRequest(sample=request)
        return self._stub.StreamSample(asked, metadata=self._metadata, timeout=240)  # type: ignore[no-any-return]

    def keep(self, request_id: str) -> sampling_pb2.SampleResult:
        asked = sampling_pb2.CancelSampleRequest(request_id=request_id, keep=True)
        self._stub.CancelSample(asked, metadata=self._metadata, timeout=120)
        wanted = results_pb2.GetResultRequest(request_id=request_id, timeout_seconds=0)
        return self._stub.GetResult(wanted, metadata=self._metadata, timeout=60).result.sample  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def stub(cluster: Cluster) -> Iterator[service_pb2_grpc.TinsmithServiceStub]:
    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        yield service_pb2_grpc.TinsmithServiceStub(channel)


@pytest.fixture(scope="module")
def rollouts(cluster: Cluster, stub: service_pb2_grpc.TinsmithServiceStub) -> Rollouts:
    return Rollouts(stub, cluster.api_key)


def judged(cluster: Cluster, model: str, version: int) -> Reference:
    """The independent model of a snapshot."""
    directory = cluster.snapshot(model, version)
    if (directory / "config.json").exists():
        return Reference(directory)
    return Reference(cluster.model_dir, directory)


def check_spans(
    cluster: Cluster, model: str, sequence: sampling_pb2.SampledSequence
) -> list[sampling_pb2.VersionSpan]:
    """Forced through each version, its own tokens have the log-probabilities that were told."""
    tokens = np.frombuffer(sequence.tokens.data, "<i4").tolist()
    told = torch.from_numpy(np.frombuffer(sequence.logprobs.data, "<f4").copy())
    spans, start = list(sequence.versions), 0
    for span in spans:
        judge = judged(cluster, model, span.version)
        forced = judge.sequence_logprobs(PROMPT + tokens)[len(PROMPT) - 1 :]
        own = slice(start, start + span.tokens)
        check_logprobs(told[own], forced[own])
        start += span.tokens
    assert start == len(tokens)
    return spans


def test_a_rollout_goes_on_with_its_model_and_every_token_is_what_its_version_gives(
    cluster: Cluster, rollouts: Rollouts
) -> None:
    rollouts.train()
    version, sampling_session = rollouts.save()
    found: list[list[int]] = []
    while len(found) < 10 and not any(len(versions) == 2 for versions in found):
        rollouts.train()
        parts = rollouts.stream(rollouts.request(sampling_session))
        request_id = next(parts).request_id
        told = [next(parts)]
        assert told[0].HasField("new_tokens")
        first, (version, _) = version, rollouts.save()
        told += parts
        ends = {part.end.index: list(part.end.versions) for part in told if part.HasField("end")}
        made: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for new in (part.new_tokens for part in told if part.HasField("new_tokens")):
            made[new.index][new.version] += new.tokens.shape[0]
        for index, sequence in enumerate(rollouts.keep(request_id).sequences):
            assert sequence.stop_reason == sampling_pb2.STOP_REASON_LENGTH, "what is done stays as it is"
            spans = check_spans(cluster, rollouts.model, sequence)
            assert ends[index] == spans
            assert list(made[index].items()) == [(span.version, span.tokens) for span in spans]
            found.append([span.version for span in spans])
            # A generation may be over before its model is saved.
            assert found[-1] in ([first], [first, version])
    assert any(len(versions) == 2 for versions in found)


def check_kept_spans(cluster: Cluster, model: str, sequence: sampling_pb2.SampledSequence) -> None:
    """Forced through the versions, each over the keys and values of those before it, the tokens have the
    log-probabilities that were told. None of them was computed anew."""
    tokens = np.frombuffer(sequence.tokens.data, "<i4").tolist()
    told = torch.from_numpy(np.frombuffer(sequence.logprobs.data, "<f4").copy())
    judges, starts, place = list[Reference](), list[int](), len(PROMPT)
    for span in sequence.versions:
        assert span.kv_kept == bool(judges)
        judges.append(judged(cluster, model, span.version))
        # The last token before a change has not been computed when its weights come.
        starts.append(place - 1 if span.kv_kept else 0)
        place += span.tokens
    rows = KeptReference(judges).distribution(PROMPT + tokens, starts)[len(PROMPT) - 1 : -1]
    forced = rows.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    check_logprobs(told, forced)


@pytest.mark.parametrize("full", [False, True])
def test_a_rollout_goes_on_with_its_model_and_keeps_its_keys_and_values(
    cluster: Cluster, stub: service_pb2_grpc.TinsmithServiceStub, rollouts: Rollouts, full: bool
) -> None:
    if full:
        rollouts = Rollouts(stub, cluster.api_key, full=True)
    rollouts.train()
    version, sampling_session = rollouts.save()
    found: list[list[int]] = []
    while len(found) < 10 and not any(len(versions) == 2 for versions in found):
        rollouts.train()
        asked = rollouts.request(sampling_session, sampling_pb2.ON_UPDATE_CONTINUE_KEEP_KV)
        # What looks back at what was sampled goes on, too.
        asked.params.presence_penalty = 0.5
        parts = rollouts.stream(asked)
        request_id = next(parts).request_id
        assert next(parts).HasField("new_tokens")
        first, (version, _) = version, rollouts.save()
        ends = {part.end.index: list(part.end.versions) for part in parts if part.HasField("end")}
        for index, sequence in enumerate(rollouts.keep(request_id).sequences):
            assert ends[index] == list(sequence.versions)
            check_kept_spans(cluster, rollouts.model, sequence)
            found.append([span.version for span in sequence.versions])
            # A generation may be over before its model is saved.
            assert found[-1] in ([first], [first, version])
    assert any(len(versions) == 2 for versions in found)


def test_a_rollout_is_kept_as_far_as_it_is(cluster: Cluster, rollouts: Rollouts) -> None:
    version, sampling_session = rollouts.save()
    for _ in range(10):
        parts = rollouts.stream(rollouts.request(sampling_session))
        request_id = next(parts).request_id
        assert next(parts).HasField("new_tokens")
        kept = rollouts.keep(request_id).sequences
        reasons = [part.end.stop_reason for part in parts if part.HasField("end")]
        # A generation may be over before it is kept.
        if reasons == [sampling_pb2.STOP_REASON_CANCELLED] * 2:
            break
    else:
        raise AssertionError(f"every generation was over before it was kept: {reasons}")
    lengths = [[span.tokens for span in check_spans(cluster, rollouts.model, one)] for one in kept]
    assert {span.version for one in kept for span in one.versions} == {version}
    assert sum(map(sum, lengths)) > 0 and all(sum(tokens) < LONG for tokens in lengths), lengths
