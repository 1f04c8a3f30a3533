"""What a sampling client promises: it answers from its version for ever, whatever happens around it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import tinker
from tinker import types

from services.common.storage.data_dir import DataDir
from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, CONTEXT, Cluster

Answer = list[tuple[list[int], list[float]]]

GREEDY = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
PROMPTS = [types.ModelInput.from_ints(batches.tokens(seed, 10)) for seed in range(3)]


def answers(client: tinker.SamplingClient, prompts: Sequence[types.ModelInput] = PROMPTS) -> Answer:
    """Greedy tokens and log-probabilities, one request after the other."""
    found = [client.sample(prompt, 1, GREEDY).result().sequences[0] for prompt in prompts]
    return [(list(sequence.tokens), list(sequence.logprobs or [])) for sequence in found]


def train_a_step(training: tinker.TrainingClient, seed: int = 0) -> None:
    training.forward_backward([batches.cross_entropy(seed, 40)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=5e-2)).result()


def test_more_versions_than_slots_answer_bit_for_bit_while_their_model_trains(
    training: tinker.TrainingClient,
) -> None:
    clients, first = [], []
    for seed in range(10):
        train_a_step(training, seed)
        clients.append(training.save_weights_and_get_sampling_client().result())
        first.append(answers(clients[-1]))
    stop = threading.Event()
    steps = 0

    def keep_training() -> None:
        nonlocal steps
        while not stop.is_set():
            train_a_step(training, steps)
            training.save_weights_and_get_sampling_client().result()
            steps += 1

    trainer = threading.Thread(target=keep_training)
    trainer.start()
    try:
        while steps < 2:
            for client, expected in zip(clients, first, strict=True):
                assert answers(client) == expected
    finally:
        stop.set()
        trainer.join()
    assert len({str(found) for found in first}) == 10, "every version answers differently"
    # All at once they share steps of the engine, whose batches may round differently.
    futures = [[client.sample(prompt, 1, GREEDY) for prompt in PROMPTS] for client in clients]
    for row, expected in zip(futures, first, strict=True):
        for future, (tokens, logprobs) in zip(row, expected, strict=True):
            sequence = future.result().sequences[0]
            assert list(sequence.tokens) == tokens
            np.testing.assert_allclose(sequence.logprobs, logprobs, atol=1e-5, rtol=1e-5)


def test_a_named_version_answers_after_its_model_is_gone(
    cluster: Cluster, service: tinker.ServiceClient
) -> None:
    owner = cluster.service_client()
    training = owner.create_lora_training_client(BASE_MODEL, rank=8, seed=5).result()
    train_a_step(training)
    path = training.save_weights_for_sampler("kept").result().path
    client = service.create_sampling_client(model_path=path).result()
    before = answers(client)
    state = DataDir(cluster.data_dir).state(training.model_id)
    assert state.exists()
    cluster.clients.remove(owner)
    owner.close("success").result()
    deadline = time.monotonic() + 240
    while state.exists():
        assert time.monotonic() < deadline, "the model of a finished session was not taken down"
        time.sleep(0.2)
    assert answers(client) == before
    assert answers(service.create_sampling_client(model_path=path).result()) == before


def test_publishing_does_not_touch_another_tenants_running_generation(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    train_a_step(training)
    tenant = training.save_weights_and_get_sampling_client().result()
    other = service.create_lora_training_client(BASE_MODEL, rank=4, seed=9).result()
    prompt = types.ModelInput.from_ints(batches.tokens(1, 10))
    long = types.SamplingParams(max_tokens=CONTEXT - 20, temperature=0.0, stop=[])
    undisturbed = tenant.sample(prompt, 1, long).result().sequences[0]
    during = 0
    while not during:
        running = tenant.sample(prompt, 1, long)
        while not running.future().done():
            other.save_weights_and_get_sampling_client().result()
            during += not running.future().done()
        sequence = running.result().sequences[0]
        assert sequence.tokens == undisturbed.tokens
        assert sequence.logprobs == undisturbed.logprobs


def test_inflight_clients_move_with_their_model_and_snapshots_do_not(training: tinker.TrainingClient) -> None:
    prompt = [types.ModelInput.from_ints(batches.tokens(4, 200))]
    train_a_step(training)
    first = training.save_weights_and_get_sampling_client(kind="inflight").result()
    snapshot = training.save_weights_and_get_sampling_client().result()
    old = answers(first, prompt)
    assert answers(snapshot, prompt) == old
    train_a_step(training, 1)
    newer = training.save_weights_and_get_sampling_client().result()
    assert answers(first, prompt)[0][0] == old[0][0], "a snapshot save moves nobody"
    second = training.save_weights_and_get_sampling_client(kind="inflight").result()
    moved = first.sample(prompt[0], 1, GREEDY).result()
    fresh = second.sample(prompt[0], 1, GREEDY).result()
    again = second.sample(prompt[0], 1, GREEDY).result()
    assert (moved.prompt_cache_hit_tokens, fresh.prompt_cache_hit_tokens) == (0, 0)
    assert again.prompt_cache_hit_tokens > 0
    expected = answers(newer, prompt)[0]
    assert expected[0] != old[0][0]
    for response in (moved, fresh):
        assert list(response.sequences[0].tokens) == expected[0]
        np.testing.assert_allclose(response.sequences[0].logprobs, expected[1], atol=1e-5)
    assert answers(snapshot, prompt)[0][0] == old[0][0]
