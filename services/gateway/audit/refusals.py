"""Calls that were refused for who made them, counted together.

Invariant: however many are refused, a minute of them comes to a bounded number of records: so many of
strangers, by address, and so many of an owner, by key and method; the others are counted in one more.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.audit.record import REFUSED, AuditRecord, cut, new_id

_MOST_OF_STRANGERS = 16
_MOST_OF_OWNER = 8


@dataclass(frozen=True)
class Refusal:
    """A call that was refused.

    Attributes:
        code: what the caller was told.
        method: that was called.
        address: where it came from.
        key: as it may stand in a log.
        owner: of the key; empty: it is none that counts.
        key_id: of the key, where it has an owner.
        trace_id: of the call.
    """

    code: str
    method: str
    address: str
    key: str
    owner: str = ""
    key_id: str = ""
    trace_id: str = ""


class Refusals:
    """Those since the last `take`."""

    def __init__(self) -> None:
        # By owner, by what counts together: the first of them, and how many.
        self._counts: dict[str, dict[tuple[str, ...], tuple[Refusal, int]]] = {}

    def note(self, refusal: Refusal) -> None:
        """Counts one."""
        counts = self._counts.setdefault(refusal.owner, {})
        by: tuple[str, ...] = (refusal.key_id, refusal.method) if refusal.owner else (refusal.address,)
        alike = (refusal.code, *by)
        if alike not in counts and len(counts) >= (_MOST_OF_OWNER if refusal.owner else _MOST_OF_STRANGERS):
            alike, refusal = (), Refusal("several", "", "", "", refusal.owner)
        first, times = counts.get(alike, (refusal, 0))
        counts[alike] = (first, times + 1)

    def take(self, now: float) -> list[AuditRecord]:
        """Their records; from now on others are counted.

        Args:
            now: in seconds since 1970.
        """
        taken, self._counts = self._counts, {}
        return [_record(*found, now) for counts in taken.values() for found in counts.values()]


def _record(first: Refusal, times: int, now: float) -> AuditRecord:
    return AuditRecord(
        id=new_id(),
        at=now,
        event=REFUSED,
        outcome=first.code,
        owner=first.owner,
        key_id=first.key_id,
        method=first.method,
        address=cut(first.address),
        trace_id=first.trace_id,
        details={} if first.owner or not first.key else {"key": cut(first.key)},
        count=times,
    )
