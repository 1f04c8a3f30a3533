"""A base model's files from a hub that is there, away, or does not give them."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from services.common.contract.errors import InvalidRequest, Unavailable
from services.common.storage import hub
from services.launcher.machine import free_port
from tests.model_hub import COMMIT, Hub, served

NAME = "org/model"
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Of a model, as a repository has them."""
    directory = tmp_path / "files"
    directory.mkdir()
    for name in (CONFIG, WEIGHTS, TOKENIZER, "README.md", "pytorch_model.bin"):
        (directory / name).write_text(name)
    return directory


def ask(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """As HF_ENDPOINT does, which is read when the library is first imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    ask(monkeypatch, f"http://127.0.0.1:{free_port()}")
    return tmp_path / "cache"


@pytest.fixture
def remote(files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    found = Hub(NAME, files)
    with served(found) as url:
        ask(monkeypatch, url)
        yield found


class Waiting:
    """Counts pauses instead of making them, and may do something in the first."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.pauses: list[float] = []
        self._then = then

    def sleep(self, seconds: float) -> None:
        if not self.pauses:
            self._then()
        self.pauses.append(seconds)

    def clock(self) -> float:
        return sum(self.pauses)


def directory(waiting: Waiting | None = None) -> Path:
    waiting = waiting or Waiting()
    return Path(hub.model_directory(NAME, waiting.sleep, waiting.clock))


def test_a_model_is_downloaded_once_and_then_taken_without_asking(remote: Hub) -> None:
    found = directory()
    assert found.name == COMMIT
    assert sorted(each.name for each in found.iterdir()) == [CONFIG, WEIGHTS, TOKENIZER]
    asked = len(remote.asked)
    assert asked and directory() == found
    assert len(remote.asked) == asked


def test_a_directory_is_taken_as_it_is(files: Path) -> None:
    assert hub.model_directory(str(files)) == str(files)
    with pytest.raises(InvalidRequest, match="there is no /not/there"):
        hub.model_directory("/not/there")


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_hub_with_trouble_is_asked_again(
    remote: Hub, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    remote.status = status

    def mend() -> None:
        remote.status = 0

    waiting = Waiting(mend)
    with caplog.at_level(logging.WARNING):
        assert directory(waiting).name == COMMIT
    assert waiting.pauses == [1.0]
    (said,) = [record.message for record in caplog.records if record.name == hub.log.name]
    assert f"the model hub {constants.ENDPOINT} is away" in said and str(status) in said
    assert "asked again for up to 30 minutes; see that this machine reaches it" in said


def test_a_hub_that_cannot_be_reached_is_waited_for_with_growing_pauses_and_not_for_ever() -> None:
    waiting = Waiting()
    with pytest.raises(Unavailable, match=r"is away .* it was waited for 30 minutes; see that this machine"):
        directory(waiting)
    assert waiting.pauses[:8] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert hub.PATIENCE_S - 60 < sum(waiting.pauses) <= hub.PATIENCE_S


def test_a_download_that_broke_off_goes_on(remote: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, weights = remote.answer, itertools.count()

    def breaks_off(path: str) -> tuple[int, dict[str, str], bytes]:
        if path.endswith(WEIGHTS) and next(weights) < 1:
            return 403, {"X-Error-Message": "the link has expired"}, b"{}"
        return answer(path)

    remote.answer = breaks_off  # type: ignore[method-assign]
    with pytest.raises(InvalidRequest):
        directory()
    # What is here in part is not taken for the model.
    assert hub.kept(NAME) is None
    assert directory().name == COMMIT


@pytest.mark.parametrize(
    ("status", "code", "sentence"),
    [
        (404, "RepoNotFound", "has no model org/model, or none for whoever is not logged in: correct its id"),
        (401, "RepoNotFound", "or set HF_TOKEN to a token that may read it"),
        (403, "GatedRepo", "only to those whom it has let in: ask for that at"),
        (403, "", "or none for whoever is not logged in"),
        (400, "", "does not give org/model: "),
    ],
)
def test_what_waiting_does_not_change_is_refused_at_once(
    remote: Hub, status: int, code: str, sentence: str
) -> None:
    remote.status, remote.error_code = status, code
    waiting = Waiting()
    with pytest.raises(InvalidRequest) as refused:
        directory(waiting)
    assert sentence in refused.value.message and constants.ENDPOINT in refused.value.message
    assert waiting.pauses == []


def test_what_is_no_id_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'a/b/c' is neither a directory here nor a model's id"):
        hub.model_directory("a/b/c")


def test_a_model_without_weights_that_are_served_is_refused(remote: Hub, files: Path) -> None:
    (files / WEIGHTS).unlink()
    with pytest.raises(InvalidRequest, match=r"org/model on \S+ has no weights as safetensors"):
        directory()


def test_whatever_is_here_of_a_model_is_enough_when_the_hub_is_away(
    remote: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = directory()
    # As others leave it that do not load a tokenizer.
    (found / TOKENIZER).unlink()
    assert hub.kept(NAME) is None
    remote.status = 503
    assert directory() == found
    ask(monkeypatch, f"http://127.0.0.1:{free_port()}")
    assert directory() == found


def test_weights_of_which_some_are_not_here_are_waited_for(remote: Hub, files: Path, cache: Path) -> None:
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (files / WEIGHTS).rename(files / shards["a"])
    (files / shards["b"]).write_text("2")
    (files / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    found = directory()
    # As older libraries leave a model: nothing lists what belongs to it.
    shutil.rmtree(cache / "models--org--model" / "trees")
    assert directory() == found
    (found / shards["b"]).unlink()
    remote.status = 503
    waiting = Waiting()
    with pytest.raises(Unavailable):
        directory(waiting)
    assert waiting.pauses


def test_a_machine_that_may_not_ask_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    waiting = Waiting()
    with pytest.raises(InvalidRequest, match=r"HF_HUB_OFFLINE keeps this machine from asking \S+ unset it"):
        directory(waiting)
    assert waiting.pauses == []
