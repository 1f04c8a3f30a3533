"""Sampling clients of a fully fine-tuned model, beside those of its base model and of an adapter."""

from __future__ import annotations

import numpy as np
import tinker
from tinker import types

from tests.cluster.conftest import BASE_MODEL, Cluster
from tests.cluster.sampling.test_snapshots import GREEDY, PROMPTS, answers, train_a_step
from tests.reference import Reference


def test_every_version_of_a_full_model_answers_exactly_beside_base_and_adapter(
    cluster: Cluster, service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    train_a_step(training)
    full = service.create_lora_training_client(BASE_MODEL, rank=0).result()
    clients = [
        service.create_sampling_client(base_model=BASE_MODEL).result(),
        training.save_weights_and_get_sampling_client().result(),
    ]
    judges = [Reference(cluster.model_dir), Reference(cluster.model_dir, cluster.snapshot(training.model_id))]
    for seed in range(2):
        train_a_step(full, seed)
        clients.append(full.save_weights_and_get_sampling_client().result())
        judges.append(Reference(cluster.snapshot(full.model_id)))
    # The older version, the base model and the adapter after the newest version: a swap each.
    alone = [answers(client) for client in reversed(clients)][::-1]
    assert len({str(found) for found in alone}) == len(clients), "all answer differently"
    for judge, found in zip(judges, alone, strict=True):
        for prompt, (tokens, logprobs) in zip(PROMPTS, found, strict=True):
            assert tokens == judge.greedy(prompt.to_ints(), len(tokens))
            expected = judge.sequence_logprobs(prompt.to_ints() + tokens)[-len(tokens) :]
            np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    futures = [[client.sample(prompt, 2, GREEDY) for prompt in PROMPTS] for client in clients]
    train_a_step(full, 7)
    for row, found in zip(futures, alone, strict=True):
        for future, (tokens, logprobs) in zip(row, found, strict=True):
            for sequence in future.result().sequences:
                assert list(sequence.tokens) == tokens
                np.testing.assert_allclose(sequence.logprobs, logprobs, atol=1e-5)
    assert [answers(client) for client in clients] == alone


def test_an_older_full_version_answers_the_same_bits_after_its_sampler_was_killed(
    cluster: Cluster, service: tinker.ServiceClient
) -> None:
    full = service.create_lora_training_client(BASE_MODEL, rank=0).result()
    train_a_step(full)
    older = full.save_weights_and_get_sampling_client().result()
    before = answers(older)
    train_a_step(full, 1)
    newer = full.save_weights_and_get_sampling_client().result()
    answers(newer)
    for name in sorted(name for name in cluster.ready() if name.startswith("sampler")):
        cluster.kill_and_wait(name)
    assert answers(older) == before
    assert older.compute_logprobs(types.ModelInput.from_ints([1, 2, 3])).result()[0] is None
