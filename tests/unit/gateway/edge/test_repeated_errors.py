"""What an outage repeats a thousand times is in a gateway's log a few times."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from services.common.contract.errors import Unavailable
from services.common.process import rpc
from services.gateway.edge.http import server
from services.gateway.edge.inference import endpoint


def request(number: int) -> Request:
    path = f"/api/v1/weights/s:train:{number}"
    return Request({"type": "http", "method": "POST", "path": path, "headers": []})


async def test_of_many_requests_that_are_answered_alike_with_an_error_of_this_side_the_log_has_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for number in range(20):
        error = Unavailable(f"no trainer for model {number}", "away_for_this_test")
        assert (await server._tinsmith_error(request(number), error)).status_code == 503
        assert endpoint.typed(error, request(number)) is error
    said = [one for one in caplog.messages if "no trainer for model" in one]
    assert len(said) == 2, "one of each edge"
    assert all("POST /api/v1/weights/s:train:0: no trainer for model 0" in one for one in said)


def test_of_an_error_of_the_program_that_comes_again_the_log_has_the_place_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for number in range(20):
        try:
            raise ZeroDivisionError(f"for the time {number}")
        except ZeroDivisionError as error:
            rpc.typed(error, "DivideForThisTest")
            endpoint.typed(error, request(0))
    assert caplog.text.count("Traceback") == 2
