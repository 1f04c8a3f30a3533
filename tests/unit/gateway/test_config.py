"""What the gateway's command line takes."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from services.common.contract.errors import LimitReached
from services.common.process.flags import rows_of
from services.common.state.room import RoomLimits
from services.gateway.access.gate import Gate
from services.gateway.access.limits import Limits, OwnerLimits
from services.gateway.config import FLAGS, GatewayConfig, parse, stated
from services.gateway.dispatch.plan import Window

ENVIRONMENT = {"TINSMITH_REDIS_URL": "redis://127.0.0.1:1/0", "TINSMITH_DATA_DIR": "data"}


def refused(flags: list[str], capsys: pytest.CaptureFixture[str], environment: dict[str, str]) -> str:
    with pytest.raises(SystemExit):
        parse(flags, environment)
    return capsys.readouterr().err


def test_what_requests_and_results_may_take_is_set_by_flags_or_variables() -> None:
    assert parse([], ENVIRONMENT).room == RoomLimits()
    flags = ["--state-bytes", "1000", "--owner-bytes", "100", "--result-life", "60"]
    wanted = RoomLimits(total_bytes=1000, owner_bytes=100, result_life=60, fetched_life=5)
    assert parse(flags, ENVIRONMENT | {"TINSMITH_FETCHED_RESULT_LIFE": "5"}).room == wanted


def test_without_flags_every_setting_has_its_default() -> None:
    config = parse([], ENVIRONMENT)
    given = {"redis_url", "data_dir", "api_keys_file"}
    defaults = GatewayConfig()
    for name in GatewayConfig.__dataclass_fields__.keys() - given:
        assert getattr(config, name) == getattr(defaults, name), name
    assert str(config.api_keys_file) == "data/api_key"


def test_a_key_that_holds_all_the_calls_it_may_leaves_connections_to_others() -> None:
    config = parse([], ENVIRONMENT)
    gate = Gate(config.limits.owners, clock=lambda: 0.0)
    held = 0
    with ExitStack() as calls, pytest.raises(LimitReached, match="--max-calls"):
        while held < 2 * config.connections.connections:
            calls.enter_context(gate.call("ann"))
            held += 1
    assert config.connections.connections - held >= 1000


def test_limits_of_a_key_a_request_and_what_is_sent_on_are_flags() -> None:
    flags = ["--max-models", "3", "--max-datums", "7", "--window-operations", "2", "--memory-mib", "600"]
    config = parse(flags, ENVIRONMENT)
    assert config.limits == Limits(datums=7, owners=OwnerLimits(models=3))
    assert config.dispatch.window == Window(operations=2)
    assert config.memory_mib == 600


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--state-bytes", "-1"], "--state-bytes must be a whole number of bytes, 0 to"),
        (["--owner-bytes", "1g"], "--owner-bytes must be a whole number of bytes, 0 to"),
        (["--result-life", "0"], "--result-life must be a whole number of seconds, 1 to"),
        (["--port", "65536"], "--port must be a port number, 0 to 65535, not '65536'"),
        (["--window-operations", "65"], "--window-operations must be a whole number, 1 to 64"),
        (["--memory-mib", "20"], "--memory-mib must be a whole number of MiB, 512 to"),
        (["--base-models", "[1]"], "--base-models: "),
        (["--checkpoint-store", "s3://key:secret@bucket/x"], "--checkpoint-store: "),
        (["--max-message-bytes", "100000000", "--memory-mib", "512"], "--max-message-bytes must be at most"),
        (
            ["--max-calls", "12000"],
            "--max-http-connections must be more than half of --max-calls, 6001 or more",
        ),
        (["--session-end-after", "5"], "--session-end-after must be at least --session-park-after"),
        (["--nonsense"], "'--nonsense' is no flag"),
    ],
)
def test_a_flag_that_has_no_meaning_is_refused_with_what_it_takes(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(flags, capsys, ENVIRONMENT)


def test_a_switch_is_yes_or_no(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([], ENVIRONMENT).near_clients is True
    assert parse(["--near-clients=no"], ENVIRONMENT).near_clients is False
    assert "--near-clients must be yes or no" in refused(["--near-clients=0"], capsys, ENVIRONMENT)


def test_all_mistakes_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-models", "none", "--result-life", "0", "--bogus", "--port=-2"]
    told = refused(flags, capsys, {"TINSMITH_BURST_SECONDS": "long"})
    for flag in ("--max-models", "--result-life", "'--bogus'", "--port", "--burst-seconds", "--data-dir"):
        assert f"\n  {flag} " in told, flag
    assert "TINSMITH_REDIS_URL" in told


def test_every_flag_is_in_the_help_with_its_unit_range_default_and_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        parse(["--help"], {})
    told = capsys.readouterr().out
    for heading in FLAGS:
        assert f"\n{heading}:" in told
    for flag in rows_of(FLAGS):
        assert f"{flag.name} {flag.kind.unit}" in told, flag.name
        assert f"default: {flag.default or 'empty'}; {flag.variable})" in told, flag.name
    assert "--forget-after SECONDS" in told
    assert "(1 to 64; default: 32; TINSMITH_WINDOW_OPERATIONS)" in told


def test_what_is_stated_are_the_limits_of_a_key_by_their_flags() -> None:
    told = stated(parse(["--max-models", "3"], ENVIRONMENT))
    assert told["--max-models"] == 3
    assert {"--memory-mib", "--owner-bytes", "--pending-operations", "--requests-per-second"} <= told.keys()
    assert told["--waiting-sequences"] == Limits().waiting_sequences


def test_every_limit_of_a_key_that_the_document_lists_is_stated() -> None:
    text = Path("docs/reliability.md").read_text(encoding="utf-8")
    table = text.partition("| Flag | Bounds | Default |")[2].partition("\n\n")[0]
    listed = set(re.findall(r"`(--[a-z-]+)`", table))
    assert len(listed) > 10
    assert listed <= stated(parse([], ENVIRONMENT)).keys()
    assert {"--snapshot-bytes", "--snapshot-owner-bytes"} <= stated(parse([], ENVIRONMENT)).keys()
