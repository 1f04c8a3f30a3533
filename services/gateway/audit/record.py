"""What is written down of an act.

Invariant: a record has a bounded size, whatever a client sent, and no secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

from services.common.telemetry.logs import hidden

MOST_CHARS = 256
"""Of one value; more is cut."""

REFUSED = "identity_refuse"
"""The event of a call that was refused for who made it."""


class AuditRecord(msgspec.Struct, frozen=True, array_like=True):
    """One act. Redis has its values in this order, so further ones come last.

    Attributes:
        id: of the record. One that was written while Redis went away may be there twice, with one id.
        at: when it ended, in seconds since 1970.
        event: "<resource>_<action>".
        outcome: "ok", "accepted" (it is done later; `request_id` has what it came to), or the code of the
            error that the caller was told.
        owner: of the API key; empty: nobody who is known.
        key_id: of the API key.
        method: as `rights.NEEDS` names it, or the command.
        object: what it was done to, or what it made; empty: it did not come so far.
        address: where the call came from.
        trace_id: under which the logs of all processes tell of it.
        request_id: of the operation that it began.
        details: more of what was asked for, by name.
        count: how many calls it stands for: of refusals, those of a minute.
    """

    id: str
    at: float
    event: str
    outcome: str
    owner: str = ""
    key_id: str = ""
    method: str = ""
    object: str = ""
    address: str = ""
    trace_id: str = ""
    request_id: str = ""
    details: dict[str, str] = {}
    count: int = 1

    @property
    def done(self) -> bool:
        """Whether the act was let happen."""
        return self.outcome in ("ok", "accepted")


def new_id() -> str:
    """Of a record."""
    return secrets.token_hex(8)


def cut(value: object) -> str:
    """A value as it stands in a record."""
    # What is far beyond the end need not be looked through for secrets.
    text = hidden(str(value)[: 4 * MOST_CHARS])
    return text if len(text) <= MOST_CHARS else text[: MOST_CHARS - 1] + "…"


Wanted = Callable[[AuditRecord], bool]
"""Whether a record is one that somebody asks for."""

RESOURCES = {
    "all": (),
    "checkpoints": ("checkpoint_",),
    "projects": ("project_",),
    # There are none here, so nothing happens to them.
    "teams": ("team_",),
    "organizations": ("key_", "admin_", "identity_"),
}
"""What the SDK's event types stand for: how their events begin."""


def of_events(prefix: str) -> Wanted:
    """Records of events that begin so."""
    return lambda record: record.event.startswith(prefix)


def of_type(event_type: str) -> Wanted:
    """Records of one of RESOURCES."""
    begins = RESOURCES[event_type]
    return lambda record: not begins or record.event.startswith(begins)
