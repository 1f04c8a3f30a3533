"""The gateway as a process: shared ports, draining, and what it says when it cannot start."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import redis

from services.launcher.machine import free_port
from tests.announced import announced
from tests.component.gateway.process import ALICE, healthy, launch, wait_until


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    processes: list[subprocess.Popen] = []

    def run(name: str, port: int, grpc_port: int, **environment: str) -> subprocess.Popen:
        started = launch(redis_url, tmp_path, name, port=port, grpc_port=grpc_port, **environment)
        processes.append(started.process)
        return started.process

    yield run
    for process in processes:
        process.kill()
        process.communicate(timeout=120)


def create_session(port: int) -> int:
    url = f"http://127.0.0.1:{port}/api/v1/create_session"
    body = {"tags": [], "sdk_version": "0.38.0"}
    return httpx.post(url, json=body, headers={"x-api-key": ALICE}, timeout=60).status_code


def test_two_gateways_share_their_ports_and_either_may_go(
    start: Callable, redis_url: str, tmp_path: Path
) -> None:
    port, grpc_port = free_port(), free_port()
    first, second = start("gateway-0", port, grpc_port), start("gateway-1", port, grpc_port)
    pid_files = [tmp_path / "run" / f"gateway-{index}.pid" for index in (0, 1)]
    # An answer would say that one of them is there.
    with redis.Redis.from_url(redis_url) as client:
        wait_until(lambda: at_port(client, grpc_port) == {"gateway-0", "gateway-1"})
    assert [int(path.read_text()) for path in pid_files] == [first.pid, second.pid]
    assert {create_session(port) for _ in range(10)} == {200}
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 0
    assert not pid_files[0].exists()
    wait_until(lambda: healthy(port))
    assert {create_session(port) for _ in range(10)} == {200}
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == 0


def at_port(client: redis.Redis, grpc_port: int) -> set[str]:
    """Names of the gateways that are announced with this port."""
    records = announced(client, "gateway")
    return {record.id for record in records if record.address.endswith(f":{grpc_port}")}


def test_a_gateway_without_keys_file_says_so_and_fails(start: Callable, tmp_path: Path) -> None:
    missing = start("gateway-0", free_port(), free_port(), TINSMITH_API_KEYS_FILE=str(tmp_path / "none"))
    _, stderr = missing.communicate(timeout=120)
    assert missing.returncode != 0
    assert "none" in stderr.splitlines()[-1]


def test_a_gateway_that_waits_for_redis_says_so_and_ends_when_it_is_asked(start: Callable) -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    alone = start("gateway-0", free_port(), free_port(), TINSMITH_REDIS_URL=nowhere)
    assert alone.stderr is not None
    said = [next(line for line in alone.stderr if "waiting for Redis" in line)]
    # Longer than a command tries again by itself.
    with pytest.raises(subprocess.TimeoutExpired):
        alone.wait(10)
    alone.send_signal(signal.SIGTERM)
    _, rest = alone.communicate(timeout=60)
    assert "Traceback" not in "".join([*said, rest])


def test_a_second_gateway_of_one_id_is_refused_and_a_restart_after_kill_9_is_not(start: Callable) -> None:
    port = free_port()
    first = start("gateway-0", port, free_port())
    wait_until(lambda: healthy(port))
    _, stderr = start("gateway-0", free_port(), free_port()).communicate(timeout=120)
    assert f"another process runs as gateway 'gateway-0' (pid {first.pid})" in stderr.splitlines()[-1]
    assert healthy(port)
    first.kill()
    again = start("gateway-0", other := free_port(), free_port())
    wait_until(lambda: healthy(other))
    assert again.poll() is None
