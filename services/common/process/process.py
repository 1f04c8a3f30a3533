"""The life of a service process: its pid file, its parent, its signals, its end.

Invariants: a process whose parent is gone ends too, a pid file names a process that runs or was cut off, what
a process of the cluster writes is for its user alone, and one whose work has ended is gone within seconds, so
that it can be started again.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from services.common.contract import variables
from services.common.contract.errors import InvalidRequest
from services.common.process import failpoints
from services.common.process.memory import collector

log = logging.getLogger(__name__)

REFUSED = os.EX_CONFIG
"""Exit status of a process that refuses its settings or its model: started again it would say the same."""
_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
_MEMORY_USED = Path("/sys/fs/cgroup/memory.current")
_MEMORY_KINDS = Path("/sys/fs/cgroup/memory.stat")
_MACHINE = Path("/proc/meminfo")
_EXIT_S = 5.0

T = TypeVar("T")


def die_with_parent(signal_number: int = signal.SIGKILL, parent: int = 0) -> None:
    """Asks the kernel to send this process a signal when its parent ends (Linux; elsewhere nothing).

    Call it first thing in a child: a parent that ended earlier is noticed by the changed parent
    pid, and the child ends at once.

    Args:
        parent: pid that the parent must have; 0: that of the one there is now. A child that starts an
            interpreter first is told, because its parent may have ended by then.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)


def end_with_parent() -> None:
    """Has this process told by SIGTERM when its parent ends, unless who started it chose a signal for that.

    A container's first process has no parent to die with.
    """
    if os.getppid() != 0 and os.getpid() != 1 and not _tied():
        die_with_parent(signal.SIGTERM)


def _tied() -> bool:
    """Whether the kernel sends this process a signal when its parent ends; it keeps that over an exec."""
    if not sys.platform.startswith("linux"):
        return False
    number = ctypes.c_int()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0)
    return number.value != 0


def status_of(error: BaseException) -> int:
    """Exit status of a process that ends with an error before it serves: REFUSED for what it has against its
    settings or its model, else 1."""
    return REFUSED if isinstance(error, InvalidRequest) else 1


def machine_memory() -> int:
    """Bytes of memory of this machine, or of the container that this process runs in."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _MEMORY_LIMIT.read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def free_machine_memory() -> int:
    """Bytes of `machine_memory` that could be had now: what is cached of files the kernel gives up for it.
    All of it where the kernel does not say."""
    total = machine_memory()
    free = min(total, 1024 * _number(_MACHINE, "MemAvailable:", total // 1024))
    try:
        limit, used = _MEMORY_LIMIT.read_text().strip(), int(_MEMORY_USED.read_text())
    except OSError:
        return free
    if not limit.isdigit():
        return free
    return max(0, min(free, int(limit) - used + _number(_MEMORY_KINDS, "inactive_file", 0)))


def _number(path: Path, name: str, otherwise: int) -> int:
    """That behind a name in a file of the kernel's, one a line."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return otherwise
    return next((int(line[1]) for line in lines if line[:1] == [name]), otherwise)


def write_pid_file(run_dir: Path, name: str) -> None:
    """Writes `<name>.pid` and removes it at exit, unless a later process has taken it over."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / f"{name}.pid"
    pid = os.getpid()
    path.write_text(f"{pid}\n")

    def remove() -> None:
        # A forked child inherits this hook; only the process itself owns the file.
        if os.getpid() == pid and path.exists() and path.read_text().strip() == str(pid):
            path.unlink(missing_ok=True)

    atexit.register(remove)


def keep_files_private() -> None:
    """From now on, what this process and its children make is for its user alone: 0700 and 0600."""
    os.umask(0o077)


def setup_process(name: str, run_dir: Path | None) -> None:
    """What every service does first: keeps its files private, dies with its parent, writes its pid file,
    sees to it that its end is quick, warns of variables that nothing reads.

    `run_dir` is for the pid file; None = it writes none, since the directory is another machine's.
    `tinsmith up` refuses such variables; a service only warns, because one of a newer release that a rollback
    leaves behind must not keep a cluster from starting.
    """
    keep_files_private()
    end_with_parent()
    if run_dir is not None:
        write_pid_file(run_dir, name)
    collector.skip_at_exit()
    failpoints.name_process(name)
    for mistake in variables.mistakes(os.environ):
        log.warning("%s", mistake)


def allow_open_files() -> int:
    """Lets this process have as many files and connections open as the system allows it; how many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


async def wait_for_signal() -> signal.Signals:
    """The first SIGTERM, SIGINT or SIGHUP that reaches this process."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()

    def note(number: signal.Signals) -> None:
        if not received.done():
            received.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, note, number)
    return await received


class _Unwaited(ThreadPoolExecutor):
    """A loop's threads, for which its end does not wait."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def run(work: Coroutine[Any, Any, T]) -> T:
    """What the work of a service comes to. The end of its loop waits for no thread: a file that one reads or
    writes may take hours, and the loop would stand still meanwhile."""

    async def begin() -> T:
        asyncio.get_running_loop().set_default_executor(_Unwaited(thread_name_prefix="asyncio"))
        return await work

    # Not where only the memory of a machine is asked for, as on one that has torch and little else.
    import uvloop

    return uvloop.run(begin())


def exit_after(main: Callable[[], int]) -> NoReturn:
    """Runs a service and ends the process with its status; within seconds of that also where a thread reads
    or writes a file, or is stuck in a collective."""
    status = 1
    try:
        status = main()
    except SystemExit as asked:
        status = 0 if asked.code is None else asked.code if isinstance(asked.code, int) else status
        raise
    finally:
        watchdog = threading.Timer(_EXIT_S, lambda: os._exit(status))
        watchdog.daemon = True
        watchdog.start()
    sys.exit(status)
