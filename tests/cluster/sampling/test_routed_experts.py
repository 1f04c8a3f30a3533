"""A model with routed experts, over gRPC: what a sampler tells of its samples' experts, a trainer replays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from services.launcher.tiny_model import write_tokenizer
from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, CONTEXT, VOCAB, Cluster, start_cluster, stop_cluster
from tests.unit.trainer.compute.architectures import config_of, random_model
from tinsmith.v1 import sampling_pb2, training_pb2, types_pb2
from tinsmith_client import Client, RequestFailed, datum, floats, ints

LAYERS, TOP_K, EXPERTS = 2, 2, 16
SETTINGS = {
    **{"vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"head_dim": 32, "max_position_embeddings": CONTEXT, "num_hidden_layers": 3, "mlp_only_layers": [0]},
    **{"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 16},
}
PROMPT = batches.tokens(3, 40)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("experts")
    model = directory / "model"
    random_model(config_of("qwen3_moe", SETTINGS), "eager").save_pretrained(model)
    write_tokenizer(model, VOCAB, CONTEXT)
    running = start_cluster(directory, Path(model))
    yield running
    assert stop_cluster(running) == []


def replayed(
    sequence: sampling_pb2.SampledSequence, routed: types_pb2.RoutedExperts | None
) -> training_pb2.Datum:
    whole = PROMPT + ints(sequence.tokens.data)
    return datum(whole[:-1], whole[1:], weights=[1.0] * (len(whole) - 1), routed_experts=routed)


def test_the_trainer_replays_the_experts_that_made_a_sample(experts: Cluster) -> None:
    with (
        Client(f"127.0.0.1:{experts.grpc_port}", experts.api_key) as client,
        client.create_session() as session,
    ):
        # A CPU samples no adapters of such a model. One that was not trained yet is the base model.
        model = session.create_model(BASE_MODEL, rank=8)
        sampler = session.sampler(base_model=BASE_MODEL)
        result = sampler.sample(PROMPT, 2, max_tokens=24, seed=5, routed_experts=True).result()

        def logprobs(routed: list[types_pb2.RoutedExperts | None]) -> np.ndarray:
            data = [replayed(*each) for each in zip(result.sequences, routed, strict=True)]
            outputs = model.forward_backward(data, forward_only=True).result().outputs["logprobs"]
            return np.array(floats(outputs.data))

        told = [sequence.routed_experts for sequence in result.sequences]
        found, free = logprobs(list(told)), logprobs([None, None])
        start = 0
        for sequence, routed in zip(result.sequences, told, strict=True):
            count = sequence.tokens.shape[0]
            assert list(routed.shape) == [len(PROMPT) + count - 1, LAYERS, TOP_K]
            start += routed.shape[0]
            sampled = np.array(floats(sequence.logprobs.data))
            np.testing.assert_allclose(found[start - count : start], sampled, atol=1e-4)
        np.testing.assert_allclose(found, free, atol=1e-4)

        # With others it computes others, and its gradient is of these.
        turned = [
            types_pb2.RoutedExperts(
                ids=((np.frombuffer(routed.ids, np.uint8) + 1) % EXPERTS).astype(np.uint8).tobytes(),
                shape=routed.shape,
            )
            for routed in told
        ]
        assert np.abs(logprobs(list(turned)) - free).max() > 1e-2
        data = [replayed(*each) for each in zip(result.sequences, turned, strict=True)]
        before = model.forward_backward(data).result().metrics["loss:sum"]
        model.optim_step(0.003).result()
        assert model.forward_backward(data, forward_only=True).result().metrics["loss:sum"] < before

        wrong = types_pb2.RoutedExperts(ids=bytes([EXPERTS] * len(told[0].ids)), shape=told[0].shape)
        with pytest.raises(RequestFailed, match=f"data\\[0\\]: routed_experts has expert {EXPERTS}"):
            model.forward_backward([replayed(result.sequences[0], wrong)]).result()
