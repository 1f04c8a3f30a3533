"""What samplers answered to a call, and why they did not. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import grpc.aio

from services.common.contract.errors import DeadlineExceeded
from services.common.process import rpc

NOT_IN_GROUP, STILL_RECEIVING = "not_in_group", "still_receiving"


def failure(future: asyncio.Future[Any]) -> BaseException | None:
    """Why a future failed; None while it runs, or when it did not."""
    if not future.done():
        return None
    return asyncio.CancelledError() if future.cancelled() else future.exception()


def code(answer: object) -> str:
    """The code of the error that a call failed with; empty when it failed without one, or not."""
    if not isinstance(answer, grpc.aio.AioRpcError):
        return ""
    return str(dict(answer.trailing_metadata() or ()).get(rpc.CODE_METADATA, ""))


def moved(calls: Iterable[asyncio.Future[Any]]) -> bool:
    """Whether a member says that it is in another group."""
    return any(code(failure(call)) == NOT_IN_GROUP for call in calls)


def is_silence(answer: object) -> bool:
    """Whether a call failed without a word from the other side."""
    return isinstance(answer, BaseException) and not code(answer)


def waited_in_vain(own: BaseException | None, answers: Sequence[object]) -> bool:
    """Whether some end of a transfer waited for another until its deadline, and nobody is known to be gone:
    so somebody hangs, who says nothing, and the others say so once they have waited as long.

    Args:
        own: what the sending end failed with; None: it did not, or not yet.
        answers: as of `at_fault`.
    """
    if any(map(is_silence, answers)):
        return False
    return own is not None or any(code(answer) == DeadlineExceeded.default_code for answer in answers)


def at_fault(answers: Sequence[object], absent: Sequence[bool]) -> list[bool]:
    """Which members something failed for. One that says why it failed may only have waited in vain for
    another that says nothing, or is not there.

    Args:
        answers: of each member, what its call failed with; None: it did not.
        absent: of each member, whether it is known not to have come, or to be silent beyond its deadline.
    """
    gone = [is_silence(answer) or away for answer, away in zip(answers, absent, strict=True)]
    return gone if any(gone) else [answer is not None for answer in answers]


def described(error: BaseException) -> str:
    """For the log."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"
