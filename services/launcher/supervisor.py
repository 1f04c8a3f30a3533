"""Keeps processes running: starts them, restarts what dies, stops them in order.

Invariant: when `stop` has returned none of the processes is alive, and none outlives this process
(each has asked the kernel to end with its parent).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.common.contract.errors import Unavailable
from services.common.process.process import REFUSED, die_with_parent
from services.common.process.tasks import cancel_all
from services.launcher.plan import Process

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
STABLE_AFTER_S = 10.0
STARTS_BEFORE_GIVING_UP = 3
_REFUSALS = (2, REFUSED)
"""Exit statuses of a process that does not take its flags, or its settings: it would say the same again."""
_TAIL_LINES = 12


def restart_delay(quick_deaths: int) -> float:
    """Seconds to wait before a restart, after this many deaths within STABLE_AFTER_S of their start."""
    return float(min(FIRST_DELAY_S * 2 ** max(0, quick_deaths - 1), LONGEST_DELAY_S))


@dataclass
class Running:
    """One supervised process.

    Attributes:
        was_ready: it has been ready once; from then on it is restarted without end.
        restarts: how often it was restarted.
    """

    process: Process
    child: asyncio.subprocess.Process | None = None
    started_at: float = 0.0
    was_ready: bool = False
    restarts: int = 0
    quick_deaths: int = 0

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.returncode is None


class Supervisor:
    """Runs processes until told to stop."""

    def __init__(self, log_dir: Path, env: dict[str, str]) -> None:
        """Args: env: the environment of every process, secrets included."""
        self._log_dir = log_dir
        self._env = env
        self._tasks: list[asyncio.Task[None]] = []
        self._spawn_hooks: dict[str, Callable[[int], object]] = {}
        self.running: dict[str, Running] = {}

    def on_spawn(self, name: str, hook: Callable[[int], object]) -> None:
        """Calls `hook(pid)` at every start of a process that writes no pid file itself."""
        self._spawn_hooks[name] = hook

    async def start(self, process: Process) -> None:
        """Starts one process and keeps it running."""
        running = Running(process)
        self.running[process.name] = running
        await self._spawn(running)
        self._tasks.append(asyncio.create_task(self._keep(running), name=f"keep-{process.name}"))

    def raise_failure(self) -> None:
        """Raises what ended the supervision of a process, if anything did.

        Raises:
            Unavailable: before it was ever ready a process died again and again, or refused its settings.
        """
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def stop(self) -> None:
        """Stops everything: SIGTERM in stop order, SIGKILL after each one's grace."""
        await cancel_all(self._tasks)
        for order in sorted({running.process.stop_order for running in self.running.values()}):
            group = [r for r in self.running.values() if r.process.stop_order == order]
            await asyncio.gather(*(_terminate(running) for running in group))

    def kill(self) -> None:
        """Ends everything at once; a `stop` in progress then returns."""
        for running in self.running.values():
            if running.child is not None:
                _signal_group(running.child, signal.SIGKILL)

    async def _keep(self, running: Running) -> None:
        while True:
            assert running.child is not None
            code = await running.child.wait()
            lived = time.monotonic() - running.started_at
            running.quick_deaths = 1 if lived > STABLE_AFTER_S else running.quick_deaths + 1
            name = running.process.name
            if not running.was_ready and code in _REFUSALS:
                raise Unavailable(f"{name} does not take its settings; {self._log_end(name)}")
            if not running.was_ready and running.quick_deaths >= STARTS_BEFORE_GIVING_UP:
                times = f"{running.quick_deaths} times before it was ready (last status {code})"
                raise Unavailable(f"{name} ended {times}; {self._log_end(name)}")
            delay = restart_delay(running.quick_deaths)
            log.warning("%s ended with status %s, restarting in %.1f s", name, code, delay)
            # What the process had started must not meet its successor.
            _signal_group(running.child, signal.SIGKILL)
            await asyncio.sleep(delay)
            running.restarts += 1
            await self._spawn(running)

    async def _spawn(self, running: Running) -> None:
        process = running.process
        with self.log_path(process.name).open("ab") as output:
            running.child = await asyncio.create_subprocess_exec(
                *process.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**self._env, **process.env},
                # A group of its own: Ctrl-C reaches only the supervisor, which stops in order.
                start_new_session=True,
                preexec_fn=lambda: _prepare_child(process.cores),
            )
        running.started_at = time.monotonic()
        if process.name in self._spawn_hooks:
            self._spawn_hooks[process.name](running.child.pid)

    def _log_end(self, name: str) -> str:
        lines = self.log_path(name).read_text(errors="replace").splitlines()
        return "\n    ".join([f"the end of {self.log_path(name)}:", *lines[-_TAIL_LINES:]])

    def log_path(self, name: str) -> Path:
        """Where a process's output goes."""
        return self._log_dir / f"{name}.log"


def _prepare_child(cores: tuple[int, ...]) -> None:
    die_with_parent(signal.SIGTERM)
    if cores:
        os.sched_setaffinity(0, cores)


async def _terminate(running: Running) -> None:
    child = running.child
    if child is None:
        return
    if child.returncode is None:
        child.terminate()
    try:
        async with asyncio.timeout(running.process.grace):
            await child.wait()
    except TimeoutError:
        log.warning("%s did not end in %.0f s, killing it", running.process.name, running.process.grace)
    _signal_group(child, signal.SIGKILL)
    await child.wait()


def _signal_group(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Signals a child and everything it started that stayed in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)
