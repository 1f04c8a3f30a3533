"""Sampling through the SDK: exact log-probabilities, stops, immutable versions."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoTokenizer

from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, CONTEXT, Cluster
from tests.reference import Reference

GREEDY = types.SamplingParams(max_tokens=12, temperature=0.0, stop=[])


def prompt(seed: int, length: int) -> types.ModelInput:
    return types.ModelInput.from_ints(batches.tokens(seed, length))


def sample(
    client: tinker.SamplingClient, seed: int = 0, params: types.SamplingParams = GREEDY, n: int = 1
) -> tinker.SampleResponse:
    return client.sample(prompt(seed, 10), n, params).result()


def train_a_step(training: tinker.TrainingClient, seed: int = 0) -> None:
    training.forward_backward([batches.cross_entropy(seed, 40)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=5e-2)).result()


@pytest.fixture
def base(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=BASE_MODEL).result()


def test_the_base_model_samples_without_any_training_client(
    cluster: Cluster, base: tinker.SamplingClient
) -> None:
    reference = Reference(cluster.model_dir)
    with torch.no_grad():
        assert sample(base).sequences[0].tokens == reference.greedy(batches.tokens(0, 10), 12)


def test_sampled_logprobs_equal_the_references(cluster: Cluster, base: tinker.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=16, temperature=1.0, seed=5, stop=[])
    sequence = sample(base, 3, params).sequences[0]
    whole = batches.tokens(3, 10) + list(sequence.tokens)
    expected = Reference(cluster.model_dir).sequence_logprobs(whole)[9:]
    np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)


def test_logprobs_of_trained_weights_agree_between_sampler_trainer_and_reference(
    cluster: Cluster, training: tinker.TrainingClient
) -> None:
    for seed in range(3):
        train_a_step(training, seed)
    client = training.save_weights_and_get_sampling_client().result()
    probe = batches.cross_entropy(77, 30)
    whole = [*batches.inputs(probe), batches.targets(probe)[-1]]
    from_sampler = client.compute_logprobs(types.ModelInput.from_ints(whole)).result()
    from_trainer = batches.logprobs(training.forward([probe], "cross_entropy").result())[0]
    expected = Reference(cluster.model_dir, cluster.snapshot(training.model_id)).sequence_logprobs(whole)
    assert from_sampler[0] is None
    torch.testing.assert_close(from_trainer, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(from_sampler[1:], from_trainer, atol=1e-4)


def test_many_prompts_of_different_versions_scored_at_once_keep_their_own_weights(
    cluster: Cluster, service: tinker.ServiceClient, base: tinker.SamplingClient
) -> None:
    clients = [(base, Reference(cluster.model_dir))]
    for seed in range(2):
        training = service.create_lora_training_client(BASE_MODEL, rank=4 + 4 * seed, seed=seed).result()
        train_a_step(training, seed)
        client = training.save_weights_and_get_sampling_client().result()
        clients.append((client, Reference(cluster.model_dir, cluster.snapshot(training.model_id))))
    jobs = []
    for round_number in range(3):
        for client, reference in clients:
            ids = batches.tokens(100 + round_number, 8 + 5 * round_number)
            jobs.append((client.compute_logprobs(types.ModelInput.from_ints(ids)), reference, ids))
    for future, reference, ids in jobs:
        np.testing.assert_allclose(future.result()[1:], reference.sequence_logprobs(ids), atol=1e-4)


def test_a_sampling_client_keeps_its_version_while_training_goes_on(training: tinker.TrainingClient) -> None:
    train_a_step(training)
    first = training.save_weights_and_get_sampling_client().result()
    before = sample(first)
    for seed in range(1, 4):
        train_a_step(training, seed)
    second = training.save_weights_and_get_sampling_client().result()
    after = sample(second)
    again = sample(first)
    assert again.sequences[0].tokens == before.sequences[0].tokens
    assert again.sequences[0].logprobs == before.sequences[0].logprobs
    assert after.sequences[0].logprobs != before.sequences[0].logprobs


def test_a_named_save_can_be_sampled_from_by_its_path(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    train_a_step(training)
    path = training.save_weights_for_sampler("named").result().path
    assert path == f"tinker://{training.model_id}/sampler_weights/named"
    ephemeral = sample(training.save_weights_and_get_sampling_client().result())
    named = sample(service.create_sampling_client(model_path=path).result())
    assert named.sequences[0].tokens == ephemeral.sequences[0].tokens


def test_a_seed_repeats_the_samples_and_the_samples_of_a_group_differ(base: tinker.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=2**63 + 5, stop=[])
    first, second = (sample(base, 1, params, n=4) for _ in range(2))
    assert [s.tokens for s in first.sequences] == [s.tokens for s in second.sequences]
    assert len({tuple(s.tokens) for s in first.sequences}) == 4


def test_a_stop_token_ends_the_sequence_and_is_part_of_it(base: tinker.SamplingClient) -> None:
    free = sample(base).sequences[0]
    stop = list(free.tokens)[4]
    first = list(free.tokens).index(stop)
    params = types.SamplingParams(max_tokens=12, temperature=0.0, stop=[stop])
    stopped = sample(base, 0, params).sequences[0]
    assert stopped.stop_reason == "stop"
    assert list(stopped.tokens) == list(free.tokens)[: first + 1]
    assert len(stopped.logprobs or []) == len(stopped.tokens)


def test_a_stop_string_ends_the_sequence_and_is_part_of_its_text(
    cluster: Cluster, base: tinker.SamplingClient
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(cluster.model_dir)
    for seed in range(20):
        text = tokenizer.decode(list(sample(base, seed).sequences[0].tokens))
        printable = [c for c in text if c.isascii() and c.isprintable()]
        if printable:
            break
    params = types.SamplingParams(max_tokens=12, temperature=0.0, stop=printable[0])
    stopped = sample(base, seed, params).sequences[0]
    assert stopped.stop_reason == "stop"
    assert tokenizer.decode(list(stopped.tokens)).count(printable[0]) == 1


def test_reaching_max_tokens_is_told_as_length(base: tinker.SamplingClient) -> None:
    sequence = sample(base).sequences[0]
    assert sequence.stop_reason == "length"
    assert len(sequence.tokens) == 12


def test_generation_without_a_limit_ends_at_the_context_length(base: tinker.SamplingClient) -> None:
    params = types.SamplingParams(temperature=0.0, stop=[])
    sequence = base.sample(prompt(1, CONTEXT - 20), 1, params).result().sequences[0]
    assert sequence.stop_reason == "length"
    assert len(sequence.tokens) == 20


def test_the_most_likely_prompt_tokens_are_the_references(
    cluster: Cluster, base: tinker.SamplingClient
) -> None:
    ids = batches.tokens(9, 6)
    response = base.sample(
        types.ModelInput.from_ints(ids), 1, GREEDY, include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result()
    assert response.topk_prompt_logprobs is not None and response.topk_prompt_logprobs[0] is None
    with torch.no_grad():
        values, indices = Reference(cluster.model_dir).distribution(ids).topk(3)
    for position, row in enumerate(response.topk_prompt_logprobs[1:]):
        assert row is not None
        assert [token for token, _ in row] == indices[position].tolist()
        np.testing.assert_allclose([lp for _, lp in row], values[position], atol=1e-4)


def test_a_prompt_in_many_chunks_is_one_prompt(base: tinker.SamplingClient) -> None:
    ids = batches.tokens(0, 10)
    chunks = [types.EncodedTextChunk(tokens=part) for part in (ids[:1], ids[1:4], ids[4:])]
    chunked = base.sample(types.ModelInput(chunks=chunks), 1, GREEDY).result()
    assert chunked.sequences[0].tokens == sample(base).sequences[0].tokens
