"""Sessions come and go, and leave nothing behind.

A minute of them by default; MINUTES=n goes on for longer. Each session trains a model, saves its state for a
while, samples from a snapshot of it, and ends; some are never ended by their client. Then the cluster is left
alone until what it keeps for a while has had its time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil
import pytest
import redis
import tinker
from tinker import types

from services.common.state import keys
from services.common.storage.data_dir import DataDir
from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, Cluster, start_cluster, stop_cluster

MINUTES = float(os.environ.get("MINUTES") or "1")
# Everything that is kept for minutes, days or weeks is kept for seconds.
SHORT = {
    "TINSMITH_SESSION_PARK_AFTER": "10",
    "TINSMITH_SESSION_END_AFTER": "20",
    "TINSMITH_SNAPSHOT_GRACE": "5",
    "TINSMITH_FORGET_AFTER": "5",
    "TINSMITH_RESULT_LIFE": "30",
    "TINSMITH_FETCHED_RESULT_LIFE": "5",
    # Adapters that a sampler keeps in memory until it needs the room: soon full here.
    "TINSMITH_SNAPSHOT_CACHE_GIB": "0.02",
}
SETTLE_S = 240.0
ONCE = {name for name in vars(keys).values() if isinstance(name, str)} | {
    name(kind) for name in (keys.services, keys.services_seen) for kind in ("gateway", "trainer", "sampler")
}
"""Keys of the cluster, of which some are not there while they are empty: none is of a session."""
MOST_GROWN_MIB = 64
"""Of one process, whatever the number of sessions."""


@dataclass(frozen=True)
class Kept:
    """What a cluster holds.

    Attributes:
        keys: of Redis, by name, that do not go by themselves.
        redis_mib: memory of Redis, without that of keys that do: what was done is written down for a month.
        files: without those of deleted checkpoints, which stay an hour for whoever reads them.
    """

    keys: frozenset[str]
    redis_mib: float
    files: int
    memory_mib: dict[str, float]

    def table(self, after: Kept) -> str:
        rows: list[tuple[str, float, float]] = [
            ("Redis keys", len(self.keys), len(after.keys)),
            ("files", self.files, after.files),
        ]
        rows.append(("Redis, MiB", round(self.redis_mib, 1), round(after.redis_mib, 1)))
        rows += [
            (f"{name}, MiB", round(size), round(after.memory_mib.get(name, 0)))
            for name, size in self.memory_mib.items()
        ]
        return "\n".join(f"| {name} | {before} | {now} |" for name, before, now in rows)


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Cluster]:
    with mock.patch.dict(os.environ, SHORT):
        running = start_cluster(tmp_path_factory.mktemp("soak"), model_dir)
    yield running
    assert stop_cluster(running) == []


def kept(cluster: Cluster) -> Kept:
    """What the cluster holds now."""
    url = DataDir(cluster.data_dir).redis_url.read_text().strip()
    with redis.Redis.from_url(url) as client:
        due = set(client.zrange(keys.CHECKPOINTS_DUE, 0, -1))
    files, deleted = 0, set[str]()
    for name in ("snapshots", "state", "checkpoints", "staging"):
        # Unlike Path.rglob, walking passes over what goes away meanwhile.
        for directory, inner, names in os.walk(cluster.data_dir / name):
            if Path(directory).name.startswith(".deleted-"):
                deleted.update([directory] if inner or names else [])
            else:
                files += len(names)
    with redis.Redis.from_url(url) as client:
        found = list(client.scan_iter(count=1000))
        pipeline = client.pipeline()
        for key in found:
            pipeline.pttl(key)
            pipeline.memory_usage(key, samples=0)
        told = pipeline.execute()
        lives = list(zip(told[::2], told[1::2], strict=True))
        kept_keys = frozenset(
            name.decode() for name, (left, _) in zip(found, lives, strict=True) if left == -1
        )
        used = client.info("memory")["used_memory"] - sum(size or 0 for left, size in lives if left > 0)
        # Some came, and some went, while files were counted.
        due.update(client.zrange(keys.CHECKPOINTS_DUE, 0, -1))
    assert len(deleted) <= len(due), "what was deleted is due"
    memory = {}
    for service in cluster.status()["services"]:
        process = psutil.Process(cluster.pid(service["id"]))
        whole = [process, *process.children(recursive=True)]
        memory[service["id"]] = sum(one.memory_info().rss for one in whole) / 2**20
    return Kept(kept_keys, used / 2**20, files, memory)


def live(cluster: Cluster, number: int) -> None:
    """One session from its begin to its end."""
    service = tinker.ServiceClient(base_url=cluster.base_url, api_key=cluster.api_key)
    training = service.create_lora_training_client(BASE_MODEL, rank=4).result(timeout=120)
    for step in range(2):
        training.forward_backward([batches.cross_entropy(number + step, 16)], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result(timeout=120)
    if number % 2:
        saved = training.save_state("a", ttl_seconds=3600).result(timeout=120)
        service.create_rest_client().delete_checkpoint_from_tinker_path(saved.path).result(timeout=120)
    sampler = training.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints([1, 2, 3])
    sampler.sample(prompt, 2, types.SamplingParams(max_tokens=4)).result(timeout=120)
    # Every third client goes away without a word.
    if number % 3:
        service.close("success")
    else:
        service.holder.close()


@pytest.mark.timeout(7200)
def test_sessions_that_come_and_go_leave_nothing_behind(soaked: Cluster) -> None:
    # What is made once and kept: caches, pools, compiled paths.
    for number in range(4):
        live(soaked, number)
    before = settled(soaked)
    started, number = time.monotonic(), 0
    while time.monotonic() - started < 60 * MINUTES:
        live(soaked, number)
        number += 1
    after = settled(soaked)
    print(f"\n{number} sessions\n| | before | after |\n|---|---:|---:|\n{before.table(after)}")
    assert number > 0
    assert after.keys - before.keys <= ONCE
    assert after.files <= before.files
    assert after.redis_mib <= before.redis_mib + 2
    for name, size in after.memory_mib.items():
        assert size <= before.memory_mib[name] + MOST_GROWN_MIB, name


def settled(cluster: Cluster) -> Kept:
    """What is left when nothing goes any more."""
    deadline = time.monotonic() + SETTLE_S
    last, since = kept(cluster), time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(5)
        now = kept(cluster)
        if (now.keys, now.files) != (last.keys, last.files):
            last, since = now, time.monotonic()
        elif time.monotonic() - since > 40:
            break
    return kept(cluster)
