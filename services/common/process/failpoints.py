"""Named places where a test can make a process fail: killed, stopped, slowed down or given an error, also
one of memory or of a device.

What happens there is in `faults/armed.py`, which production images do not hold. Invariants: without the
variable TINSMITH_FAILPOINTS a point costs one comparison and does nothing; with it, a process that holds no
faults does not start.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.common.process.faults.armed import Action, Source

VARIABLE = "TINSMITH_FAILPOINTS"
POINTS: Mapping[str, str] = {
    "gateway.after_accept": "an operation is journaled, the client does not know yet",
    "gateway.after_accept_sample": "a sample is kept, the client does not know yet",
    "gateway.lease_taken": "this gateway leads a model, and has not looked at its journal",
    "gateway.before_record": "the trainer answered, nothing is written down",
    "gateway.before_publish": "records are written, the result is not published",
    "gateway.after_tell": "who waits here has what a forward came to, the result is not published",
    "gateway.after_publish": "the result is published",
    "gateway.before_publish_sample": "the sampler answered, the result is not published",
    "trainer.before_pass": "every rank has a pass of forward_backwards and has not begun",
    "trainer.mid_batch": "this rank has the log-probabilities of a micro-batch, no gradient",
    "trainer.mid_split": "this rank has the log-probabilities of a sequence that all compute, no gradient",
    "trainer.after_pass": "this rank has finished a pass, the others do not know",
    "trainer.before_pass_reply": "all ranks have finished a pass, nobody has been answered",
    "trainer.before_step": "every rank has an optim_step and has not begun",
    "trainer.before_step_memory": "a rank takes memory before what all do together, nothing is changed",
    "trainer.mid_step": "the gradient is summed over the ranks, the weights are not changed",
    "trainer.after_step": "this rank's weights are changed, the others do not know",
    "trainer.before_step_reply": "all ranks have stepped, nobody has been answered",
    "trainer.before_return": "an adapter is to come back from the host, its memory is not taken",
    "trainer.mid_restore": "a model's state is read, the ranks do not have it yet",
    "trainer.before_rename": "a directory is written and not yet in place",
    "trainer.after_rename": "a directory is in place",
    "trainer.before_pointer": "a durable snapshot is complete, nothing points to it",
    "trainer.after_pointer": "the pointer names the new snapshot, the older ones are still there",
    "trainer.mid_broadcast": "the samplers are told of a broadcast, the trainer has not sent it",
    "sampler.mid_receive": "an engine is told of a broadcast and does not take part yet",
    "sampler.mid_generation": "sequences are with the engine",
    "sampler.before_reply": "a sample is complete, the gateway does not know",
}
_text = os.environ.get(VARIABLE, "")
_process = ""
_lock = threading.Lock()
_errors: dict[str, Callable[[str], Exception]] = {}


def name_process(name: str) -> None:
    """Tells by which name `POINT[NAME]` means this process.

    Raises:
        SystemExit: it is to have faults, and there are none in this build.
        ValueError: a point or action of the variable is not known.
    """
    global _process
    _process = name
    if _text:
        _source()


def name_error(action: str, error: Callable[[str], Exception]) -> None:
    """Tells what an action that stands for a library's error raises, which this room does not know."""
    _errors[action] = error


def hit(point: str) -> None:
    """This thread is at a point. May not return.

    Raises:
        InjectedFault: the point's action is `error`.
        Exception: it is `oom` or `device`: what stands for that in this process.
    """
    if _text and (action := _next_action(point)) is not None:
        time.sleep(action.pause)
        _carry_out(action, point)


async def reach(point: str) -> None:
    """`hit` for a coroutine: other tasks go on while it waits."""
    if _text and (action := _next_action(point)) is not None:
        await asyncio.sleep(action.pause)
        _carry_out(action, point)


@cache
def _source() -> Source:
    try:
        from services.common.process.faults import armed
    except ModuleNotFoundError:
        raise SystemExit(f"{VARIABLE} is set, and this build has no faults to inject: unset it") from None
    return armed.source(_text)


def _next_action(point: str) -> Action | None:
    assert point in POINTS
    with _lock:
        return _source().fire(f"{point}[{_process}]") or _source().fire(point)


def _carry_out(action: Action, point: str) -> None:
    from services.common.process.faults import armed

    armed.carry_out(action, point, _errors)
