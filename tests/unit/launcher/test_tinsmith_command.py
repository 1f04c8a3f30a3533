"""The tinsmith command, as far as it gets without a cluster."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import redis

from services.common.state import keys
from services.common.state.registry import ServiceRecord
from services.launcher import cli, default_model, machine
from tests.announced import announce, withdraw


def test_up_without_a_model_would_serve_the_one_that_comes_from_a_package(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ports = ["--port", str(machine.free_port()), "--grpc-port", str(machine.free_port())]
    assert cli.main(["up", "--dry-run", *ports]) == 0
    said = capsys.readouterr().out
    assert f"serves {default_model.NAME}" in said
    assert all(name in said for name in ("gateway-0", "trainer-0", "sampler-0"))


def test_ctrl_c_while_something_is_prepared_ends_it_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(cache: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(default_model, "prepare", interrupted)
    ports = ["--port", str(machine.free_port()), "--grpc-port", str(machine.free_port())]
    assert cli.main(["up", "--data-dir", str(tmp_path), *ports]) == 130
    assert capsys.readouterr().err.endswith("tinsmith: interrupted\n")


def test_a_dry_run_tells_ports_that_are_in_use_beside_other_mistakes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        port, measured = one.getsockname()[1], two.getsockname()[1]
        words = [
            "--port",
            str(port),
            "--grpc-port",
            str(machine.free_port()),
            "--metrics-port",
            str(measured),
        ]
        assert cli.main(["up", "--dry-run", *words]) == 2
        told = capsys.readouterr().err
        assert f"port {port} of 127.0.0.1 is in use; choose another with --port" in told
        assert f"port {measured} of 127.0.0.1 is in use; choose another with --metrics-port" in told
        assert cli.main(["up", "--dry-run", *words, "--dtype", "float8"]) == 2
        told = capsys.readouterr().err
        assert "3 things are to be changed" in told
        assert "--dtype must be" in told
        # One that is no port is not looked at, nor the default in its place.
        assert cli.main(["up", "--dry-run", *words[2:], "--port", "0"]) == 2
        assert "2 things are to be changed" in capsys.readouterr().err


def test_a_dry_run_tells_an_address_of_another_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--dry-run", "--host", "192.0.2.1"]) == 2
    assert capsys.readouterr().err == "tinsmith: --host 192.0.2.1 is no address of this machine\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "nonsense"], "is not NAME=PATH_OR_HUB_ID; for example my/model=./model-dir"),
        (["--model", "org/model"], "is not NAME=PATH_OR_HUB_ID; did you mean org/model=org/model?"),
        (["--model", "./model"], "is not NAME=PATH_OR_HUB_ID; for example my/model=./model-dir"),
        (["--model", "a/b=/no/such/place"], "no directory"),
        (["--model", "a/b=/"], "no config.json"),
        (["--model", "a/b=org/model", "--samplers", "-1"], "--samplers"),
        (["--model", "a/b=org/model", "--port", "70000"], "--port"),
        (
            ["--model", "a/b=org/m", "--redis-url", "redis://x:1", "--redis-appendfsync", "always"],
            "--redis-appendfsync",
        ),
    ],
)
def test_up_says_what_to_change(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["up", "--data-dir", str(tmp_path), *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_sizes_that_make_no_model_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "tiny", str(tmp_path / "tiny"), "--vocab", "3"]) == 2
    assert "vocab" in capsys.readouterr().err


def test_a_base_model_is_retired_once_nothing_serves_it(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINSMITH_REDIS_URL", raising=False)
    command = ["models", "retire", "org/one", "--data-dir", str(tmp_path)]
    assert cli.main(command) == 1
    assert "no cluster runs" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "redis_url").write_text(redis_url)
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        assert cli.main(command) == 1
        assert "known: none" in capsys.readouterr().err
        client.hset(keys.BASE_MODELS, "configured:org/one", '{"name": "org/one"}')
        announce(client, ServiceRecord(kind="sampler", id="s-0", address="h:1", base_model="org/one"), 60)
        assert cli.main(command) == 1
        assert "s-0 serves org/one" in capsys.readouterr().err
        withdraw(client, "sampler", "s-0")
        assert cli.main(command) == 0
        assert client.hkeys(keys.BASE_MODELS) == [b"retired:org/one"]


def test_a_cluster_that_does_not_answer_an_operator_is_told_of_and_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-k")
    for verb in ("sessions", "services", "unreadable", "owners"):
        assert cli.main(["admin", verb, "--address", "127.0.0.1:9"]) == 1
        said = capsys.readouterr()
        assert said.out == "", verb
        assert "127.0.0.1:9 does not answer" in said.err


def test_a_missing_package_is_named_with_what_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    for name in ("services.launcher.machine", "services.launcher.status"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr("services.launcher.status", raising=False)
    monkeypatch.delattr("services.launcher.machine", raising=False)
    assert cli.main(["status"]) == 1
    said = capsys.readouterr().err
    assert "psutil is not installed" in said
    assert "pip install 'tinsmith[" in said
