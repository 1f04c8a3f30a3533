"""A process that dies is restarted, and clients go on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis
import tinker
from tinker import types

from services.common.process.faults import armed
from services.common.state import keys
from tests.announced import find
from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, CONTEXT, Cluster
from tinsmith.v1 import results_pb2

ADAM = types.AdamParams(learning_rate=1e-2)
GREEDY = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
PROMPT = types.ModelInput.from_ints(batches.tokens(0, 10))


def train(client: tinker.TrainingClient, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        future = client.forward_backward([batches.cross_entropy(seed % 2, 20)], "cross_entropy")
        step = client.optim_step(ADAM)
        losses.append(future.result().metrics["loss:sum"])
        step.result()
    return losses


def until_durable(cluster: Cluster, client: tinker.TrainingClient) -> None:
    """Returns when a replay of the model would repeat nothing."""
    with redis.Redis.from_url((cluster.data_dir / "run" / "redis_url").read_text().strip()) as redis_client:
        meta = keys.journal_meta(str(client.model_id))
        while len(set(redis_client.hmget(meta, ["durable", "through"]))) > 1:
            time.sleep(0.1)


def test_a_killed_gateway_is_not_noticed(cluster: Cluster, training: tinker.TrainingClient) -> None:
    undisturbed = train(training, range(2))
    cluster.kill_and_wait("gateway-1")
    assert train(training, range(2, 4))[0] < undisturbed[0]


def test_two_hundred_waiting_futures_resolve_through_the_other_gateway(
    cluster: Cluster, training: tinker.TrainingClient, service: tinker.ServiceClient
) -> None:
    sampling = service.create_sampling_client(base_model=BASE_MODEL).result()
    expected = sampling.sample(PROMPT, 1, GREEDY).result().sequences[0].tokens
    data = [batches.cross_entropy(0, 200)]
    loss = training.forward(data, "cross_entropy").result().metrics["loss:sum"]
    forwards = [training.forward(data, "cross_entropy") for _ in range(100)]
    samples = [sampling.sample(PROMPT, 1, GREEDY) for _ in range(100)]
    with redis.Redis.from_url((cluster.data_dir / "run" / "redis_url").read_text().strip()) as client:
        holder = client.get(keys.lease(str(training.model_id)))
    assert isinstance(holder, bytes)
    leader = holder.decode().partition("/")[0]
    killed = cluster.pid(leader)
    # Whatever the dead one had to do is the other's: nobody restarts it.
    cluster.process.send_signal(signal.SIGSTOP)
    try:
        os.kill(killed, signal.SIGKILL)
        assert sum(not future.future().done() for future in [*forwards, *samples]) > 100
        assert {future.result(240).metrics["loss:sum"] for future in forwards} == {loss}
        answers = [future.result(240).sequences[0].tokens for future in samples]
        assert answers == [expected] * 100
        assert cluster.pid(leader) == killed
    finally:
        cluster.process.send_signal(signal.SIGCONT)
    cluster.wait_until_back(leader, killed)


def test_a_forward_that_was_told_and_not_written_when_its_gateway_died_comes_to_the_same(
    cluster: Cluster, training: tinker.TrainingClient
) -> None:
    data, model_id = [batches.cross_entropy(0, 20)], str(training.model_id)
    expected = training.forward(data, "cross_entropy").result()
    with redis.Redis.from_url((cluster.data_dir / "run" / "redis_url").read_text().strip()) as client:
        waiting: list[bytes] = []
        # A gateway may die before the answer has left it: then its client has it from another one.
        while not waiting:
            holder = client.get(keys.lease(model_id))
            assert isinstance(holder, bytes)
            leader = holder.decode().partition("/")[0]
            running = cluster.pid(leader)
            armed.arm(cluster.failpoints, "gateway.after_tell", "kill:1")
            told = training.forward(data, "cross_entropy").result()
            assert told.metrics == expected.metrics
            waiting = client.zrange(keys.journal_pending(model_id), 0, -1)
            cluster.wait_until_back(leader, running)
        while client.hget(future := keys.future(model_id, int(waiting[0])), "state") != b"done":
            time.sleep(0.1)
        written = results_pb2.OperationResult.FromString(client.hget(future, "result"))
    assert dict(written.forward_backward.metrics) == told.metrics
    logprobs = told.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert written.forward_backward.outputs["logprobs"].data == logprobs.tobytes()
    assert len(train(training, range(1))) == 1


def test_training_goes_on_bit_for_bit_after_the_trainer_was_killed(
    cluster: Cluster, service: tinker.ServiceClient
) -> None:
    undisturbed = train(service.create_lora_training_client(BASE_MODEL, rank=8, seed=11).result(), range(6))
    client = service.create_lora_training_client(BASE_MODEL, rank=8, seed=11).result()
    losses = train(client, range(3))
    pending = client.forward_backward([batches.cross_entropy(1, 20)], "cross_entropy")
    pending.result()
    cluster.kill_and_wait("trainer-0")
    client.optim_step(ADAM).result()
    losses += [pending.result().metrics["loss:sum"], *train(client, range(4, 6))]
    assert losses == undisturbed


def test_a_sampling_client_answers_the_same_after_the_sampler_was_killed(
    cluster: Cluster, training: tinker.TrainingClient
) -> None:
    train(training, range(2))
    client = training.save_weights_and_get_sampling_client().result()
    seeded = types.SamplingParams(max_tokens=20, seed=2**64 - 1, stop=[])

    def answers() -> list[list[int]]:
        drawn = client.sample(PROMPT, 4, seeded, prompt_alt_tokens_k=3).result()
        assert drawn.prompt_alt_tokens is not None
        greedy = client.sample(PROMPT, 1, GREEDY).result().sequences
        return [list(s.tokens) for s in (*greedy, *drawn.sequences)] + drawn.prompt_alt_tokens.tokens.tolist()

    before = answers()
    cluster.kill_and_wait("sampler-0")
    assert answers() == before
    train(training, range(2))
    newer = training.save_weights_and_get_sampling_client().result()
    assert newer.sample(PROMPT, 1, GREEDY).result().sequences[0].stop_reason == "length"


def generated(cluster: Cluster) -> int:
    """Tokens that the sampler has generated since it started."""
    return cluster.sampler_status("sampler-0").generated_tokens


def test_a_rolling_restart_of_gateways_generates_nothing_twice(
    cluster: Cluster, service: tinker.ServiceClient
) -> None:
    client = service.create_sampling_client(base_model=BASE_MODEL).result()
    long = types.SamplingParams(max_tokens=CONTEXT - 20, temperature=1.0, stop=[])
    before = generated(cluster)
    prompts = [types.ModelInput.from_ints(batches.tokens(seed, 10)) for seed in range(24)]
    samples = [client.sample(prompt, 8, long) for prompt in prompts]
    while generated(cluster) - before < 1000:
        time.sleep(0.05)
    for name in ("gateway-0", "gateway-1"):
        running = cluster.pid(name)
        os.kill(running, signal.SIGTERM)
        if name == "gateway-0":
            assert sum(not sample.future().done() for sample in samples) > 8, "there is little to hand over"
        cluster.wait_until_back(name, running)
    answers = [sequence.tokens for sample in samples for sequence in sample.result(300).sequences]
    assert len(answers) == 24 * 8
    assert generated(cluster) - before == sum(map(len, answers))


def test_a_request_that_crashes_the_trainer_three_times_fails_and_the_model_goes_on_without_it(
    cluster: Cluster, training: tinker.TrainingClient
) -> None:
    train(training, range(2))
    until_durable(cluster, training)
    neighbour = cluster.service_client().create_lora_training_client(BASE_MODEL, rank=4, seed=5).result()
    armed.arm(cluster.failpoints, "trainer.before_step", "kill*3")
    poison = training.optim_step(ADAM)
    while armed.armed(cluster.failpoints):
        # Somebody else's requests are under way each time, and are not blamed.
        neighbour.forward_backward([batches.cross_entropy(3, 20)], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="died 3 times") as failure:
        poison.result()
    assert failure.value.category == tinker.types.RequestErrorCategory.Server
    assert neighbour.optim_step(ADAM).result().metrics is not None
    assert len(train(training, range(2))) == 2


@contextmanager
def away(cluster: Cluster, kind: str, name: str) -> Iterator[None]:
    """A service that was killed and whose record is gone. Until the end nobody restarts it."""
    killed = cluster.pid(name)
    cluster.process.send_signal(signal.SIGSTOP)
    try:
        os.kill(killed, signal.SIGKILL)
        with redis.Redis.from_url((cluster.data_dir / "run" / "redis_url").read_text().strip()) as client:
            while find(client, kind, name) is not None:
                time.sleep(0.2)
        yield
    finally:
        cluster.process.send_signal(signal.SIGCONT)
        cluster.wait_until_back(name, killed)


def served(cluster: Cluster) -> list[tuple[str | None, bool | None, bool | None]]:
    models = cluster.rest_client().get_server_capabilities().result().supported_models
    return [(model.model_name, model.trainable, model.sampleable) for model in models]


def test_sampling_clients_start_at_once_after_the_only_sampler_was_killed_and_while_it_is_away(
    cluster: Cluster, service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    path = training.save_weights_for_sampler("away").result().path
    expected = service.create_sampling_client(base_model=BASE_MODEL).result().sample(PROMPT, 1, GREEDY)
    tokens = expected.result().sequences[0].tokens
    os.kill(cluster.pid("sampler-0"), signal.SIGKILL)
    at_once = cluster.service_client().create_sampling_client(base_model=BASE_MODEL).result()
    assert at_once.sample(PROMPT, 1, GREEDY).result().sequences[0].tokens == tokens
    with away(cluster, "sampler", "sampler-0"):
        starts = [
            cluster.service_client().create_sampling_client(base_model=BASE_MODEL).result(120),
            cluster.service_client().create_sampling_client(model_path=path).result(120),
        ]
        samples = [client.sample(PROMPT, 1, GREEDY) for client in starts]
        assert served(cluster) == [(BASE_MODEL, True, True)]
        assert not any(sample.future().done() for sample in samples)
    # A fresh adapter changes nothing.
    assert [sample.result().sequences[0].tokens for sample in samples] == [tokens, tokens]


def test_training_clients_start_at_once_after_the_only_trainer_was_killed_and_while_it_is_away(
    cluster: Cluster, service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    undisturbed = train(training, range(2))
    path = training.save_state("away").result().path
    next_loss = train(training, range(2, 3))
    os.kill(cluster.pid("trainer-0"), signal.SIGKILL)
    at_once = cluster.service_client().create_lora_training_client(BASE_MODEL, rank=8, seed=7).result()
    assert train(at_once, range(2)) == undisturbed
    with away(cluster, "trainer", "trainer-0"):
        fresh = cluster.service_client().create_lora_training_client(BASE_MODEL, rank=8, seed=7)
        loaded = cluster.service_client().create_training_client_from_state_with_optimizer(path)
        assert served(cluster) == [(BASE_MODEL, True, True)]
        time.sleep(2)
        assert not fresh.future().done() and not loaded.future().done()
    assert train(fresh.result(), range(2)) == undisturbed
    assert train(loaded.result(), range(2, 3)) == next_loss
