"""The trainer knows which operation it died of."""

from __future__ import annotations

from pathlib import Path

from services.trainer.order.crashes import MOST_CRASHES, CrashLedger

KEY, OTHER = ("s:train:0", 7), ("s:train:1", 3)


def died_executing(path: Path, *keys: tuple[str, int], times: int = 1) -> CrashLedger:
    for _ in range(times):
        CrashLedger(path).begin(keys)
    return CrashLedger(path)


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
    assert not CrashLedger(path).is_suspect(KEY)


def test_one_of_which_only_a_part_was_executed_stays_a_suspect(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = died_executing(path, KEY)
    ledger.begin([KEY])
    ledger.end([KEY])
    assert CrashLedger(path).is_suspect(KEY)


def test_who_was_executed_together_with_it_is_a_suspect_too_and_nobody_else(tmp_path: Path) -> None:
    ledger = died_executing(tmp_path / "ledger", KEY, OTHER)
    assert ledger.is_suspect(KEY) and ledger.is_suspect(OTHER)
    assert not ledger.is_suspect(("s:train:0", 8))


def test_an_operation_that_ended_before_the_death_is_not_blamed(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = CrashLedger(path)
    ledger.begin([KEY, OTHER])
    ledger.end([KEY])
    again = CrashLedger(path)
    assert not again.is_suspect(KEY) and again.is_suspect(OTHER)


def test_a_process_that_ends_in_order_blames_nothing(tmp_path: Path) -> None:
    ledger = CrashLedger(tmp_path / "ledger")
    ledger.begin([KEY])
    ledger.close()
    assert list(tmp_path.iterdir()) == []
    assert not CrashLedger(tmp_path / "ledger").is_suspect(KEY)


def test_earlier_deaths_are_remembered_over_an_end_in_order(tmp_path: Path) -> None:
    died_executing(tmp_path / "ledger", KEY).close()
    assert CrashLedger(tmp_path / "ledger").is_suspect(KEY)


def test_what_was_given_up_stays_so_when_its_failure_is_delivered(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = died_executing(path, KEY, times=MOST_CRASHES)
    ledger.survived(KEY)
    assert CrashLedger(path).verdict(KEY) is not None
