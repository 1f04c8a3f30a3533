"""What changes which tokens are likely, over gRPC, against a greedy decoding that is written out here."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, Cluster
from tests.reference import Reference
from tinsmith.v1 import (
    results_pb2,
    sampling_pb2,
    service_pb2_grpc,
    sessions_pb2,
    types_pb2,
)

COUNT = 24
EOS = sampling_pb2.StopCondition(model_eos={})
PROMPT = batches.tokens(31, 12)


class Samples:
    """Samples of the base model, one after the other."""

    def __init__(self, stub: service_pb2_grpc.TinsmithServiceStub, key: str) -> None:
        self._stub, self._metadata = stub, (("x-api-key", key),)
        created = sessions_pb2.CreateSessionRequest()
        session = stub.CreateSession(created, metadata=self._metadata, timeout=60).session_id
        opening = sampling_pb2.CreateSamplingSessionRequest(session_id=session, base_model=BASE_MODEL)
        opened = stub.CreateSamplingSession(opening, metadata=self._metadata, timeout=60)
        self._session, self._number = opened.sampling_session_id, 0

    def of(self, num_samples: int = 1, **params: object) -> list[sampling_pb2.SampledSequence]:
        settings: dict = {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "max_tokens": COUNT} | params
        never = sampling_pb2.StopCondition(never=sampling_pb2.StopCondition.Never())
        asked = sampling_pb2.SampleRequest(
            sampling_session_id=self._session,
            seq_id=self._number,
            prompt=types_pb2.Tensor(
                dtype=types_pb2.DATA_TYPE_INT32,
                shape=[len(PROMPT)],
                data=np.array(PROMPT, "<i4").tobytes(),
            ),
            num_samples=num_samples,
            params=sampling_pb2.SamplingParams(**{"stop": never} | settings),
        )
        self._number += 1
        sent = self._stub.Sample(asked, metadata=self._metadata, timeout=60)
        wanted = results_pb2.GetResultRequest(request_id=sent.request_id, timeout_seconds=30)
        while True:
            reply = self._stub.GetResult(wanted, metadata=self._metadata, timeout=60)
            if reply.HasField("result"):
                assert reply.result.HasField("sample"), reply.result
                return list(reply.result.sample.sequences)

    def tokens(self, **params: object) -> list[int]:
        return ids(self.of(**params)[0])


def ids(sequence: sampling_pb2.SampledSequence) -> list[int]:
    return np.frombuffer(sequence.tokens.data, "<i4").tolist()


@pytest.fixture(scope="module")
def samples(cluster: Cluster) -> Iterator[Samples]:
    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        yield Samples(service_pb2_grpc.TinsmithServiceStub(channel), cluster.api_key)


@pytest.fixture(scope="module")
def reference(cluster: Cluster) -> Reference:
    return Reference(cluster.model_dir)


@pytest.fixture(scope="module")
def tokenizer(cluster: Cluster) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(cluster.model_dir)


def greedy(
    reference: Reference,
    frequency: float = 0.0,
    presence: float = 0.0,
    repetition: float = 1.0,
    bias: dict[int, float] | None = None,
) -> list[int]:
    """The most likely continuation after penalties and biases, as the proto's comments define them."""
    said: list[int] = []
    for _ in range(COUNT):
        with torch.no_grad():
            logits = reference.model(torch.tensor([PROMPT + said])).logits[0, -1].double()
        for token in {*PROMPT, *said}:
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        for token, times in Counter(said).items():
            logits[token] -= frequency * times + presence
        for token, more in (bias or {}).items():
            logits[token] += more
        said.append(int(logits.argmax()))
    return said


