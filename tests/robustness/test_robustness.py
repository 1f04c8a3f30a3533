"""Any process is killed, stopped or cut off at any moment: no request is lost, none is done twice.

One short round by default. ROUNDS=n runs n long ones, each of which injects every kind of fault once (every
second one with a trainer of two ranks), and after each trainer's AMID others while it is away. ROUND_SECONDS
bounds each, FAULTS (a regular expression) and REPEAT choose what is injected and how often, REPORT names a
file for the numbers.
"""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path

import pytest

from tests.robustness import faults
from tests.robustness.report import Report
from tests.robustness.round import run_round

ROUNDS = int(os.environ.get("ROUNDS") or "0")
ROUND_SECONDS = float(os.environ.get("ROUND_SECONDS", "3000"))
AMID = int(os.environ.get("AMID", "3"))
SEED = int(os.environ.get("SEED", "0"))


@pytest.mark.timeout(4000)
@pytest.mark.parametrize("number", range(max(1, ROUNDS)))
def test_no_request_is_lost_and_none_is_done_twice(
    number: int, tmp_path: Path, model_dir: Path, total: Report
) -> None:
    started = time.monotonic()
    seed = SEED + number
    if ROUNDS:
        ranks = 1 + seed % 2
        chosen = [fault for fault in faults.ALL.values() if fault.ranks <= ranks]
        chosen = faults.mixed(chosen, random.Random(seed))
    else:
        ranks, chosen = 1, [faults.ALL[name] for name in faults.SHORT]
    if "FAULTS" in os.environ:
        chosen = [fault for fault in chosen if re.search(os.environ["FAULTS"], fault.name)]
    chosen = chosen * int(os.environ.get("REPEAT", "1"))
    groups = faults.grouped(chosen, AMID if ROUNDS else 0, random.Random(seed))
    report = run_round(tmp_path, model_dir, groups, ranks, seed, started + ROUND_SECONDS)
    total.add(report)
    if "REPORT" in os.environ:
        total.write(Path(os.environ["REPORT"]))
    assert report.injected > 0
    assert (report.lost, report.wrong) == ([], [])
