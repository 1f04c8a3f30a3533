"""On whose behalf a task works: the call of a client, its owner, the model and the request.

Invariants: what a task notes or logs names the call that it serves, or none, and never another one's. One
trace id goes with a call through every process that has a part in it: in the metadata of gRPC calls
(`traceparent`, as W3C Trace Context has it) and in what is journaled of it (`Origin`), so that also what
another process takes up later is told of under it.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

METADATA = "traceparent"
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16


_random = random.Random()
"""Ids are told apart by them, and nothing is kept from anybody: the system is not asked for each."""
os.register_at_fork(after_in_child=_random.seed)


def _trace_id() -> str:
    return f"{_random.getrandbits(128):032x}"


def _span_id() -> str:
    return f"{_random.getrandbits(64):016x}"


@dataclass(slots=True)
class Subject:
    """What is known of the call that a task serves; empty: not known.

    Attributes:
        trace_id: 32 hexadecimal digits, the same in every process.
        span_id: 16 of them: of what is done of it here.
        sampled: whether its spans are exported.
        joined: whether the span is one that exists: the caller's, or ours.
        owner: of the API key.
        model_id: the model it is about.
        request_id: what its result is fetched by.
        refused: code of the error that it comes to, where the call answers with a request_id all the same.
        received, sent: bytes of the bodies of the call, where they are counted.
    """

    trace_id: str = field(default_factory=_trace_id)
    span_id: str = field(default_factory=_span_id)
    sampled: bool = False
    joined: bool = False
    owner: str = ""
    model_id: str = ""
    request_id: str = ""
    refused: str = ""
    received: int = 0
    sent: int = 0

    @classmethod
    def of(cls, traceparent: str, owner: str = "", model_id: str = "", request_id: str = "") -> Subject:
        """The subject of a call with this `traceparent`; one of its own when that is none."""
        found = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
        if found is None or found[1] == _NO_TRACE or found[2] == _NO_SPAN:
            return cls(owner=owner, model_id=model_id, request_id=request_id)
        sampled = bool(int(found[3], 16) & 1)
        return cls(found[1], found[2], sampled, True, owner, model_id, request_id)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


_CURRENT: ContextVar[Subject | None] = ContextVar("subject", default=None)


def current() -> Subject | None:
    """The subject of this task."""
    return _CURRENT.get()


def begin(subject: Subject) -> Subject:
    """Makes it the subject of this task, to the task's end. Tasks that it starts have the same."""
    _CURRENT.set(subject)
    return subject


@contextmanager
def about(subject: Subject) -> Iterator[Subject]:
    """Makes it the subject within the context."""
    token = _CURRENT.set(subject)
    try:
        yield subject
    finally:
        _CURRENT.reset(token)


def note(owner: str = "", model_id: str = "", request_id: str = "", refused: str = "") -> None:
    """What has become known of the call that this task serves."""
    subject = _CURRENT.get()
    if subject is not None:
        subject.owner = owner or subject.owner
        subject.model_id = model_id or subject.model_id
        subject.request_id = request_id or subject.request_id
        subject.refused = refused or subject.refused


def received(nbytes: int) -> None:
    """So many bytes of the call's body have come."""
    subject = _CURRENT.get()
    if subject is not None:
        subject.received += nbytes


def traceparent() -> str:
    """Of this task's subject, to be journaled; empty: it has none."""
    subject = _CURRENT.get()
    return subject.traceparent if subject is not None else ""


def metadata() -> tuple[tuple[str, str], ...]:
    """What a gRPC call on behalf of the subject carries."""
    subject = _CURRENT.get()
    return ((METADATA, subject.traceparent),) if subject is not None else ()
