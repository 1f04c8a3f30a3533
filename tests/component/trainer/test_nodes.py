"""A trainer whose ranks are of several agents, as on several machines: two of them on this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from services.common.process.process import REFUSED
from services.common.worlds.nodes import Nodes
from services.launcher.machine import free_port
from services.trainer.world.launch import addresses, node_command
from tests.component.trainer.receiver import Receiver
from tests.component.trainer.world import (
    TrainedModel,
    TrainerWorld,
    batch,
)
from tinsmith.internal.v1 import operation_pb2

pytestmark = pytest.mark.heavy

LOOPBACK = "127.0.0.1"
WAIT_S = 420.0
FLAGS = ("--micro-batch-tokens", "64")


class Follower:
    """Node 1 of two, with one rank. It is never told of Redis."""

    def __init__(
        self,
        nodes: Nodes,
        model_dir: Path,
        data_dir: Path,
        stage: int,
        *flags: str,
        begin: Sequence[str] = (),
    ) -> None:
        args = ["--model", f"tinsmith/tiny={model_dir}", "--device", "cpu", "--data-dir", str(data_dir)]
        args += ["--zero-stage", str(stage), *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("TINSMITH_REDIS_URL", None)
        self.process = subprocess.Popen([*begin, *node_command(nodes, 1, args)], env=environment)

    def processes(self) -> list[psutil.Process]:
        agent = psutil.Process(self.process.pid)
        return [agent, *agent.children(recursive=True)]

    def kill(self) -> None:
        if self.process.poll() is None:
            for process in self.processes():
                process.kill()
        self.process.wait(30)


class HeadWorld(TrainerWorld):
    """Node 0 of two, with one rank; the other node is started before or after."""

    def __init__(self, nodes: Nodes, *arguments: Any) -> None:
        self.nodes = nodes
        super().__init__(*arguments)

    def _start(self, args: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(node_command(self.nodes, 1, args), env=environment)


def on_loopback(port: int) -> Nodes:
    """The head of two."""
    return Nodes(2, 0, LOOPBACK, port, wait_s=WAIT_S)


def played(model: TrainedModel) -> list[Any]:
    """Passes and steps, and what they came to."""
    model.create()
    found: list[Any] = []
    for seed in range(3):
        found.append(model.forward_backward(batch(seed)))
        found.append(model.step())
    return [*found, model.forward(batch(7))]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        if one.HasField("optim_step"):
            assert one.optim_step.metrics.keys() == other.optim_step.metrics.keys()
            for name, value in one.optim_step.metrics.items():
                assert value == pytest.approx(other.optim_step.metrics[name], rel=1e-5), name
    for a, b in zip(found[-1], expected[-1], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_two_nodes_train_as_one_machine_does_and_come_back_when_a_follower_dies(
    redis_url: str, model_dir: Path, tmp_path: Path
) -> None:
    stage = 3
    alone = TrainerWorld(redis_url, model_dir, tmp_path / "alone", 2, stage, *FLAGS)
    try:
        expected = played(TrainedModel(alone))
    finally:
        alone.kill()

    nodes, data, more = on_loopback(free_port()), batch(14), batch(15, rows=3)
    follower = Follower(replace(nodes, rank=1), model_dir, tmp_path / "nodes", stage, *FLAGS)
    head: HeadWorld | None = None
    try:
        head = HeadWorld(nodes, redis_url, model_dir, tmp_path / "nodes", 2, stage, *FLAGS)
        assert head.record.world_size == 2
        assert_equal(played(TrainedModel(head)), expected)
        processes = [*head.processes(), *follower.processes()]
        assert len(processes) == 4
        assert_on_loopback(processes)

        model = TrainedModel(head)
        model.create()
        results = [model.forward_backward(data), model.step()]
        head.wait_durable(model.model_id, 2)
        # The gradient of this is in no snapshot.
        results.append(model.forward_backward(more))
        # A follower's ranks write no pid files into the head's directory.
        ranks = [psutil.Process(head.rank_pid(0)), follower.processes()[1]]
        assert not (tmp_path / "nodes" / "run" / "trainer-1.pid").exists()
        ranks[1].kill()
        assert head.process.wait(120) == 1
        assert psutil.wait_procs(ranks, timeout=60)[1] == []
        assert follower.process.poll() is None

        # Its supervisor starts the head again; the follower comes by itself.
        head = HeadWorld(nodes, redis_url, model_dir, tmp_path / "nodes", 2, stage, *FLAGS)
        assert head.restore(model.model_id) == 2
        assert head.send(model.sent[3]).result() == results[2]
        model.world = head
        twin = TrainedModel(head)
        twin.create()
        twin.forward_backward(data)
        twin.step()
        twin.forward_backward(more)
        assert model.step() == twin.step()

        # A head that is killed outright takes its rank with it, which dismisses nobody.
        ranks = [process for process in head.processes() if process.pid != head.process.pid]
        head.process.kill()
        assert psutil.wait_procs(ranks, timeout=60)[1] == []
        head = HeadWorld(nodes, redis_url, model_dir, tmp_path / "nodes", 2, stage, *FLAGS)

        # The head dismisses the others.
        assert head.stop() == 0
        assert follower.process.wait(120) == 0
    finally:
        if head is not None:
            head.kill()
        follower.kill()


@pytest.mark.long
def test_two_machines_with_a_network_of_their_own_train_and_publish_as_one_does(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.component.trainer.two_machines", str(tmp_path)]
    apart = ["unshare", "--user", "--map-root-user", "--net"]
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing or subprocess.run([*apart, "ip", "link"], capture_output=True, check=False).returncode:
        pytest.skip("here nobody may make network namespaces, as `unshare --user --net ip link` does")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TINSMITH_")}
    done = subprocess.run(
        [*apart, *program],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]


def assert_on_loopback(processes: list[psutil.Process]) -> None:
    """Agents and ranks listen on loopback, and speak with nobody else."""
    found = [
        (process.pid, connection)
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status in (psutil.CONN_LISTEN, psutil.CONN_ESTABLISHED)
    ]
    assert {pid for pid, _ in found} == {process.pid for process in processes}
    strangers = [
        connection
        for _, connection in found
        for address in (connection.laddr, connection.raddr)
        if address and not address.ip.removeprefix("::ffff:").startswith("127.") and address.ip != "::1"
    ]
    assert strangers == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_of_one_machine_keep_to_loopback_and_weights_go_where_the_environment_says(
    redis_url: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    interface, address = of_a_network()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    world = TrainerWorld(redis_url, model_dir, tmp_path, ranks, 0, *FLAGS)
    try:
        model = TrainedModel(world)
        played(model)
        assert_on_loopback(world.processes())
        with Receiver(redis_url, "sampler-0") as receiver:
            saved = model.run(save_for_sampler=operation_pb2.SaveForSampler(sampling_session_id="s:sample:0"))
            assert saved.save_for_sampler.receivers == 1
            assert [name for name, _ in receiver.snapshots] == [model.model_id]
            assert address in listening(psutil.Process(world.rank_pid(0)))
    finally:
        world.kill()


def of_a_network() -> tuple[str, str]:
    """An interface of this machine and its address; loopback where it has no other."""
    up = {name for name, found in psutil.net_if_stats().items() if found.isup}
    found = [(name, one) for name, each in addresses().items() if name in up for one in each if "." in one]
    return max(found, key=lambda each: each[1] != LOOPBACK)


def listening(process: psutil.Process) -> set[str]:
    """Addresses on which it does."""
    return {each.laddr.ip for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN}


def ended(nodes: Nodes, *args: str, **environment: str) -> tuple[int, str]:
    """The exit status of a node that ends by itself, and what it said."""
    process = subprocess.run(
        node_command(nodes, 1, list(args)),
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    return process.returncode, process.stdout


def test_who_waits_in_vain_says_for_whom() -> None:
    port = free_port()
    status, said = ended(Nodes(2, 0, LOOPBACK, port, wait_s=1))
    assert status == 1 and f"of 2 nodes, node 1 did not come to {LOOPBACK}:{port} within 1 s" in said
    assert "Traceback" not in said
    status, said = ended(Nodes(2, 1, LOOPBACK, port, wait_s=1))
    assert status == 1 and f"node 1 did not meet the head at {LOOPBACK}:{port} within 1 s" in said
    assert "Traceback" not in said


def test_nodes_that_cannot_be_are_refused() -> None:
    command = [sys.executable, "-m", "services.trainer.world.node", "--nodes", "2", "--node-rank", "1"]
    command += ["--rendezvous", "192.0.2.1:29400", "--ranks", "1"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 2
    assert "--rendezvous 192.0.2.1:29400 is not of this machine alone, and --interface lo" in found.stderr


def worlds_end(redis_url: str, model_dir: Path, data_dir: Path, *flags: str) -> tuple[int, list[str], int]:
    """Two nodes, the follower with more flags: the head's status, what it said, the follower's status."""
    port = free_port()
    other = Follower(replace(on_loopback(port), rank=1), model_dir, data_dir, 0, *FLAGS, *flags)
    try:
        args = ["--model", f"tinsmith/tiny={model_dir}", "--device", "cpu", "--data-dir", str(data_dir)]
        status, said = ended(on_loopback(port), *args, *FLAGS, TINSMITH_REDIS_URL=redis_url)
        return status, said.splitlines(), other.process.wait(120)
    finally:
        other.kill()


def test_a_follower_with_other_flags_is_found_out(redis_url: str, model_dir: Path, tmp_path: Path) -> None:
    head, said, follower = worlds_end(redis_url, model_dir, tmp_path, "--zero-stage", "3")
    assert (head, follower) == (REFUSED, REFUSED)
    assert "--zero-stage: not the same on all ranks; start every node with the same flags" in said[-1]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        # Before it meets the other rank, which waits for it, and after.
        (
            ("--model", "tinsmith/tiny=/not/there"),
            "rank 1: there is no /not/there: put the model's files into",
        ),
        (("--adapter-host-gib", "1000000"), "rank 1: --adapter-host-gib 1e+06 is more than this machine has"),
    ],
)
def test_what_a_follower_alone_refuses_ends_the_head_with_its_sentence(
    redis_url: str, model_dir: Path, tmp_path: Path, flags: tuple[str, ...], sentence: str
) -> None:
    head, said, follower = worlds_end(redis_url, model_dir, tmp_path, *flags)
    assert (head, follower) == (REFUSED, REFUSED)
    assert sentence in said[-1]


def test_a_follower_that_does_not_take_its_flags_ends_the_head(
    redis_url: str, model_dir: Path, tmp_path: Path
) -> None:
    head, said, follower = worlds_end(redis_url, model_dir, tmp_path, "--max-context", "-1")
    assert (head, follower) == (REFUSED, 2)
    assert said[-1].endswith("node 1 does not take its flags, and its log says why")
