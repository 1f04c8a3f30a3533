"""The worst requests there are, in numbers: nobody else notices, and nothing is left of them.

About 1,600 requests by default; REQUESTS=n sends at least n. SEED chooses other random values.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import httpx
import psutil
import pytest
import tinker
from tinker import types

from tests.abuse import socket_kinds
from tests.abuse.attack import End, Tally, attack
from tests.abuse.grpc_kinds import Rpc
from tests.abuse.http_kinds import Http
from tests.abuse.target import Target
from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, Cluster, start_cluster, stop_cluster

REQUESTS = int(os.environ.get("REQUESTS") or "1600")
SEED = int(os.environ.get("SEED", "0"))
MOST_GROWN_MIB = 512
_FIXED = 900
"""Attempts that are the same whatever the number of random ones."""
_RANDOM_KINDS = 74
_AT_ONCE = 16


@dataclass(frozen=True)
class Attack:
    """What became of an attack."""

    tally: Tally
    bystander: list[float]
    errors: list[str]
    grown_mib: float
    restarted: list[str]

    def table(self) -> str:
        slowest = sorted(self.bystander)
        rows = {
            "kinds": len(self.tally.kinds),
            "requests": self.tally.kinds.total(),
            **{str(end): self.tally.ends[end] for end in End},
            "heartbeats of a bystander": len(slowest),
            "of these failed": len(self.errors),
            "p99, ms": round(1000 * slowest[math.ceil(0.99 * len(slowest)) - 1]),
            "slowest, ms": round(1000 * slowest[-1]),
            "memory of the gateway grown by, MiB": round(self.grown_mib),
        }
        trouble = Counter(line[:160] for line in self.tally.trouble)
        lines = [f"| {name} | {value} |" for name, value in rows.items()]
        return "\n".join([*lines, *(f"{times} x {line}" for line, times in trouble.most_common(40))])


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Cluster]:
    running = start_cluster(tmp_path_factory.mktemp("abuse"), model_dir)
    yield running
    for client in running.clients:
        client.close("success")
    assert stop_cluster(running) == []


@pytest.fixture(scope="module")
def attack_of_all_kinds(attacked: Cluster) -> Attack:
    """Everything at once, beside a bystander."""
    _raise_file_limit()
    keys = attacked.data_dir / "api_key"
    keys.write_text(f"{keys.read_text().rstrip()}\ntml-mallory mallory\n")
    _wait_until_known(attacked, "tml-mallory")
    victim = attacked.service_client()
    model = victim.create_lora_training_client(BASE_MODEL, rank=8).result()
    session = victim.holder.get_session_id()
    bystander = subprocess.Popen(
        [sys.executable, "-m", "tests.abuse.bystander", attacked.base_url, attacked.api_key, session],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    target = asyncio.run(_enter(attacked, [model.model_id, session]))
    names = [service["id"] for service in attacked.status()["services"]]
    before = {name: attacked.pid(name) for name in names}
    gateway = psutil.Process(attacked.pid("gateway-0"))
    memory = gateway.memory_info().rss
    tally = asyncio.run(_attack(target))
    grown = (gateway.memory_info().rss - memory) / 2**20
    said = json.loads(bystander.communicate(timeout=240)[0])
    restarted = [name for name in names if attacked.pid(name) != before[name]]
    found = Attack(tally, said["seconds"], said["errors"], grown, restarted)
    print(f"\n{found.table()}")
    return found


def _wait_until_known(cluster: Cluster, key: str) -> None:
    """The gateway looks at its file of keys again and again."""
    deadline = time.monotonic() + 120
    while (
        httpx.get(f"{cluster.base_url}/api/v1/sessions", headers={"x-api-key": key}, timeout=60).status_code
        != 200
    ):
        assert time.monotonic() < deadline, "the gateway did not read its file of keys"
        time.sleep(0.1)


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))


async def _enter(cluster: Cluster, others: list[str]) -> Target:
    """The attacker opens an account: a session, a model, a sampling session."""
    headers = {"x-api-key": "tml-mallory"}
    async with httpx.AsyncClient(base_url=f"{cluster.base_url}/api/v1/", headers=headers, timeout=60) as http:
        made = await http.post("create_session", json={"tags": []})
        session = made.json()["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL}
        created = await http.post("create_model", json={**asked, "lora_config": {"rank": 4}})
        sampler = {"session_id": session, "sampling_session_seq_id": 1, "base_model": BASE_MODEL}
        sampling = await http.post("create_sampling_session", json=sampler)
        assert created.status_code == 200, created.text
    return Target(
        host="127.0.0.1",
        port=cluster.port,
        grpc_port=cluster.grpc_port,
        key="tml-mallory",
        session_id=session,
        model_id=f"{session}:train:0",
        sampling_session_id=sampling.json()["sampling_session_id"],
        others=others,
    )


async def _attack(target: Target) -> Tally:
    each = max(4, math.ceil((REQUESTS - _FIXED) / _RANDOM_KINDS))
    sockets = asyncio.create_task(attack(socket_kinds.attempts(target, 3), 200))
    options = [("grpc.max_metadata_size", 64 * 1024), ("grpc.max_send_message_length", -1)]
    limits = httpx.Limits(max_connections=_AT_ONCE)
    async with (
        httpx.AsyncClient(
            base_url=f"http://{target.host}:{target.port}", limits=limits, timeout=300
        ) as client,
        grpc.aio.insecure_channel(f"{target.host}:{target.grpc_port}", options) as channel,
    ):
        tallies = await asyncio.gather(
            attack(Http(target, client, SEED).attempts(each), _AT_ONCE),
            attack(Rpc(target, channel, SEED).attempts(each), _AT_ONCE),
            sockets,
        )
    total = Tally()
    for tally in tallies:
        total.kinds += tally.kinds
        total.ends += tally.ends
        total.trouble += tally.trouble
    return total


@pytest.mark.timeout(3600)
def test_hostile_requests_of_many_kinds_are_sent(attack_of_all_kinds: Attack) -> None:
    tally = attack_of_all_kinds.tally
    assert len(tally.kinds) >= 60
    assert tally.kinds.total() >= REQUESTS
    assert min(tally.kinds.values()) > 0


def test_none_is_a_fault_of_the_server_and_none_hangs(attack_of_all_kinds: Attack) -> None:
    assert attack_of_all_kinds.tally.trouble == []


def test_a_bystander_is_always_answered(attack_of_all_kinds: Attack) -> None:
    assert attack_of_all_kinds.errors == []
    assert len(attack_of_all_kinds.bystander) > 20


def test_no_process_restarts_and_the_gateway_keeps_no_memory_of_it(attack_of_all_kinds: Attack) -> None:
    assert attack_of_all_kinds.restarted == []
    assert attack_of_all_kinds.grown_mib < MOST_GROWN_MIB


def test_afterwards_everything_works_for_others(attack_of_all_kinds: Attack, attacked: Cluster) -> None:
    training = attacked.service_client().create_lora_training_client(BASE_MODEL, rank=8).result()
    training.forward_backward([batches.cross_entropy(0, 16)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result(timeout=240)
    sampler = training.save_weights_and_get_sampling_client()
    if not isinstance(sampler, tinker.SamplingClient):
        sampler = sampler.result()
    prompt = types.ModelInput.from_ints([1, 2, 3])
    answer = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4)).result(timeout=240)
    assert len(answer.sequences[0].tokens) > 0
