"""What happens at armed failpoints: a kill, a stop, a delay or an error, also of memory or a device.

TINSMITH_FAILPOINTS holds either a comma-separated list of `POINT=ACTION`, or `dir:PATH`, a directory in
which `arm` puts one file per armed point, so that a running cluster can be armed. Invariants: a name that is
not in POINTS is refused; in a directory each arming fires as often as it says over all processes together,
however often they restart.

    POINT    a name of POINTS, optionally for one process only: trainer.before_pass[trainer-1]
    ACTION   kill[:SECONDS]     SIGKILL to this process, after so long
             stop:SECONDS       SIGSTOP to this process; a helper sends SIGCONT after so long
             delay:SECONDS      waits
             error              raises InjectedFault
             oom                raises what this process has for a lack of device memory
             device             raises what it has for a device that failed
             each with @N (at the N-th time that a process gets there) and *N (N firings, in a directory)
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from services.common.process.failpoints import POINTS

_ACTION = re.compile(r"(kill|stop|delay|error|oom|device)(?::(\d+(?:\.\d+)?))?(?:@(\d+))?(?:\*(\d+))?")
_POINT = re.compile(r"([a-z_.]+)(\[[A-Za-z0-9_-]+\])?")


class InjectedFault(RuntimeError):
    """What the action `error` raises, and one that this process has no error for."""


@dataclass(frozen=True)
class Action:
    """What happens at a point.

    Attributes:
        kind: "kill", "stop", "delay", "error", "oom" or "device".
        seconds: before the kill, or of the stop or delay.
        at: hit of a process that fires, counted from 1.
        times: firings left, in a directory.
    """

    kind: str
    seconds: float
    at: int
    times: int

    @property
    def pause(self) -> float:
        """Seconds that whoever gets there waits before it is carried out."""
        return self.seconds if self.kind in ("kill", "delay") else 0.0

    def __str__(self) -> str:
        return f"{self.kind}:{self.seconds}@{self.at}*{self.times}"


def parse_action(text: str) -> Action:
    """An action of its text.

    Raises:
        ValueError: it is none.
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None or (match[1] in ("stop", "delay") and match[2] is None):
        raise ValueError(
            f"{text!r} is no action: kill[:S], stop:S, delay:S, error, oom, device; with @N and *N"
        )
    return Action(match[1], float(match[2] or 0), int(match[3] or 1), int(match[4] or 1))


def check_point(text: str) -> str:
    """The text, when it is a known point (perhaps of one process).

    Raises:
        ValueError: it is not.
    """
    match = _POINT.fullmatch(text.strip())
    if match is None or match[1] not in POINTS:
        raise ValueError(f"{text!r} is no failpoint; known are {', '.join(POINTS)}")
    return match[0]


def arm(directory: Path, point: str, action: str) -> None:
    """Arms a point of the processes whose variable is `dir:<directory>`.

    Raises:
        ValueError: point or action is not known.
    """
    _put(directory, check_point(point), parse_action(action))


def armed(directory: Path) -> set[str]:
    """Points that are armed and have not fired (as often as they shall)."""
    return {path.name for path in directory.iterdir() if _POINT.fullmatch(path.name)}


def disarm(directory: Path) -> None:
    """Takes all arming away."""
    for name in armed(directory):
        (directory / name).unlink(missing_ok=True)


def _put(directory: Path, point: str, action: Action) -> None:
    temporary = directory / f".{point}-{os.getpid()}-{threading.get_ident()}"
    temporary.write_text(str(action))
    temporary.replace(directory / point)


class _Listed:
    """Points armed by the variable itself, anew in every process."""

    def __init__(self, text: str) -> None:
        self._actions: dict[str, Action] = {}
        for item in filter(None, text.split(",")):
            point, _, action = item.partition("=")
            self._actions[check_point(point)] = parse_action(action)
        self._hits: Counter[str] = Counter()

    def fire(self, key: str) -> Action | None:
        action = self._actions.get(key)
        if action is None:
            return None
        self._hits[key] += 1
        return action if self._hits[key] == action.at else None


class _Watched:
    """Points armed by files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._hits: Counter[tuple[str, int]] = Counter()

    def fire(self, key: str) -> Action | None:
        path = self._directory / key
        try:
            arming = path.stat().st_mtime_ns
        except OSError:
            return None
        self._hits[key, arming] += 1
        with suppress(OSError, ValueError):
            action = parse_action(path.read_text())
            if self._hits[key, arming] < action.at:
                return None
            # Of several processes only the one whose rename succeeds fires.
            path.rename(path.with_name(f".fired-{key}-{os.getpid()}"))
            if action.times > 1:
                _put(self._directory, key, replace(action, times=action.times - 1))
            return action
        return None


class Source(Protocol):
    """Where a process is told what to do at its points."""

    def fire(self, key: str) -> Action | None:
        """What to do at this point now."""


def source(text: str) -> Source:
    """That which the variable's text names.

    Raises:
        ValueError: it names a point or an action that is not known.
    """
    if text.startswith("dir:"):
        return _Watched(Path(text.removeprefix("dir:")))
    return _Listed(text)


def carry_out(action: Action, point: str, errors: Mapping[str, Callable[[str], Exception]]) -> None:
    """Does it, but for the waiting. May not return.

    Args:
        errors: by the actions that stand for them.

    Raises:
        Exception: that is the action.
    """
    if action.kind in ("error", "oom", "device"):
        raise errors.get(action.kind, InjectedFault)(f"failpoint {point}: {action.kind}")
    if action.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action.kind == "stop":
        # In a session of its own, so that it outlives a supervisor that ends this process's group.
        command = f"sleep {action.seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["/bin/sh", "-c", command], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
