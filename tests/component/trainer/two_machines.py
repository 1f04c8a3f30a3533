"""A trainer on two machines, each with an address and a loopback of its own: two network namespaces.

    unshare --user --map-root-user --net python -m tests.component.trainer.two_machines DIR

Writes into DIR. Exits 0 when all is as it must be.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.common.worlds.nodes import Nodes
from tests.component.own_redis import redis_server
from tests.component.trainer.receiver import Receiver
from tests.component.trainer.test_nodes import Follower, HeadWorld, assert_equal, played
from tests.component.trainer.world import TrainedModel, TrainerWorld, batch, make_model
from tinsmith.internal.v1 import operation_pb2

HERE, THERE = "10.77.0.1", "10.77.0.2"
INTERFACE_HERE, INTERFACE_THERE = "head0", "node0"
PORT = 29400
WAIT_S = 240.0
STAGE = 3


def run(*command: str) -> None:
    subprocess.run(command, check=True)


@contextmanager
def another_machine() -> Iterator[tuple[str, ...]]:
    """The beginning of a command that runs on it. This one is connected with it, and with nobody else."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    try:
        namespace = Path(f"/proc/{holder.pid}/ns/net")
        deadline = time.monotonic() + 60
        while namespace.readlink() == Path("/proc/self/ns/net").readlink():
            assert time.monotonic() < deadline, "it has no network of its own"
            time.sleep(0.01)
        there = ("nsenter", "--target", str(holder.pid), "--net")
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", INTERFACE_HERE, "type", "veth", "peer", "name", INTERFACE_THERE)
        run("ip", "link", "set", INTERFACE_THERE, "netns", str(holder.pid))
        run("ip", "address", "add", f"{HERE}/24", "dev", INTERFACE_HERE)
        run("ip", "link", "set", INTERFACE_HERE, "up")
        run(*there, "ip", "link", "set", "lo", "up")
        run(*there, "ip", "address", "add", f"{THERE}/24", "dev", INTERFACE_THERE)
        run(*there, "ip", "link", "set", INTERFACE_THERE, "up")
        yield there
    finally:
        holder.kill()
        holder.wait()


def main(directory: Path) -> None:
    data = directory / "data"
    model_dir = make_model(directory / "tiny")
    flags = ("--micro-batch-tokens", "64")
    with another_machine() as there, redis_server(directory) as redis_url:
        alone = TrainerWorld(redis_url, model_dir, directory / "alone", 2, STAGE, *flags)
        try:
            expected = played(TrainedModel(alone))
        finally:
            alone.kill()
        follower = Follower(
            Nodes(2, 1, HERE, PORT, INTERFACE_THERE, WAIT_S), model_dir, data, STAGE, *flags, begin=there
        )
        head: HeadWorld | None = None
        try:
            nodes = Nodes(2, 0, HERE, PORT, INTERFACE_HERE, WAIT_S)
            head = HeadWorld(nodes, redis_url, model_dir, data, 2, STAGE, *flags)
            # What samplers are sent goes from a rank that speaks on that network to those on loopback.
            with Receiver(redis_url, "sampler-0") as receiver:
                model = TrainedModel(head)
                assert_equal(played(model), expected)
                published = model.run(
                    save_for_sampler=operation_pb2.SaveForSampler(sampling_session_id="s:sample:0")
                )
                assert published.save_for_sampler.receivers == 1
                assert [name for name, _ in receiver.snapshots] == [model.model_id]
                assert len(model.forward(batch(1))) == len(batch(1))
            assert head.stop() == 0
            assert follower.process.wait(120) == 0
        finally:
            if head is not None:
                head.kill()
            follower.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
