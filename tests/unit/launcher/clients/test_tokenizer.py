"""`tinsmith tokenizer`."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from services.common.contract.errors import InvalidRequest, TinsmithError
from services.launcher import cli
from services.launcher.clients import tokenizer

FILES = {"tokenizer.json": "{}", "tokenizer_config.json": '{"a": "ü"}'}


class Cluster(BaseHTTPRequestHandler):
    """Answers as a gateway does, by the name that is asked for."""

    asked: ClassVar[list[tuple[int, str]]] = []

    def do_GET(self) -> None:
        known: dict[str, object] = {
            "org/model": {"files": FILES},
            "org/evil": {"files": {"../x": ""}},
            "org/other": [],
            "org/surrogate": {"files": {"x": "\ud800"}},
        }
        name = self.path.removeprefix("/api/v1/tokenizers/")
        self.asked.append((self.server.server_port, self.headers["x-api-key"]))
        if name.startswith("org/moved"):
            self.send_response(int(name[-3:]))
            self.send_header("location", f"http://localhost:{self.server.server_port}/elsewhere")
            self.end_headers()
            return
        allowed = self.headers["x-api-key"] == "tml-k"
        body = known[name] if allowed and name in known else {"detail": "it is not served here"}
        self.send_response(200 if allowed and name in known else 400)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Cluster)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_is_put_where_the_sdk_looks(
    base_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", base_url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-k")
    for _ in range(2):
        assert cli.main(["tokenizer", "org/model", str(tmp_path)]) == 0
    assert {path.name: path.read_text() for path in (tmp_path / "org/model").iterdir()} == FILES
    assert str(tmp_path / "org/model") in capsys.readouterr().out
    assert cli.main(["tokenizer", "org/none", str(tmp_path)]) == 2
    assert "it is not served here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B:peft:32768", "Qwen/Qwen3-8B"),
        ("org/model/variant", "org/model"),
        ("meta-llama/Llama-3.2-1B", "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"),
        ("alone", "alone"),
    ],
)
def test_the_place_is_that_of_the_name(name: str, where: str) -> None:
    assert tokenizer.place(name) == Path(where)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../b", "", "a/b/c/d", ".hidden/x", "a b"])
def test_a_name_leads_nowhere_else(name: str) -> None:
    with pytest.raises(InvalidRequest):
        tokenizer.place(name)


@pytest.mark.parametrize("name", ["org/evil", "org/other", "org/surrogate"])
def test_an_answer_of_another_form_writes_nothing(base_url: str, tmp_path: Path, name: str) -> None:
    with pytest.raises(TinsmithError):
        tokenizer.run(base_url, "tml-k", name, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_cluster_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    says = r"^http://127\.0\.0\.1:9 does not answer: .*refused; is TINKER_BASE_URL right\?$"
    with pytest.raises(TinsmithError, match=says):
        tokenizer.run("http://127.0.0.1:9", "tml-k", "org/model", tmp_path)
    for url, key in ((None, "tml-k"), ("http://127.0.0.1:9", None), ("file:///etc", "tml-k")):
        with pytest.raises(InvalidRequest):
            tokenizer.run(url, key, "org/model", tmp_path)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_key_follows_no_redirect(base_url: str, tmp_path: Path, status: int) -> None:
    Cluster.asked.clear()
    with pytest.raises(InvalidRequest, match="redirects to 'http://localhost"):
        tokenizer.run(base_url, "tml-k", f"org/moved{status}", tmp_path)
    assert len(Cluster.asked) == 1


@pytest.mark.parametrize("key", ["tml-\u4e00", "tml-\u00fc", "tml-\udc80", "tml\nx: y", " ", "tml-k\r"])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(tmp_path: Path, key: str) -> None:
    with pytest.raises(InvalidRequest, match="TINKER_API_KEY is no API key") as caught:
        tokenizer.run("http://127.0.0.1:9", key, "org/model", tmp_path)
    assert key.strip() == "" or key not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://", "http://[", "http://h\u00f6st", "http://host:99999", "http://host:x", "http://\udc80"]
)
def test_a_url_of_no_cluster_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(InvalidRequest, match="is not the URL of a cluster"):
        tokenizer.run(url, "tml-k", "org/model", tmp_path)


@pytest.mark.parametrize("name", ["org/model:\udc80", "meta-llama/Llama-3\u4e00", "org/model/\n"])
def test_an_odd_name_is_one_that_the_cluster_does_not_know(base_url: str, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="it is not served here"):
        tokenizer.run(base_url, "tml-k", name, tmp_path)
