"""A process knows which request it died of."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.process import crashes
from services.common.process.crashes import MOST_CRASHES, REST_S

Key = tuple[str, int]
KEY, OTHER = ("s:train:0", 7), ("s:train:1", 3)


def started(path: Path, clock: Callable[[], float] = time.time) -> crashes.CrashLedger[Key]:
    """That of a process that starts."""
    return crashes.CrashLedger(path, Key, "trainer", clock)


def died_executing(path: Path, *keys: Key, times: int = 1) -> crashes.CrashLedger[Key]:
    for _ in range(times):
        started(path).begin(keys)
    return started(path)


def test_an_operation_is_given_up_after_three_deaths_in_a_row_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "run" / "ledger"
    assert died_executing(path, KEY, times=MOST_CRASHES - 1).verdict(KEY) is None
    error = died_executing(path, KEY).verdict(KEY)
    assert error is not None and error.category == "server" and error.code == "crashed_trainer"


def test_one_that_was_executed_after_all_is_no_suspect_any_more(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = died_executing(path, KEY, times=2)
    assert ledger.is_suspect(KEY)
    ledger.begin([KEY])
    ledger.end([KEY])
    ledger.survived(KEY)
    assert not started(path).is_suspect(KEY)


def test_one_of_which_only_a_part_was_executed_stays_a_suspect(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = died_executing(path, KEY)
    ledger.begin([KEY])
    ledger.end([KEY])
    assert started(path).is_suspect(KEY)


def test_who_was_executed_together_with_it_is_a_suspect_too_and_nobody_else(tmp_path: Path) -> None:
    ledger = died_executing(tmp_path / "ledger", KEY, OTHER)
    assert ledger.is_suspect(KEY) and ledger.is_suspect(OTHER)
    assert not ledger.is_suspect(("s:train:0", 8))


def test_an_operation_that_ended_before_the_death_is_not_blamed(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = started(path)
    ledger.begin([KEY, OTHER])
    ledger.end([KEY])
    again = started(path)
    assert not again.is_suspect(KEY) and again.is_suspect(OTHER)


def test_a_process_that_ends_in_order_blames_nothing(tmp_path: Path) -> None:
    ledger = started(tmp_path / "ledger")
    ledger.begin([KEY])
    ledger.close()
    assert list(tmp_path.iterdir()) == []
    assert not started(tmp_path / "ledger").is_suspect(KEY)


def test_earlier_deaths_are_remembered_over_an_end_in_order(tmp_path: Path) -> None:
    died_executing(tmp_path / "ledger", KEY).close()
    assert started(tmp_path / "ledger").is_suspect(KEY)


def test_what_was_given_up_stays_so_when_its_failure_is_delivered(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = died_executing(path, KEY, times=MOST_CRASHES)
    ledger.survived(KEY)
    assert started(path).verdict(KEY) is not None


def test_one_that_was_given_up_is_begun_once_more_after_an_hour_and_rests_again_if_that_is_a_death(
    tmp_path: Path,
) -> None:
    path, now = tmp_path / "ledger", time.time()
    died_executing(path, KEY, times=MOST_CRASHES)
    assert started(path, lambda: now + REST_S - 10).verdict(KEY) is not None
    rested = started(path, lambda: now + REST_S + 10)
    assert rested.verdict(KEY) is None
    assert rested.is_suspect(KEY), "it runs alone"
    rested.begin([KEY])
    again = started(path, lambda: now + REST_S + 20)
    assert again.verdict(KEY) is not None
    assert started(path, lambda: now + 2 * REST_S + 10).verdict(KEY) is not None
    last = started(path, lambda: now + 2 * REST_S + 30)
    assert last.verdict(KEY) is None
    last.survived(KEY)
    assert last.deaths(KEY) == 0


def test_one_that_was_given_up_is_begun_once_more_after_an_end_in_order(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    died_executing(path, KEY, times=MOST_CRASHES).close()
    ledger = started(path)
    assert ledger.verdict(KEY) is None and ledger.is_suspect(KEY)
    ledger.begin([KEY])
    assert started(path).verdict(KEY) is not None


def test_who_has_shown_that_it_does_no_harm_is_blamed_only_when_nobody_else_can_be(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = started(path)
    ledger.begin([KEY, OTHER])
    ledger.acquit(KEY)
    again = started(path)
    assert (again.deaths(KEY), again.deaths(OTHER)) == (0, 1)
    again.begin([KEY])
    again.acquit(KEY)
    assert started(path).deaths(KEY) == 1


def test_of_a_death_that_was_told_of_the_request_that_is_named_is_given_up_at_once_and_no_other_blamed(
    tmp_path: Path,
) -> None:
    path, now = tmp_path / "ledger", time.time()
    started(path).begin([KEY, OTHER])
    cause = crashes.Cause(KEY, "out_of_memory", "it does not fit")
    for ledger in (
        crashes.CrashLedger[Key](path, Key, "trainer", died_of=cause),
        # The next one has it from the file.
        started(path),
    ):
        error = ledger.verdict(KEY)
        assert error is not None
        assert (error.category, error.code, error.message) == ("server", "out_of_memory", "it does not fit")
        assert not ledger.is_suspect(OTHER)
    rested = started(path, lambda: now + REST_S + 10)
    assert rested.verdict(KEY) is None
    rested.begin([KEY])
    again = started(path, lambda: now + REST_S + 20).verdict(KEY)
    assert again is not None and again.code == "crashed_trainer", "this death was of something else"


def test_of_a_death_that_was_told_of_and_is_no_requests_none_is_blamed(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    died_executing(path, KEY, times=MOST_CRASHES - 1).begin([KEY, OTHER])
    ledger = crashes.CrashLedger[Key](path, Key, "trainer", died_of=crashes.Cause())
    assert (ledger.deaths(KEY), ledger.deaths(OTHER)) == (MOST_CRASHES - 1, 0)


def test_who_was_not_under_way_is_not_blamed_whatever_was_told(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    started(path).begin([OTHER])
    ledger = crashes.CrashLedger[Key](path, Key, "trainer", died_of=crashes.Cause(KEY, "out_of_memory", "no"))
    assert ledger.verdict(KEY) is None


def test_a_line_that_the_process_died_in_changes_nothing_and_hides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    started(path).begin([KEY])
    with path.open("ab") as file:
        file.write(b'{"ended":[["s:trai')
    assert started(path).is_suspect(KEY)


def test_the_file_stays_small_however_much_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crashes, "_MOST_BYTES", 2000)
    path = tmp_path / "ledger"
    ledger = died_executing(path, OTHER)
    ledger.begin([KEY])
    for seq_id in range(500):
        ledger.begin([("s:train:2", seq_id)])
        ledger.end([("s:train:2", seq_id)])
        assert path.stat().st_size < 2100
    again = started(path)
    assert (again.deaths(KEY), again.deaths(OTHER), again.deaths(("s:train:2", 499))) == (1, 1, 0)


def test_a_ledger_that_cannot_be_written_any_more_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(crashes, "_MOST_BYTES", 1000)
    ledger = started(tmp_path / "run" / "ledger")
    (tmp_path / "run").rename(tmp_path / "away")
    for _ in range(100):
        ledger.begin([KEY])
        ledger.end([KEY])
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("which requests are executed was not written down: ledger: ")
    ledger.begin([OTHER])
    (tmp_path / "away").rename(tmp_path / "run")
    ledger.begin([KEY])
    again = started(tmp_path / "run" / "ledger")
    assert again.is_suspect(KEY) and again.is_suspect(OTHER)


def test_a_process_starts_also_where_its_ledger_cannot_be_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    started(path)
    # In the way of the file that is to take its place.
    (tmp_path / "ledger.new").mkdir()
    ledger = started(path)
    ledger.begin([KEY])
    (tmp_path / "ledger.new").rmdir()
    assert started(path).is_suspect(KEY)


def test_a_line_for_which_the_disk_had_no_space_is_made_up_for_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    ledger = started(tmp_path / "ledger")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        ledger.begin([KEY])
    ledger.begin([OTHER])
    again = started(tmp_path / "ledger")
    assert again.is_suspect(KEY) and again.is_suspect(OTHER)


def test_what_a_disk_took_in_part_only_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, write = started(tmp_path / "ledger"), os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, text: write(file, text[:5]))
        ledger.begin([KEY])
    ledger.begin([OTHER])
    again = started(tmp_path / "ledger")
    assert again.is_suspect(KEY) and again.is_suspect(OTHER)


def test_a_ledger_that_could_not_be_opened_at_the_start_is_written_once_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", away)
        ledger = started(tmp_path / "ledger")
        ledger.begin([KEY])
    ledger.begin([OTHER])
    again = started(tmp_path / "ledger")
    assert again.is_suspect(KEY) and again.is_suspect(OTHER)


def test_a_disk_that_hangs_holds_a_process_up_for_a_moment_and_once_and_what_it_missed_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers, write = threading.Event(), os.write

    def hangs(file: int, text: bytes) -> int:
        assert answers.wait(60)
        return write(file, text)

    ledger, began = started(tmp_path / "ledger"), time.monotonic()
    monkeypatch.setattr(os, "write", hangs)
    for _ in range(100):
        ledger.begin([KEY])
        ledger.end([KEY])
    ledger.begin([OTHER])
    assert time.monotonic() - began < 10
    assert caplog.messages == ["which requests are executed was not written down: ledger: the disk hangs"]
    answers.set()
    assert ledger._under_way is not None
    ledger._under_way.result(60)
    ledger.begin([("s:train:2", 1)])
    again = started(tmp_path / "ledger")
    assert again.is_suspect(OTHER) and not again.is_suspect(KEY)


def test_a_process_ends_in_order_also_where_its_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, replace = threading.Event(), Path.replace

    def hangs(path: Path, target: Path) -> Path:
        assert answers.wait(60)
        return replace(path, target)

    ledger, began = started(tmp_path / "ledger"), time.monotonic()
    monkeypatch.setattr(Path, "replace", hangs)
    ledger.close()
    ledger.end([KEY])
    assert time.monotonic() - began < 10
    answers.set()
