"""`tinsmith tokenizer`."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from services.common.contract.errors import InvalidRequest, TinsmithError
from services.launcher import cli
from services.launcher.clients import tokenizer

FILES = {"tokenizer.json": "{}", "tokenizer_config.json": '{"a": "ü"}'}


class Cluster(BaseHTTPRequestHandler):
    """Answers as a gateway does, by the name that is asked for."""

    def do_GET(self) -> None:
        known = {"org/model": {"files": FILES}, "org/evil": {"files": {"../x": ""}}, "org/other": []}
        name = self.path.removeprefix("/api/v1/tokenizers/")
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


@pytest.mark.parametrize("name", ["org/evil", "org/other"])
def test_an_answer_of_another_form_writes_nothing(base_url: str, tmp_path: Path, name: str) -> None:
    with pytest.raises(TinsmithError):
        tokenizer.run(base_url, "tml-k", name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(TinsmithError, match="cannot be read"):
        tokenizer.run("http://127.0.0.1:9", "tml-k", "org/model", tmp_path)
    for url, key in ((None, "tml-k"), ("http://127.0.0.1:9", None), ("file:///etc", "tml-k")):
        with pytest.raises(InvalidRequest):
            tokenizer.run(url, key, "org/model", tmp_path)
