"""One round: a cluster, clients that never pause, one fault after another, and the judgement."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import tinker

from services.common.state import keys
from tests.robustness import checker, oracle
from tests.robustness.checker import Stored, Verdict
from tests.robustness.faults import OUT_OF_MEMORY, Fault
from tests.robustness.report import Report
from tests.robustness.workload import Client, Connect, Newcomer, Reader, Trainee
from tests.robustness.world import World

RECOVERY_TIMEOUT_S = 420.0
_POLL_S = 0.02
_BETWEEN_S = 0.3
_FIRST_NEWCOMER = 10
_MOST_NEWCOMERS = 4
_NEWCOMER_EVERY_S = 4.0
"""The last one of a fault starts when the record of what was killed has run out."""


def run_round(
    directory: Path,
    model_dir: Path,
    groups: Sequence[Sequence[Fault]],
    trainer_ranks: int,
    seed: int,
    until: float,
) -> Report:
    """Injects the faults in turn; what came of it.

    Args:
        groups: those of one are injected without waiting for recovery; before the next one all clients
            have recovered.
        until: monotonic time after which no further group is begun.
    """
    chance = random.Random(seed)
    report = Report()
    world = World(directory, model_dir, trainer_ranks)
    newcomers = Newcomers(partial(_connect, world))
    try:
        clients = _start_clients(world, trainer_ranks)
        _wait_until_served(clients, 0.0)
        for group in groups:
            if time.monotonic() > until:
                break
            with newcomers.starting():
                _inject(world, clients, group, chance, report)
        for client in clients:
            client.end()
        for client in clients:
            client.join(600)
        verdict = _judge(world, [*clients, *newcomers.all], directory)
        verdict += checker.judge_refusals(verdict.refused, report.times(OUT_OF_MEMORY))
    finally:
        left = world.close()
    assert left == [], f"processes left behind: {left}"
    report.requests, report.lost, report.wrong = verdict.requests, verdict.lost, verdict.wrong
    return report


def _start_clients(world: World, trainer_ranks: int) -> list[Client]:
    # The sum of one rank's gradient and zeros is exact: with one batch a step, ranks cannot be told apart.
    sizes = (2, 2) if trainer_ranks == 1 else (1, 1)
    connect = partial(_connect, world)
    clients: list[Client] = [Trainee(connect, 0, *sizes), Trainee(connect, 1, *sizes), Reader(connect, 2)]
    for client in clients:
        client.start()
    return clients


def _connect(world: World) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=world.url, api_key=world.cluster.api_key)


class Newcomers:
    """Scripts that start while faults happen, and must work like any other.

    Attributes:
        all: every one so far.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self.all: list[Newcomer] = []

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Has one start at once, and others every few seconds until all old clients are served again; returns
        when the new ones are too."""
        before, recovered = len(self.all), threading.Event()
        starter = threading.Thread(target=self._start, args=(recovered,), name="newcomers", daemon=True)
        starter.start()
        try:
            yield
        finally:
            recovered.set()
            starter.join()
        deadline = time.monotonic() + RECOVERY_TIMEOUT_S
        for client in self.all[before:]:
            client.join(max(0.0, deadline - time.monotonic()))
        failed = sum(client.failure is not None or client.is_alive() for client in self.all[before:])
        print(f"           {len(self.all) - before} new clients, {failed} failed", flush=True)

    def _start(self, recovered: threading.Event) -> None:
        for _ in range(_MOST_NEWCOMERS):
            self.all.append(Newcomer(self._connect, _FIRST_NEWCOMER + len(self.all)))
            self.all[-1].start()
            if recovered.wait(_NEWCOMER_EVERY_S):
                return


def _inject(
    world: World, clients: Sequence[Client], group: Sequence[Fault], chance: random.Random, report: Report
) -> None:
    injected: list[tuple[Fault, float, float]] = []
    for fault in group:
        world.injected_at = time.monotonic()
        fault.inject(world, chance)
        injected.append((fault, world.injected_at, time.monotonic()))
        time.sleep(_BETWEEN_S)
    for fault, began, happened in injected:
        served, last = _wait_until_served(clients, happened)
        report.note(fault.name, served - began, amid=len(group) > 1)
        print(f"  {served - began:6.1f} s  {fault.name} ({last})", flush=True)
    world.redis.sync_always(False)


def _wait_until_served(clients: Sequence[Client], moment: float) -> tuple[float, str]:
    """Waits until every client has the result of a request that it made after a moment; when the last had."""
    deadline = time.monotonic() + RECOVERY_TIMEOUT_S
    while True:
        for client in clients:
            if client.failure is not None:
                raise AssertionError(f"{client.name} ended: {client.failure!r}") from client.failure
        served = {client.name: client.history.served_after(moment) for client in clients}
        times = [(at, name) for name, at in served.items() if at is not None]
        if len(times) == len(clients):
            return max(times)
        if time.monotonic() > deadline:
            waiting = "; ".join(client.history.pending() for client in clients if not served[client.name])
            raise AssertionError(f"no result in {RECOVERY_TIMEOUT_S:.0f} s after a fault: {waiting}")
        time.sleep(_POLL_S)


def _judge(world: World, clients: Sequence[Client], directory: Path) -> Verdict:
    threads = int(_environment(world.wait_ready("trainer-0").pid)["OMP_NUM_THREADS"])
    expected = oracle.expected(
        world.cluster.model_dir, [client.history.training for client in clients], threads, directory
    )
    verdict = Verdict()
    for client, wanted in zip(clients, expected, strict=True):
        model_id = client.history.model_id
        verdict += checker.judge(
            client.history, wanted, _stored(world, model_id) if model_id else None, world.trainer_ranks
        )
        if client.failure is not None or client.is_alive():
            verdict.lost.append(f"{client.name} did not end by itself: {client.failure!r}")
    return verdict + checker.judge_samples(entry for client in clients for entry in client.history.samples)


def _stored(world: World, model_id: str) -> Stored:
    snapshots = world.cluster.data_dir / "snapshots" / model_id
    stored = snapshots.iterdir() if snapshots.is_dir() else ()
    weights = {int(path.name): oracle.stored_digest(path) for path in stored if path.name.isdigit()}
    futures = {}
    prefix = keys.future(model_id, 0)[:-1]
    for name in world.redis.client.scan_iter(f"{prefix}*", count=1000):
        state = world.redis.client.hget(name, "state")
        futures[int(name.decode().removeprefix(prefix))] = (state or b"gone").decode()
    return Stored(weights, futures)


def _environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(pair.decode(errors="replace").split("=", 1) for pair in pairs if b"=" in pair)
