"""The supervisor, over real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from services.common.contract.errors import Unavailable
from services.common.process.process import REFUSED
from services.launcher import supervisor as supervision
from services.launcher.plan import Process
from services.launcher.supervisor import Supervisor, restart_delay

SLEEPER = (sys.executable, "-c", "import time; print('started', flush=True); time.sleep(60)")


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


def test_restarts_come_later_and_later_up_to_a_limit() -> None:
    delays = [restart_delay(deaths) for deaths in range(1, 12)]
    assert delays == sorted(delays)
    assert delays[0] == supervision.FIRST_DELAY_S
    assert delays[-1] == supervision.LONGEST_DELAY_S


async def test_a_process_that_was_killed_is_started_again(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, dict(os.environ))
    await supervisor.start(Process("sleeper", SLEEPER))
    running = supervisor.running["sleeper"]
    running.was_ready = True
    assert running.child is not None
    first = running.child.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: running.restarts == 1 and running.alive)
    assert running.child.pid != first
    await supervisor.stop()
    assert not psutil.pid_exists(running.child.pid)


async def test_a_process_that_never_gets_ready_ends_the_supervision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.01)
    supervisor = Supervisor(tmp_path, dict(os.environ))
    await supervisor.start(Process("broken", (sys.executable, "-c", "raise SystemExit(7)")))

    def failed() -> bool:
        try:
            supervisor.raise_failure()
        except Unavailable as error:
            return "status 7" in str(error) and "broken.log" in str(error)
        return False

    await until(failed)
    await supervisor.stop()


@pytest.mark.parametrize("status", [2, REFUSED])
async def test_settings_that_a_process_refuses_end_the_supervision_at_once_however_long_that_took_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(supervision, "STABLE_AFTER_S", 0.0)
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.01)
    supervisor = Supervisor(tmp_path, dict(os.environ))
    refusing = f"print('give --max-context 7', flush=True); raise SystemExit({status})"
    await supervisor.start(Process("refusing", (sys.executable, "-c", refusing)))
    (keeping,) = supervisor._tasks
    with pytest.raises(
        Unavailable, match=r"refusing does not take its settings; (.|\n)*give --max-context 7"
    ):
        async with asyncio.timeout(60):
            await keeping
    assert supervisor.running["refusing"].restarts == 0
    await supervisor.stop()


async def test_a_process_that_was_ready_is_started_again_whatever_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.01)
    supervisor = Supervisor(tmp_path, dict(os.environ))
    waiting = f"import time; time.sleep(0.5); raise SystemExit({REFUSED})"
    await supervisor.start(Process("waiting", (sys.executable, "-c", waiting)))
    running = supervisor.running["waiting"]
    running.was_ready = True
    await until(lambda: running.restarts >= 2)
    await supervisor.stop()


async def test_a_process_that_ignores_the_request_to_stop_is_killed(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('up', flush=True); time.sleep(60)"
    )
    supervisor = Supervisor(tmp_path, dict(os.environ))
    await supervisor.start(Process("stubborn", (sys.executable, "-c", stubborn), grace=0.3))
    await until(lambda: "up" in supervisor.log_path("stubborn").read_text())
    await supervisor.stop()
    child = supervisor.running["stubborn"].child
    assert child is not None and child.returncode == -signal.SIGKILL


async def test_what_a_process_had_started_ends_with_it(tmp_path: Path) -> None:
    parent = (
        "import subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    supervisor = Supervisor(tmp_path, dict(os.environ))
    await supervisor.start(Process("parent", (sys.executable, "-c", parent)))
    await until(lambda: supervisor.log_path("parent").read_text().strip().isdigit())
    grandchild = psutil.Process(int(supervisor.log_path("parent").read_text()))
    await supervisor.stop()
    _, alive = psutil.wait_procs([grandchild], timeout=60)
    assert alive == []


async def test_processes_are_stopped_in_order(tmp_path: Path) -> None:
    script = (
        "import signal, sys, time\n"
        "def end(*_):\n    open(sys.argv[2], 'a').write(sys.argv[1]); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True); time.sleep(60)"
    )
    order = tmp_path / "order"
    supervisor = Supervisor(tmp_path, dict(os.environ))
    for name, position in (("b", 1), ("c", 2), ("a", 0)):
        argv = (sys.executable, "-c", script, name, str(order))
        await supervisor.start(Process(name, argv, stop_order=position))
    await until(lambda: all("up" in supervisor.log_path(name).read_text() for name in "abc"))
    await supervisor.stop()
    assert order.read_text() == "abc"
