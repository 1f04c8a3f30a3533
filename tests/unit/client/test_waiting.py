"""Who waits with the Python client is told why nothing comes."""

from __future__ import annotations

import math
import time
from typing import Any, cast

import pytest

from tests.unit.client.models import model_of, waiting
from tests.unit.gateway.edges import ALICE, Edges
from tinsmith.v1 import training_pb2
from tinsmith_client import Client, as_completed
from tinsmith_client import results as client_results


async def test_who_waits_for_work_that_does_not_go_on_is_told_why_once(
    edges: Edges, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_results, "_SILENT_S", 0.2)
    monkeypatch.setattr(client_results, "_WAIT_S", 0.2)
    with Client(edges.grpc_address, ALICE) as client:
        session, model = await model_of(edges, client)
        work = await waiting(model.optim_step, 0.1)
        with pytest.raises(TimeoutError, match=r"has no result after 1 s$"):
            await waiting(work.result, timeout=1.0)
        await edges.journal.set_queue_state(model.model_id, "no trainer is ready")
        for wait in (work.result, lambda timeout: list(as_completed([work], timeout))):
            caplog.clear()
            with pytest.raises(TimeoutError, match="after 1 s: no trainer is ready"):
                await waiting(wait, timeout=1.0)
            assert caplog.messages == [f"{work.request_id} waits: no trainer is ready"]
        monkeypatch.setattr(client_results, "_AT_ONCE", 1)
        monkeypatch.setattr(client_results, "_TURN_S", 0.05)
        many = [work, await waiting(model.optim_step, 0.1)]
        with pytest.raises(TimeoutError, match="2 requests have no result after 1 s: no trainer is ready"):
            await waiting(lambda: list(as_completed(many, 1.0)))
        assert await waiting(work.waiting_for) == "no trainer is ready"
        await edges.answer(model.model_id, 1, optim_step=training_pb2.OptimStepResult())
        assert await waiting(work.waiting_for) == ""
        session.leave()


def test_who_waits_for_a_while_does_not_wait_longer_to_be_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Silent:
        request_id = "r"

        def _reason(self, seconds: float) -> str:
            asked.append(seconds)
            return ""

    monkeypatch.setattr(client_results, "_SILENT_S", 0.0)
    for left in (0.5, -0.5, math.inf):
        silence = client_results._Silence(time.monotonic() + left)
        silence.goes_on(cast(Any, Silent()))
    assert asked == [pytest.approx(0.5, abs=0.2), 10.0]
