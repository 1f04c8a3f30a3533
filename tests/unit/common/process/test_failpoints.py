"""Failpoints fire where, when and as often as they are armed, and cost nothing otherwise."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.common.process import failpoints
from services.common.process.faults import armed

SERVICES = Path(failpoints.__file__).parents[2]
POINT = "gateway.after_accept"


def run(code: str, setting: str) -> subprocess.CompletedProcess[str]:
    program = "from services.common.process import failpoints\n"
    program += f"from services.common.process.faults import armed\n{code}"
    environment = {failpoints.VARIABLE: setting, "PYTHONPATH": str(SERVICES.parent)}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )


def hits(count: int, setting: str, process: str = "") -> subprocess.CompletedProcess[str]:
    code = f"failpoints.name_process({process!r})\n"
    code += f"for i in range({count}):\n    failpoints.hit({POINT!r}); print(i)"
    return run(code, setting)


def test_every_point_in_the_source_is_known_and_every_known_point_is_in_the_source() -> None:
    used = set()
    for path in SERVICES.rglob("*.py"):
        used |= set(re.findall(r"failpoints\.(?:hit|reach)\(\s*\"([a-z_.]+)\"", path.read_text()))
    assert used == set(failpoints.POINTS)


def test_nothing_happens_when_the_variable_is_not_set() -> None:
    assert hits(3, "").stdout.split() == ["0", "1", "2"]


def test_a_kill_ends_the_process_at_the_chosen_hit() -> None:
    done = hits(5, f"{POINT}=kill@3")
    assert done.returncode == -signal.SIGKILL


def test_an_error_is_raised_once() -> None:
    code = "for i in range(3):\n"
    code += f"    try:\n        failpoints.hit({POINT!r}); print(i)\n"
    code += "    except armed.InjectedFault:\n        print('fault')"
    assert run(code, f"{POINT}=error@2").stdout.split() == ["0", "fault", "2"]


def test_a_delay_lets_other_tasks_run() -> None:
    code = "import asyncio\n"
    code += "async def main():\n"
    code += f"    at_point = asyncio.create_task(failpoints.reach({POINT!r}))\n"
    code += "    await asyncio.sleep(0.01); print(at_point.done()); await at_point; print('passed')\n"
    code += "asyncio.run(main())"
    assert run(code, f"{POINT}=delay:0.3").stdout.split() == ["False", "passed"]


def test_a_stopped_process_goes_on_after_its_time() -> None:
    started = time.monotonic()
    assert hits(1, f"{POINT}=stop:0.5").stdout.split() == ["0"]
    assert time.monotonic() - started > 0.5


@pytest.mark.parametrize("setting", ["gateway.after_acept=kill", f"{POINT}=explode", f"{POINT}=stop", POINT])
def test_what_is_not_known_is_refused_at_the_start(setting: str) -> None:
    done = hits(1, setting)
    assert done.returncode == 1 and "ValueError" in done.stderr


def test_a_build_without_faults_does_not_start_when_it_is_asked_for_some(tmp_path: Path) -> None:
    image = tmp_path / "services"
    left_out = shutil.ignore_patterns("faults", "__pycache__")
    shutil.copytree(SERVICES / "common", image / "common", ignore=left_out)
    (image / "__init__.py").touch()
    code = "from services.common.process import process, failpoints; import pathlib; print('begins')\n"
    code += (
        f"process.setup_process('x', pathlib.Path({str(tmp_path)!r}))\nfailpoints.hit({POINT!r}); print('ok')"
    )
    for setting, said, wrong in (("", "begins ok", ""), (f"{POINT}=kill", "begins", "unset it")):
        environment = {failpoints.VARIABLE: setting, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )
        assert done.stdout.split() == said.split() and wrong in done.stderr, done.stderr


def test_a_point_of_one_process_leaves_the_others_alone() -> None:
    assert hits(1, f"{POINT}[gateway-1]=kill", "gateway-0").returncode == 0
    assert hits(1, f"{POINT}[gateway-1]=kill", "gateway-1").returncode == -signal.SIGKILL


def test_an_arming_in_a_directory_fires_as_often_as_it_says_over_all_processes(tmp_path: Path) -> None:
    armed.arm(tmp_path, POINT, "kill*2")
    assert armed.armed(tmp_path) == {POINT}
    codes = [hits(1, f"dir:{tmp_path}").returncode for _ in range(4)]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0, 0]
    assert armed.armed(tmp_path) == set()


def test_a_running_process_is_armed_through_its_directory(tmp_path: Path) -> None:
    code = f"import pathlib\nfailpoints.hit({POINT!r})\n"
    code += f"armed.arm(pathlib.Path({str(tmp_path)!r}), {POINT!r}, 'kill')\nfailpoints.hit({POINT!r})"
    assert run(code, f"dir:{tmp_path}").returncode == -signal.SIGKILL


def test_arming_a_typo_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no failpoint"):
        armed.arm(tmp_path, "trainer.befor_pass", "kill")
