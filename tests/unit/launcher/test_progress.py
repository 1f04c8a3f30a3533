"""What `tinsmith up` says while a cluster starts and serves."""

from __future__ import annotations

import errno
import io
import socket
import sys
import time
from pathlib import Path

import pytest

from services.launcher.progress import Endpoint, Progress


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


@pytest.mark.parametrize(
    "line",
    [
        "12:00:00 INFO    [trainer-0] services.trainer.server: compiling, once",
        '{"time": "2026-11-27T12:00:00Z", "level": "INFO", "message": "compiling, once"}',
    ],
)
def test_who_waits_for_long_is_told_for_what_also_without_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    (tmp_path / "trainer-0.log").write_text(f"{line}\nLoading weights:   0%\n")
    progress = Progress(tmp_path, verbose=False)
    progress.waiting(["trainer-0", "sampler-0"])
    clock[0] = 129.0
    progress.waiting(["trainer-0", "sampler-0"])
    assert capsys.readouterr().out == ""
    for clock[0] in (131.0, 132.0, 162.0):
        progress.waiting(["trainer-0", "sampler-0"])
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"{past} s  loading trainer-0, sampler-0; compiling, once" for past in (31, 62)]


def test_what_is_waited_for_stays_on_one_line_of_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    (tmp_path / "trainer-0.log").write_text(f"12:00:00 INFO [t] a.b: loading{' much' * 50}\n")
    Progress(tmp_path, verbose=False).waiting(["trainer-0"])
    shown = capsys.readouterr().out.removeprefix("\r\033[K")
    assert len(shown) == 59
    assert "loading trainer-0; loading much much" in shown


def test_a_serving_cluster_shows_warnings_of_logs_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(tmp_path, verbose=False)
    progress.ready(Endpoint("127.0.0.1", 1, 2), "tml-key", "a/b")
    capsys.readouterr()
    lines = [f'{{"time": "now", "level": "{level}", "message": "said"}}' for level in ("INFO", "WARNING")]
    (tmp_path / "gateway-0.log").write_text("\n".join([*lines, ""]))
    progress.follow()
    assert capsys.readouterr().out.count("\n") == 1
