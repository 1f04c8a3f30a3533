"""The demo shows its own lines, and how long it still takes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo.pace import SHARES, Pace, words

SPEAKS = """
import sys, warnings, os, subprocess
from pathlib import Path
from examples.demo.quiet import quiet
with quiet(Path(sys.argv[1])):
    print("the demo's own line")
    warnings.warn("a library's warning")
    print("a library's line", file=sys.stderr)
    os.write(2, b"compiled code\\n")
    subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('a child\\\\n')"])
    if sys.argv[2:]:
        raise RuntimeError("what went wrong")
print("afterwards", file=sys.stderr)
"""


def spoken(tmp_path: Path, *arguments: str) -> tuple[int, str, str, str]:
    """Exit status, stdout, stderr and log."""
    log = tmp_path / "data" / "demo" / "demo.log"
    command = [sys.executable, "-c", SPEAKS, str(log), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    return done.returncode, done.stdout, done.stderr, log.read_text()


def test_what_libraries_say_goes_to_the_log(tmp_path: Path) -> None:
    status, shown, errors, log = spoken(tmp_path)
    assert (status, shown, errors) == (0, "the demo's own line\n", "afterwards\n")
    for said in ("a library's warning", "a library's line", "compiled code", "a child"):
        assert said in log


def test_what_it_makes_directories_for_is_its_users_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    spoken(tmp_path)
    for made in ("data", "data/demo"):
        assert (tmp_path / made).stat().st_mode & 0o077 == 0, made
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_an_error_is_shown_on_the_terminal(tmp_path: Path) -> None:
    status, _, errors, _ = spoken(tmp_path, "fail")
    assert status == 1
    assert "RuntimeError: what went wrong" in errors


def test_before_anything_is_done_the_whole_is_left() -> None:
    assert Pace().left("model") == sum(SHARES.values())


def test_a_slower_machine_has_more_left_and_is_believed_the_more_the_longer_it_is_slow() -> None:
    pace = Pace()
    factors = []
    for part, following in itertools.pairwise(SHARES):
        pace.finish(part, 3 * SHARES[part])
        later = list(SHARES)[list(SHARES).index(following) + 1 :]
        expected = SHARES[following] / 2 + sum(SHARES[name] for name in later)
        factors.append(pace.left(following, done=0.5) / expected)
    assert factors == sorted(factors)
    assert 1 < factors[0] < 2
    assert 2 < factors[-1] < 3


def test_a_part_that_an_earlier_run_had_done_says_nothing_about_the_pace() -> None:
    pace = Pace()
    pace.finish("model", 0.01)
    assert pace.left("cluster") == sum(SHARES.values()) - SHARES["model"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "about 10 s left"),
        (33, "about 30 s left"),
        (61, "about 1 min left"),
        (200, "about 3.5 min left"),
        (1000, "about 17 min left"),
    ],
)
def test_a_time_is_said_roughly(seconds: float, said: str) -> None:
    assert words(seconds) == said