@pytest.mark.parametrize(
    "asked",
    [
        {"frequency": 1.5},
        {"presence": 2.0},
        {"frequency": -0.5, "presence": 0.5},
        {"repetition": 3.0},
        {"repetition": 0.5},
        {"frequency": 0.5, "presence": 0.25, "repetition": 1.5},
    ],
)
def test_penalties_are_taken_from_the_logits(
    samples: Samples, reference: Reference, asked: dict[str, float]
) -> None:
    named = {f"{name}_penalty": value for name, value in asked.items()}
    found = samples.tokens(**named)
    assert found == greedy(reference, **asked)


def test_penalties_change_what_is_said(samples: Samples, reference: Reference) -> None:
    unhindered = greedy(reference)
    for penalty in ({"frequency_penalty": 1.5}, {"presence_penalty": 2.0}, {"repetition_penalty": 3.0}):
        assert samples.tokens(**penalty) != unhindered


def test_biases_are_added_to_the_logits_and_told_log_probabilities_stay_the_models_own(
    samples: Samples, reference: Reference
) -> None:
    likeliest = greedy(reference)[0]
    bias = {likeliest: -20.0, 7: 1.5, 9: -100.0}
    given = [sampling_pb2.LogitBias(token_id=token, bias=more) for token, more in bias.items()]
    sequence = samples.of(logit_bias=given)[0]
    assert ids(sequence) == greedy(reference, bias=bias) != greedy(reference)
    told = np.frombuffer(sequence.logprobs.data, "<f4")
    own = reference.sequence_logprobs(PROMPT + ids(sequence))[len(PROMPT) - 1 :]
    np.testing.assert_allclose(told, own, atol=1e-4)
    sure = samples.tokens(logit_bias=[sampling_pb2.LogitBias(token_id=7, bias=100)])
    assert sure == [7] * COUNT


def test_min_p_keeps_what_is_nearly_as_likely_as_the_likeliest(
    samples: Samples, reference: Reference
) -> None:
    def shares(min_p: float) -> list[float]:
        found = []
        for sequence in samples.of(16, temperature=1.0, min_p=min_p):
            with torch.no_grad():
                rows = reference.distribution(PROMPT + ids(sequence))[len(PROMPT) - 1 : -1].exp()
            own = rows.gather(1, torch.tensor(ids(sequence))[:, None])[:, 0]
            found += (own / rows.amax(1)).tolist()
        return found

    assert min(shares(0.5)) >= 0.5 - 1e-4
    assert min(shares(0.0)) < 0.4
    assert min(shares(1.0)) == 1.0


def test_bad_words_are_not_said(samples: Samples, tokenizer: PreTrainedTokenizerBase) -> None:
    unhindered = samples.tokens()
    word = next(text for token in unhindered if (text := tokenizer.decode([token])).strip())
    found = tokenizer.decode(samples.tokens(bad_words=[word.strip()]))
    assert word.strip() in tokenizer.decode(unhindered)
    assert word.strip() not in found


def test_a_text_matches_what_it_must(samples: Samples, tokenizer: PreTrainedTokenizerBase) -> None:
    def text(**constraint: str) -> str:
        asked = sampling_pb2.OutputConstraint(**constraint)
        (found,) = samples.of(constraint=asked, stop=EOS, temperature=1.0, seed=5, max_tokens=200)
        assert found.stop_reason == sampling_pb2.STOP_REASON_STOP
        return tokenizer.decode(ids(found), skip_special_tokens=True)

    assert re.fullmatch(r"[ab]{3}-[0-9]{2}", text(regex="[ab]{3}-[0-9]{2}"))
    schema = {"enum": ["red", "green"]}
    assert json.loads(text(json_schema=json.dumps(schema))) in ("red", "green")


@pytest.mark.parametrize("kind", ["regex", "json_schema"])
def test_a_constraint_that_cannot_be_read_is_refused(samples: Samples, kind: str) -> None:
    asked = sampling_pb2.OutputConstraint(**{kind: "(["})
    with pytest.raises(AssertionError, match="error") as caught:
        samples.of(constraint=asked, stop=EOS)
    assert "ERROR_CATEGORY_USER" in str(caught.value)
