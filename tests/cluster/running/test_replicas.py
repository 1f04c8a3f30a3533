"""Sampler replicas that come, drain and die, and samples that nobody waits for any more."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import tinker
from tinker import APIFuture, types

from services.common.storage.data_dir import DataDir
from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, CONTEXT, Cluster

SHORT = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
LONG = types.SamplingParams(max_tokens=CONTEXT - 20, temperature=0.0, stop=[])
NEW, THIRD = "sampler-new", "sampler-third"
TURN = 128
"""Tokens that a turn of a conversation adds: whole blocks of the engine, which alone are cached."""
FIRST, ANSWER = 320, 48
"""Tokens of the first answer in it and of each other. The first are so long that all of them are under way at
once, which is what spreads conversations evenly."""
MANY, GROUP = 64, 16
"""Samples, and sequences of each, of which an engine takes a minute and more."""
PROMPTS = range(16)
"""Enough that both of two replicas are somebody's favourite."""


def prompt(seed: int) -> types.ModelInput:
    return types.ModelInput.from_ints(batches.tokens(seed, 10))


def until(holds: Callable[[], bool], what: str, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@contextmanager
def joining(cluster: Cluster, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A replica that joins the running cluster, with room for no snapshot but the one in use."""
    command = [
        *(sys.executable, "-m", "services.sampler", "--id", name, "--port", "0", "--device", "cpu"),
        *("--model", f"{BASE_MODEL}={cluster.model_dir}", "--data-dir", str(cluster.data_dir)),
        *("--dtype", "float32", "--snapshot-cache-gib", "0.0000001"),
        *("--identity", str(DataDir(cluster.data_dir).tls / "sampler")),
    ]

    def came() -> bool:
        return cluster.sampler_record(name) is not None

    url = (cluster.data_dir / "run" / "redis_url").read_text().strip()
    path = cluster.data_dir / "logs" / f"{name}.log"
    path.touch(mode=0o600)
    with path.open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, "TINSMITH_REDIS_URL": url, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: came() or process.poll() is not None, "the new replica did not come", 420)
        assert process.poll() is None, cluster.tail()
        yield process
    finally:
        process.kill()
        process.wait(30)


@pytest.fixture(scope="module")
def second_sampler(cluster: Cluster) -> Iterator[subprocess.Popen[bytes]]:
    """The last test that uses it ends it."""
    with joining(cluster, NEW) as process:
        yield process


@pytest.fixture
def third_sampler(cluster: Cluster, second_sampler: subprocess.Popen[bytes]) -> Iterator[None]:
    """Its end is in order, so that nobody goes on asking it."""
    with joining(cluster, THIRD) as process:
        yield
        process.terminate()
        assert process.wait(120) == 0


def known_to_be_accepted(client: tinker.SamplingClient) -> int:
    """How many of the client's samples the SDK has request ids of. It cannot cancel any other."""
    poller = client._futures_poller
    return 0 if poller is None else len(poller._events)


def test_given_up_samples_free_the_engine(cluster: Cluster, service: tinker.ServiceClient) -> None:
    def begin(client: tinker.SamplingClient) -> list[APIFuture[tinker.SampleResponse]]:
        samples = [client.sample(prompt(seed), GROUP, LONG) for seed in range(MANY)]
        # As many run as the engine takes at once; the others wait in the gateways.
        until(lambda: cluster.sampler_status("sampler-0").running >= 8, "the samples did not start")
        until(lambda: known_to_be_accepted(client) == MANY, "the SDK does not know that they did")
        return samples

    def check_freed(before: int, what: str) -> None:
        """The engine comes to rest, and has not done what was given up."""
        until(lambda: cluster.sampler_status("sampler-0").running == 0, f"{what} still run")
        assert generated() - before < MANY * GROUP * CONTEXT / 2, f"{what} ran on"

    def generated() -> int:
        return cluster.sampler_status("sampler-0").generated_tokens

    before = generated()
    for future in begin(service.create_sampling_client(base_model=BASE_MODEL).result()):
        future.future().cancel()
    check_freed(before, "cancelled samples")
    before = generated()
    gone = cluster.service_client()
    begin(gone.create_sampling_client(base_model=BASE_MODEL).result())
    cluster.clients.remove(gone)
    gone.close("interrupted").result()
    check_freed(before, "samples of a finished session")


def test_conversations_return_to_the_replica_that_has_their_beginning_and_load_stays_even(
    cluster: Cluster, service: tinker.ServiceClient, third_sampler: None
) -> None:
    def generated() -> Counter[str]:
        names = ("sampler-0", NEW, THIRD)
        return Counter({name: cluster.sampler_status(name).generated_tokens for name in names})

    client = service.create_sampling_client(base_model=BASE_MODEL).result()

    def answer(prompts: Sequence[list[int]], tokens: int) -> int:
        """Tokens of these prompts that were found in a cache, when each was answered with so many."""
        params = types.SamplingParams(max_tokens=tokens, temperature=0.0, stop=[])
        futures = [client.sample(types.ModelInput.from_ints(each), 1, params) for each in prompts]
        return sum(future.result().prompt_cache_hit_tokens or 0 for future in futures)

    said = [batches.tokens(100 + seed, TURN) for seed in range(24)]
    others = itertools.count(1000)

    def found_by_gateways() -> bool:
        # They look at the registry every few seconds. One that knows of it gives it a sixth.
        before = generated()
        answer([batches.tokens(next(others), TURN) for _ in said], FIRST)
        return (generated() - before)[THIRD] > len(said) * FIRST / 4

    until(found_by_gateways, "the third replica was not given its part")
    before = generated()
    found, turns = 0, (FIRST, ANSWER, ANSWER)
    for turn, tokens in enumerate(turns, 1):
        found += answer(said, tokens)
        said = [each + batches.tokens(1_000 * turn + seed, TURN) for seed, each in enumerate(said)]
    # With three replicas, and turns that go anywhere, about a third of it. A busy replica's conversation may
    # move.
    assert found >= 0.8 * len(said) * (TURN + 2 * TURN)
    work = generated() - before
    assert sum(work.values()) == len(said) * sum(turns)
    assert len(work) == 3 and max(work.values()) <= 1.5 * sum(work.values()) / 3, work


def test_replicas_come_drain_and_die_and_no_sample_is_lost(
    cluster: Cluster, training: tinker.TrainingClient, second_sampler: subprocess.Popen[bytes]
) -> None:
    # Broadcasts before it joined did not reach the new replica: it has those versions from the store.
    clients = []
    for seed in range(3):
        training.forward_backward([batches.cross_entropy(seed, 40)], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=5e-2)).result()
        clients.append(training.save_weights_and_get_sampling_client().result())
    expected = [starts(client) for client in clients]
    assert len({str(found) for found in expected}) == 3, "every version answers differently"

    # Draining: what runs on the old replica ends there, and new requests go to the new one.
    running = [clients[0].sample(prompt(seed), 1, LONG) for seed in PROMPTS]
    until(lambda: cluster.sampler_status("sampler-0").running > 0, "nothing runs on the old replica")
    before = cluster.pid("sampler-0")
    os.kill(before, signal.SIGTERM)
    check(running, expected[0])
    until(lambda: not _alive(before), "the drained replica did not end")
    assert [starts(client) for client in clients] == expected
    assert len(cluster.sampler_status(NEW).resident) == 1, "the new replica holds one snapshot at a time"

    # The old one is started again, and what runs on the new one when it dies is run anew.
    until(
        lambda: cluster.sampler_record("sampler-0") is not None, "the drained replica did not come back", 300
    )
    running = [clients[0].sample(prompt(seed), 1, LONG) for seed in PROMPTS]
    until(lambda: cluster.sampler_status(NEW).running > 0, "nothing runs on the new replica")
    second_sampler.kill()
    check(running, expected[0])


def starts(client: tinker.SamplingClient) -> list[list[int]]:
    """The first greedy tokens after each prompt."""
    futures = [client.sample(prompt(seed), 1, SHORT) for seed in PROMPTS]
    return [list(future.result().sequences[0].tokens) for future in futures]


def check(running: Sequence[APIFuture[tinker.SampleResponse]], expected: list[list[int]]) -> None:
    """Long generations came to their end, and began as the short ones of the same weights."""
    for future, start in zip(running, expected, strict=True):
        sequence = future.result().sequences[0]
        assert (sequence.stop_reason, len(sequence.tokens)) == ("length", LONG.max_tokens)
        assert list(sequence.tokens)[: len(start)] == start


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
