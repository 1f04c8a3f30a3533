"""One request's lists and objects do not have the interpreter walk through all others."""

import subprocess
import sys

from tests.unit.common.process import garbage

_PARSE = """
import gc
import msgspec
from services.common.process.memory import collector
if {settled}:
    collector.settle({young})
before = gc.get_stats()
msgspec.json.decode(b"[" + b"[]," * 350_000 + b"[]]")
print(*(after["collections"] - was["collections"] for after, was in zip(gc.get_stats(), before)))
print(gc.get_freeze_count())
"""


def looks(*, settled: bool, young: int | str = "") -> tuple[list[int], int]:
    """How often the young, older and oldest objects were looked at during a parse, and how many never are."""
    done = subprocess.run(
        [sys.executable, "-c", _PARSE.format(settled=settled, young=young)],
        capture_output=True,
        text=True,
        check=True,
    )
    counts, frozen = done.stdout.splitlines()
    return [int(count) for count in counts.split()], int(frozen)


def test_a_settled_process_hardly_looks_for_garbage_during_a_parse() -> None:
    young, older, oldest = looks(settled=True)[0]
    assert young <= 350_000 / 3_000
    assert older <= young / 10
    assert oldest == 0
    assert looks(settled=False)[0][0] > 400, (
        "the interpreter has changed, and this may not be needed any more"
    )


def test_a_process_whose_young_go_by_themselves_looks_at_them_less_often() -> None:
    assert looks(settled=True, young=20_000)[0][0] <= 350_000 / 20_000


def test_what_was_loaded_before_is_not_looked_at_again() -> None:
    assert looks(settled=True)[1] > 10_000
    assert looks(settled=False)[1] == 0


def test_a_process_that_ends_does_not_look_for_garbage() -> None:
    skips = "from services.common.process.memory import collector; collector.skip_at_exit()"
    assert not garbage.is_looked_for_after(skips)
    assert garbage.is_looked_for_after(""), "the interpreter has changed, and this may not be needed any more"
