"""Ports, GPUs and what is left of an earlier run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.common.contract.errors import Unavailable
from services.launcher import machine


def test_a_free_port_is_never_one_that_outgoing_connections_are_given() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(machine.free_port() < first for _ in range(50))


def test_a_port_that_something_listens_on_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert machine.port_in_use(port)
    assert not machine.port_in_use(port)


def test_cuda_visible_devices_names_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-abc")
    assert machine.gpus() == ("2", "GPU-abc")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.gpus() == ()


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(Unavailable, match=r"--host 192\.0\.2\.1 is no address of this machine"):
        machine.port_in_use(8000, "192.0.2.1")


def test_only_processes_that_live_count_as_running(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (tmp_path / "gateway-0.pid").write_text(f"{child.pid}\n")
    (tmp_path / "broken.pid").write_text("")
    assert machine.running(tmp_path) == ["gateway-0"]
    child.kill()
    child.wait()
    assert machine.running(tmp_path) == []


def test_a_later_process_with_the_same_number_is_not_the_one_that_wrote_the_file(tmp_path: Path) -> None:
    file = tmp_path / "gateway-0.pid"
    file.write_text(f"{os.getpid()}\n")
    assert machine.alive(file) is not None
    long_ago = time.time() - 10**8
    os.utime(file, (long_ago, long_ago))
    assert machine.alive(file) is None
