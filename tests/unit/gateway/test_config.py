"""What the gateway's command line takes."""

from __future__ import annotations

import pytest

from services.common.state.room import RoomLimits
from services.gateway.config import parse

ENVIRONMENT = {"TINSMITH_REDIS_URL": "redis://127.0.0.1:1/0", "TINSMITH_DATA_DIR": "data"}


def test_what_requests_and_results_may_take_is_set_by_flags_or_variables() -> None:
    assert parse([], ENVIRONMENT).room == RoomLimits()
    flags = ["--state-bytes", "1000", "--owner-bytes", "100", "--result-life", "60"]
    wanted = RoomLimits(total_bytes=1000, owner_bytes=100, result_life=60, fetched_life=5)
    assert parse(flags, ENVIRONMENT | {"TINSMITH_FETCHED_RESULT_LIFE": "5"}).room == wanted


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--state-bytes", "-1"], "--state-bytes must be a number of bytes, or 0"),
        (["--owner-bytes", "1g"], "--owner-bytes must be a number of bytes, or 0"),
        (["--result-life", "0"], "--result-life must be a whole number of seconds, at least 1"),
    ],
)
def test_a_flag_that_has_no_meaning_is_refused_with_what_it_takes(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(flags, ENVIRONMENT)
    assert says in capsys.readouterr().err
