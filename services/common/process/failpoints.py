"""Named places where a test can make a process fail: killed, stopped, slowed down or given an error.

TINSMITH_FAILPOINTS holds either a comma-separated list of `POINT=ACTION`, or `dir:PATH`, a directory in
which `arm` puts one file per armed point, so that a running cluster can be armed. Invariants: without the
variable a point costs one comparison and does nothing; a name that is not in POINTS is refused; in a
directory each arming fires as often as it says over all processes together, however often they restart.

    POINT    a name of POINTS, optionally for one process only: trainer.before_pass[trainer-1]
    ACTION   kill[:SECONDS]     SIGKILL to this process, after so long
             stop:SECONDS       SIGSTOP to this process; a helper sends SIGCONT after so long
             delay:SECONDS      waits
             error              raises InjectedFault
             each with @N (at the N-th time that a process gets there) and *N (N firings, in a directory)
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

VARIABLE = "TINSMITH_FAILPOINTS"
POINTS: Mapping[str, str] = {
    "gateway.after_accept": "an operation is journaled, the client does not know yet",
    "gateway.after_accept_sample": "a sample is kept, the client does not know yet",
    "gateway.lease_taken": "this gateway leads a model, and has not looked at its journal",
    "gateway.before_record": "the trainer answered, nothing is written down",
    "gateway.before_publish": "records are written, the result is not published",
    "gateway.after_publish": "the result is published",
    "gateway.before_publish_sample": "the sampler answered, the result is not published",
    "trainer.before_pass": "every rank has a pass of forward_backwards and has not begun",
    "trainer.after_pass": "this rank has finished a pass, the others do not know",
    "trainer.before_pass_reply": "all ranks have finished a pass, nobody has been answered",
    "trainer.before_step": "every rank has an optim_step and has not begun",
    "trainer.mid_step": "the gradient is summed over the ranks, the weights are not changed",
    "trainer.after_step": "this rank's weights are changed, the others do not know",
    "trainer.before_step_reply": "all ranks have stepped, nobody has been answered",
    "trainer.before_rename": "a directory is written and not yet in place",
    "trainer.after_rename": "a directory is in place",
    "trainer.before_pointer": "a durable snapshot is complete, nothing points to it",
    "trainer.after_pointer": "the pointer names the new snapshot, the older ones are still there",
    "trainer.mid_broadcast": "the samplers are told of a broadcast, the trainer has not sent it",
    "sampler.mid_receive": "an engine is told of a broadcast and does not take part yet",
    "sampler.mid_generation": "sequences are with the engine",
    "sampler.before_reply": "a sample is complete, the gateway does not know",
}
_ACTION = re.compile(r"(kill|stop|delay|error)(?::(\d+(?:\.\d+)?))?(?:@(\d+))?(?:\*(\d+))?")
_POINT = re.compile(r"([a-z_.]+)(\[[A-Za-z0-9_-]+\])?")


class InjectedFault(RuntimeError):
    """What the action `error` raises."""


@dataclass(frozen=True)
class Action:
    """What happens at a point.

    Attributes:
        kind: "kill", "stop", "delay" or "error".
        seconds: before the kill, or of the stop or delay.
        at: hit of a process that fires, counted from 1.
        times: firings left, in a directory.
    """

    kind: str
    seconds: float = 0.0
    at: int = 1
    times: int = 1

    def __str__(self) -> str:
        return f"{self.kind}:{self.seconds}@{self.at}*{self.times}"


def parse_action(text: str) -> Action:
    """An action of its text.

    Raises:
        ValueError: it is none.
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None or (match[1] in ("stop", "delay") and match[2] is None):
        raise ValueError(f"{text!r} is no action: kill[:S], stop:S, delay:S or error, with @N and *N")
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


def _source(text: str) -> _Listed | _Watched | None:
    if text.startswith("dir:"):
        return _Watched(Path(text.removeprefix("dir:")))
    return _Listed(text) if text else None


_points = _source(os.environ.get(VARIABLE, ""))
_process = ""
_lock = threading.Lock()


def name_process(name: str) -> None:
    """Tells by which name `POINT[NAME]` means this process."""
    global _process
    _process = name


def hit(point: str) -> None:
    """This thread is at a point. May not return.

    Raises:
        InjectedFault: the point's action is `error`.
    """
    if _points is None:
        return
    action = _next_action(point)
    if action is None:
        return
    if action.kind in ("kill", "delay"):
        time.sleep(action.seconds)
    _carry_out(action, point)


async def reach(point: str) -> None:
    """`hit` for a coroutine: other tasks go on while it waits."""
    if _points is None:
        return
    action = _next_action(point)
    if action is None:
        return
    if action.kind in ("kill", "delay"):
        await asyncio.sleep(action.seconds)
    _carry_out(action, point)


def _next_action(point: str) -> Action | None:
    assert _points is not None and point in POINTS
    with _lock:
        return _points.fire(f"{point}[{_process}]") or _points.fire(point)


def _carry_out(action: Action, point: str) -> None:
    if action.kind == "error":
        raise InjectedFault(f"failpoint {point}")
    if action.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action.kind == "stop":
        # In a session of its own, so that it outlives a supervisor that ends this process's group.
        command = f"sleep {action.seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["/bin/sh", "-c", command], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
