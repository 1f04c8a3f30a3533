"""What a rank refuses, as whoever started its world hears of it."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from services.common.contract.errors import InvalidRequest, Unavailable
from services.common.process.process import REFUSED
from services.common.weights.rendezvous import meeting_store
from services.launcher.machine import free_port
from services.trainer.world import refusals

HERE = "127.0.0.1"


@pytest.fixture(autouse=True)
def nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(refusals.VARIABLE, "")


def listening() -> dist.TCPStore:
    store = meeting_store(HERE, 0, True, timedelta(seconds=10))
    refusals.announce(HERE, store.port)
    return store


def test_the_first_refusal_is_heard() -> None:
    store = listening()
    assert refusals.heard(store) == ""
    assert refusals.ends_with(InvalidRequest("give less"), "rank 1") == REFUSED
    assert refusals.ends_with(InvalidRequest("give less"), "rank 0") == REFUSED
    assert refusals.heard(store) == "rank 1: give less"


def test_what_passes_by_itself_is_no_refusal() -> None:
    store = listening()
    assert refusals.ends_with(Unavailable("Redis does not answer"), "rank 0") == 1
    assert refusals.heard(store) == ""


def test_a_rank_without_an_agent_tells_nobody() -> None:
    assert refusals.ends_with(InvalidRequest("give less"), "rank 0") == REFUSED
    assert os.environ[refusals.VARIABLE] == ""


def test_a_rank_whose_agent_has_gone_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(refusals, "_TOLD_S", timedelta(seconds=1))
    refusals.announce(HERE, free_port())
    assert refusals.ends_with(InvalidRequest("give less"), "rank 0") == REFUSED
    assert "could not tell the agent why this ends" in caplog.text
