"""The tinsmith command, as far as it gets without a cluster."""

from __future__ import annotations

import errno
import io
import json
import socket
import stat
import sys
import time
from pathlib import Path

import msgspec
import pytest
import redis

from services.common.contract.errors import Unavailable
from services.common.state import keys
from services.common.state.registry import ServiceRecord
from services.common.storage.data_dir import DataDir
from services.launcher import cli, default_model, machine, plan, status, up
from services.launcher.progress import Endpoint, Progress
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


def test_status_of_a_directory_where_nothing_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINSMITH_REDIS_URL", raising=False)
    assert cli.main(["status", "--data-dir", str(tmp_path), "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["processes"] == []
    assert "no cluster runs" in report["error"]


def test_status_looks_where_the_variable_had_up_keep_its_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINSMITH_REDIS_URL", raising=False)
    monkeypatch.setenv("TINSMITH_DATA_DIR", str(tmp_path / "elsewhere"))
    assert cli.main(["status"]) == 3
    assert str(tmp_path / "elsewhere") in capsys.readouterr().out


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


def test_status_says_what_cannot_be_read() -> None:
    met = {"name": "tinsmith:session:{a}", "reason": "no such field", "count": 7, "last": time.time() - 5}
    shown = status.show({"processes": [], "services": [], "set_aside": [met]})
    assert "cannot be read: tinsmith:session:{a}: no such field (7 times, 5 s ago)" in shown


def test_status_says_which_samplers_of_a_base_model_have_different_model_runners() -> None:
    runners = {"org/one": {"v1": ["sampler-0"], "v2": ["sampler-1", "sampler-2"]}}
    shown = status.show({"processes": [], "services": [], "mixed_runners": runners})
    assert "samplers of org/one have different model runners (v1: sampler-0; v2: sampler-1, " in shown
    assert "different model runners" not in status.show({"processes": [], "services": []})


def test_status_says_how_a_sampler_was_started_and_what_it_has_room_for() -> None:
    sampler = ServiceRecord(
        kind="sampler",
        id="sampler-0",
        address="h:1",
        max_sequences=64,
        queued_sequences=16,
        batched_tokens=2048,
        kv_tokens=9000,
        adapter_slots=8,
        kv_cache_dtype="fp8",
        head_dtype="auto",
        quantization="none",
        model_runner="v1",
        pipeline_stages=2,
        speculative_ngram_tokens=4,
    )
    shown = status.show({"processes": [], "services": [msgspec.to_builtins(sampler)]})
    assert (
        "  generates 64 sequences at once, takes on 16 beside them, 2048 tokens a step, "
        "keys and values of 9000, 8 adapters at a time, "
        "model runner v1, pipeline stages 2, drafted tokens 4, keys and values in fp8"
    ) in shown.splitlines()
    plain = ServiceRecord(kind="sampler", id="sampler-1", address="h:2", max_sequences=64)
    shown = status.show({"processes": [], "services": [msgspec.to_builtins(plain)]})
    assert "  generates 64 sequences at once" in shown.splitlines()


def test_status_says_what_trains_and_which_weights_a_sampler_has() -> None:
    trainer = {
        "world_size": 2,
        "zero_stage": 1,
        "max_sequence_tokens": "4096",
        "max_forward_tokens": "8192",
        "max_operation_tokens": "100000",
        "adapter_bytes": str(3 * 2**20),
        "adapter_room_bytes": str(2**30),
        "adapter_host_bytes": str(5 * 2**20),
        "adapter_host_room_bytes": str(2**31),
        "page_locked_bytes": str(6 * 2**20),
        "page_locked_kept_bytes": str(7 * 2**20),
        "models": [
            {
                "model_id": name,
                "lora_rank": rank,
                "applied_seq_id": 3,
                "durable_seq_id": 2,
                "queued": 0,
                "on_host": on_host,
            }
            for name, rank, on_host in (
                ("s:train:0", 8, False),
                ("s:train:1", 0, False),
                ("s:train:2", 8, True),
            )
        ],
    }
    snapshot = {"model_id": "s:train:1", "version": 3}
    sampler = {"running": 1, "waiting": 4, "group_epoch": 2, "resident": [], "weights": snapshot}
    services = [
        {"id": name, "state": "ready", "address": "h:1", "status": status}
        for name, status in (("trainer-0", trainer), ("sampler-0", sampler))
    ]
    shown = status.show({"processes": [], "services": services})
    assert "s:train:0  rank 8 " in shown
    assert "adapters take 3 of 1024 MiB of each rank; sequences of up to 4096 tokens (8192 that only" in shown
    assert "that only run forward), 100000 an operation" in shown
    assert "adapters that are idle take 5 of 2048 MiB of each rank's host" in shown
    assert "6 MiB of the host are page-locked, and 7 kept for later" in shown
    assert [line.endswith("0 queued, on the host") for line in shown.splitlines() if ":train:" in line] == [
        False,
        False,
        True,
        False,
    ]
    assert "s:train:1  all weights " in shown
    assert "1 requests, 4 waiting for other weights" in shown
    assert "has the weights of s:train:1 version 3" in shown
    unshared = "what sequences begin with alike is computed for each of them; its log says why"
    assert unshared in shown
    services[0]["status"] = {**trainer, "shares_prefixes": True}
    assert unshared not in status.show({"processes": [], "services": services})


def test_the_api_key_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    file = tmp_path / "api_key"
    key = up.api_key(file)
    assert key.startswith("tml-")
    assert len(key) > 40
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert up.api_key(file) == key
    # Its owner has a name, which a new key in its place keeps.
    assert file.read_text().split()[1:] == ["operator", "role=admin"]
    file.unlink()
    assert up.api_key(file) != key
    assert file.read_text().split()[1:] == ["operator", "role=admin"]


def test_a_file_of_keys_with_a_mistake_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "api_key").write_text("tml-one alice bob\n")
    with pytest.raises(Unavailable, match="line 1: after the owner come role="):
        up.api_key(tmp_path / "api_key")
    (tmp_path / "api_key").write_text("# none\n")
    with pytest.raises(Unavailable, match="holds no API key"):
        up.api_key(tmp_path / "api_key")


def test_a_key_without_an_owner_is_told_which_one_has_what_was_made_with_it(tmp_path: Path) -> None:
    file = tmp_path / "api_key"
    file.write_text("# the first\ntml-one\n")
    with pytest.raises(Unavailable, match="line 2: the owner's name is missing") as caught:
        up.api_key(file)
    told = caught.value.message.rpartition("in that line: ")[2]
    # What `printf %s tml-one | sha256sum` begins with.
    assert told == "key-37186f648184 role=admin"
    file.write_text(f"tml-one {told}\n")
    assert up.api_key(file) == "tml-one"


@pytest.mark.parametrize(
    ("holds", "mode"), [([], 0o700), (["cluster_id", "run"], 0o700), (["pictures"], 0o755)]
)
def test_only_a_directory_of_a_cluster_alone_is_closed_to_others(
    holds: list[str], mode: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o755)
    for name in holds:
        (tmp_path / name).mkdir()
    # The second start finds what the first one made.
    for _ in range(2):
        up.make_directory(DataDir(tmp_path))
        assert stat.S_IMODE(tmp_path.stat().st_mode) == mode
        assert ("chmod 700" in capsys.readouterr().err) == (mode != 0o700)


def test_a_directory_that_up_makes_is_closed_to_others(tmp_path: Path) -> None:
    up.make_directory(DataDir(tmp_path / "a" / "b"))
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_a_file_cannot_be_the_data_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in ("file", "file/below"):
        with pytest.raises(Unavailable, match="choose another with --data-dir"):
            up.make_directory(DataDir(tmp_path / wrong))


def test_a_second_cluster_on_a_directory_is_refused(tmp_path: Path) -> None:
    options = plan.Options((plan.Model("a/b", "org/model"),), tmp_path)
    (tmp_path / "run").mkdir()
    with up._lock(tmp_path), pytest.raises(Unavailable, match="already runs"):
        up.up(options, None, False)


def test_a_serving_cluster_shows_errors_and_its_own_warnings_but_no_chatter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "gateway-0.log"
    progress = Progress(tmp_path, verbose=False)
    log.write_text("12:00:00 WARNING [gateway-0] while starting\n")
    progress.follow()
    progress.ready(Endpoint("127.0.0.1", 1, 2), "tml-key", "a/b")
    capsys.readouterr()
    with log.open("a") as file:
        file.write("12:00:01 WARNING [gateway-0] ours\n(EngineCore) WARNING 11-21 theirs\n")
        file.write("12:00:02 INFO    [gateway-0] quiet\nValueError: loud\nERROR half a li")
    progress.follow()
    shown = capsys.readouterr().out
    assert "ours" in shown
    assert "ValueError: loud" in shown
    assert not any(word in shown for word in ("theirs", "quiet", "half", "while starting"))


def test_a_serving_cluster_says_what_to_paste_and_how_others_reach_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Progress(tmp_path, verbose=False).ready(Endpoint("127.0.0.1", 8000, 8001), "tml-key", "org/name")
    said = capsys.readouterr().out
    assert "\n    export TINKER_BASE_URL=http://127.0.0.1:8000\n    export TINKER_API_KEY=tml-key\n" in said
    _, _, script = said.partition("- <<'END'\n")
    script, ended, _ = script.partition("\nEND\n")
    assert ended
    compile(script, "pasted", "exec")
    assert 'create_lora_training_client("org/name"' in script
    assert "ssh -L 8000:localhost:8000" in said
    Progress(tmp_path, verbose=False).ready(Endpoint("0.0.0.0", 8000, 8001), "tml-key", "org/name")
    said = capsys.readouterr().out
    assert "TINKER_BASE_URL=http://127.0.0.1:8000\n" in said
    assert f"From other machines: TINKER_BASE_URL=http://{socket.gethostname()}:8000." in said
    behind = Endpoint("0.0.0.0", 8000, 8001, "https://tinsmith.example.com")
    Progress(tmp_path, verbose=False).ready(behind, "tml-key", "org/name")
    assert "From other machines: TINKER_BASE_URL=https://tinsmith.example.com\n" in capsys.readouterr().out


def test_a_terminal_that_was_closed_does_not_keep_the_cluster_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stdout", Closed())
    progress = Progress(tmp_path, verbose=False)
    progress.note("stopping")
    progress.note("stopped")


def test_what_is_downloaded_is_told_and_how_much_of_it_is_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    progress = Progress(tmp_path / "logs", False, ["org/model"])
    progress.downloads()
    said = capsys.readouterr().out
    assert "org/model is not here yet: it is downloaded from the Hugging Face hub first" in said
    blobs = tmp_path / "models--org--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc").write_bytes(bytes(range(256)) * 600_000)
    (blobs / "def.incomplete").write_bytes(bytes(range(256)) * 600_000)
    progress.downloads()
    assert capsys.readouterr().out == ""
    progress.waiting(["trainer-0"])
    assert "loading trainer-0; 0.3 GB of org/model are here" in capsys.readouterr().out


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
