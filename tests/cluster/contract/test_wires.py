"""What a running cluster shows to other users of its machine: files, command lines, ports."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import msgspec
import psutil
import pytest
import redis
import tinker

from services.common.state import keys
from services.common.state.registry import ServiceRecord
from services.common.storage.data_dir import DataDir
from tests.cluster.batches import cross_entropy
from tests.cluster.conftest import Cluster
from tinsmith.internal.v1 import trainer_pb2, trainer_pb2_grpc

pytestmark = pytest.mark.cluster


def family(cluster: Cluster) -> list[psutil.Process]:
    up = psutil.Process(cluster.process.pid)
    return [up, *up.children(recursive=True)]


def test_whatever_a_cluster_writes_is_for_its_user_alone(
    cluster: Cluster, training: tinker.TrainingClient
) -> None:
    training.forward_backward([cross_entropy(1, 8)], "cross_entropy").result()
    training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    training.save_state("kept").result()
    training.save_weights_for_sampler("named").result()
    modes = {}
    written = [cluster.data_dir]
    for directory, names, files in os.walk(cluster.data_dir):
        written += [Path(directory, name) for name in names + files]
    for path in written:
        try:
            found = path.lstat().st_mode
        except FileNotFoundError:
            # It was written under another name, or let go, meanwhile.
            continue
        if stat.S_ISDIR(found):
            modes[path] = (stat.S_IMODE(found), 0o700)
        elif not stat.S_ISLNK(found):
            modes[path] = (stat.S_IMODE(found), 0o600)
    seen = {path.relative_to(cluster.data_dir).parts[:1] for path in modes}
    assert {
        ("run",),
        ("logs",),
        ("redis",),
        ("state",),
        ("snapshots",),
        ("checkpoints",),
        ("api_key",),
    } <= seen
    assert {str(path): oct(mode) for path, (mode, wanted) in modes.items() if mode != wanted} == {}


def test_no_command_line_holds_a_secret(cluster: Cluster) -> None:
    data = DataDir(cluster.data_dir)
    password = urlsplit(data.redis_url.read_text()).password
    assert password
    secrets = [cluster.api_key, password]
    lines = {process.pid: " ".join(process.cmdline()) for process in family(cluster)}
    assert len(lines) > 5
    assert [line for line in lines.values() if any(secret in line for secret in secrets)] == []


def test_no_log_holds_a_secret(cluster: Cluster) -> None:
    data = DataDir(cluster.data_dir)
    secrets = [cluster.api_key, str(urlsplit(data.redis_url.read_text()).password)]
    logs: list[Path] = sorted(data.logs.glob("*.log*"))
    assert len(logs) > 3
    assert [path.name for path in logs if any(secret in path.read_text() for secret in secrets)] == []


COMPUTING = ("services.trainer", "services.sampler", "VLLM", "spawn_main")


def listening(process: psutil.Process) -> dict[tuple[str, int], str]:
    """Sockets that a process listens on: address and port -> its command."""
    with contextlib.suppress(psutil.Error):
        return {
            (found.laddr.ip.removeprefix("::ffff:"), found.laddr.port): " ".join(process.cmdline())
            for found in process.net_connections("inet")
            if found.status == psutil.CONN_LISTEN
        }
    return {}


def known(cluster: Cluster) -> dict[int, str]:
    """Ports that a cluster listens on, and what for."""
    data = DataDir(cluster.data_dir)
    url = data.redis_url.read_text()
    found = {cluster.port: "HTTP", cluster.grpc_port: "gRPC", urlsplit(url).port or 0: "Redis"}
    with redis.Redis.from_url(url) as client:
        for kind in ("trainer", "sampler"):
            for record in client.hvals(keys.services(kind)):
                address = msgspec.json.decode(record, type=ServiceRecord).address
                found[int(address.rpartition(":")[2])] = f"gRPC of a {kind}"
    return found


def test_every_listening_socket_is_known_and_on_loopback(
    cluster: Cluster, training: tinker.TrainingClient
) -> None:
    # The weight group comes together with the first broadcast.
    training.save_weights_for_sampler("listening").result()
    names, unknown = known(cluster), {}
    for process in family(cluster):
        for (address, port), command in listening(process).items():
            assert address in ("127.0.0.1", "::1"), f"{command} listens on {address}:{port}"
            # Ranks take free ports, to meet and for their pairs: of a trainer, and of the weight group.
            ranks = any(
                name in command for name in ("services.trainer", "services.sampler", "VLLM", "spawn_main")
            )
            if port not in names and not ranks:
                unknown[port] = command
    assert unknown == {}
    assert set(names.values()) == {"HTTP", "gRPC", "Redis", "gRPC of a trainer", "gRPC of a sampler"}


def test_a_local_user_without_the_clusters_certificate_is_not_answered_by_a_trainer(cluster: Cluster) -> None:
    with redis.Redis.from_url(DataDir(cluster.data_dir).redis_url.read_text()) as client:
        (record,) = client.hvals(keys.services("trainer"))
    address = msgspec.json.decode(record, type=ServiceRecord).address
    with grpc.insecure_channel(address) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetTrainerStatus(trainer_pb2.GetTrainerStatusRequest(), timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
