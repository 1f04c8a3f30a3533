"""One request of a session, from its acceptance to its result.

Invariant: an event has a bounded size, whatever a client sent.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Event(msgspec.Struct, frozen=True, array_like=True):
    """What became of a request. Redis has its values in this order, so further ones come last.

    Attributes:
        object_id: the model or sampling session that it was sent to.
        seq_id: its number there.
        kind: what it asked for, for example "forward_backward" or "sample".
        accepted, began, ended: when it was acknowledged, handed to a trainer or sampler (0: it never was),
            and had its result, in seconds since 1970.
        outcome: "done", or the code of the error that it came to.
        trace_id: under which logs and traces tell of it.
    """

    object_id: str
    seq_id: int
    kind: str
    accepted: float
    began: float
    ended: float
    outcome: str = "done"
    trace_id: str = ""


class Lane(NamedTuple):
    """A row of a timeline: events of one object, no two at the same time."""

    object_id: str
    number: int
    events: list[Event]


def lanes(events: list[Event]) -> list[Lane]:
    """The events in as few rows as they need, for each object its own: requests that were under way together
    lie beside each other."""
    rows: list[Lane] = []
    of: dict[str, list[Lane]] = {}
    for event in sorted(events, key=lambda one: (one.accepted, one.seq_id)):
        own = of.setdefault(event.object_id, [])
        free = next((lane for lane in own if lane.events[-1].ended <= event.accepted), None)
        if free is None:
            free = Lane(event.object_id, len(own), [])
            own.append(free)
            rows.append(free)
        free.events.append(event)
    return sorted(rows, key=lambda lane: (lane.object_id, lane.number))
