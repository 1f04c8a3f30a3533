"""Ranks that read files of a full model wait for the slowest of them before they do anything together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

from services.trainer.compute import exchange
from services.trainer.compute.data import ShardedState
from services.trainer.compute.full import model as full_model
from services.trainer.compute.full.model import FullModel
from services.trainer.compute.full.shards import Part

ELEMENTS = 6_000_000


class Loading(FullModel):
    """One that writes down what it does of a load."""

    has_gradient = False

    def __init__(self, done: list[object]) -> None:
        self._done, self._device = done, "cpu"
        self._config = self._buffers = cast(Any, None)

    def _opened(self, state: ShardedState) -> Any:
        return self

    def read(self, parts: dict[str, Part]) -> None:
        self._done.append("reads its part")

    def clear_gradient(self) -> None:
        pass

    def _parts(self, *, moments: bool) -> Iterator[tuple[str, Part]]:
        yield "weight", Part(torch.zeros(1), 0, 1)

    def _follow_masters(self) -> None:
        self._done.append("computes with it")

    _sizes = _partitions = property(lambda self: [])  # type: ignore[assignment]
    _elements = ELEMENTS  # type: ignore[assignment]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was done in which order, the waits for other ranks among it."""
    found: list[object] = []

    @contextmanager
    def patience(seconds: float) -> Iterator[None]:
        found.append(f"{seconds:.1f} s more")
        yield

    monkeypatch.setattr(exchange, "patience", patience)
    monkeypatch.setattr(exchange, "meet", lambda device: found.append("meets the others"))
    monkeypatch.setattr(full_model, "taken_before", lambda *_: True)
    monkeypatch.setattr(full_model, "load_pieces", lambda *_: [])
    return found


@pytest.mark.parametrize(("optimizer", "seconds"), [(False, "4.8"), (True, "14.4")])
def test_a_load_goes_on_when_all_have_read_for_as_long_as_its_bytes_say(
    optimizer: bool, seconds: str, done: list[object]
) -> None:
    Loading(done).load_state(ShardedState("files", 3), optimizer)
    assert done == ["reads its part", f"{seconds} s more", "meets the others", "computes with it"]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_fresh_model_is_made_of_what_all_have_read(
    stage: int, done: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Config:
        device, dtype, zero_stage, model_path = "cpu", torch.bfloat16, stage, "files"
        activation_checkpointing = False

        def deepspeed(self) -> dict[str, Any]:
            return {}

    class Stopped(Exception):
        pass

    def made(*_: object) -> None:
        raise Stopped

    monkeypatch.setattr(full_model, "model_pieces", lambda *_: [])
    monkeypatch.setattr(full_model.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(full_model, "load_model", lambda *_: done.append("reads") or torch.nn.Linear(1, 1))
    monkeypatch.setattr(full_model, "computes_flat", made)
    with pytest.raises(Stopped):
        FullModel(cast(Any, Config()), ELEMENTS, cast(Any, None))
    # Under ZeRO-3 that is a part of the reading.
    assert done == (["reads"] if stage == 3 else ["reads", "2.4 s more", "meets the others"])
