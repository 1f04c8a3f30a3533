"""What owners used and have stored, with what is known of the sessions that did it.

Invariant: an answer is whole, or refused for its size.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from services.common.contract.errors import InvalidRequest
from services.common.process.periodic import Periodic
from services.gateway.records.session import SessionRecord, SessionStore
from services.gateway.records.usage import UsageStore, Used

MOST_ROWS = 10_000
_STORED_S = 1200.0
_DEADLINE_S = 300.0
_AT_ONCE = 200


@dataclass(frozen=True)
class Stored:
    """Checkpoints of an owner in a project."""

    owner: str
    project_id: str
    checkpoints: int
    size_bytes: int


class SessionUse:
    """Reads the counts, and from `start` to `stop` notes every hour what is stored."""

    def __init__(self, usage: UsageStore, sessions: SessionStore) -> None:
        self._usage = usage
        self._sessions = sessions
        # More often than once an hour, so that an hour is noted whichever gateway runs in it.
        self._notes = Periodic("count of what is stored", _STORED_S, self._note_stored, _DEADLINE_S)

    async def start(self) -> None:
        self._notes.start()

    async def stop(self) -> None:
        await self._notes.stop()

    async def used(self, owner: str | None, begin: date, days: int) -> list[Used]:
        """What an owner used on so many days from one on; None: what everybody did.

        Raises:
            InvalidRequest: it is more than one answer holds.
        """
        wanted = [begin + timedelta(days=number) for number in range(days)]
        found: list[Used] = []
        for one in [owner] if owner is not None else await self._usage.owners():
            found += await self._usage.used(one, wanted)
            if len(found) > MOST_ROWS:
                raise InvalidRequest(
                    f"more than {MOST_ROWS} entries are of these days; ask for fewer days", "too_many_entries"
                )
        return found

    async def stored(self, owner: str | None) -> list[Stored]:
        """What an owner's checkpoints take now, by project; None: everybody's."""
        rows: list[Stored] = []
        for one in [owner] if owner is not None else await self._usage.owners():
            of_sessions = await self._usage.stored(one)
            known = await self.sessions(of_sessions)
            of_projects: dict[str, tuple[int, int]] = {}
            for session_id, (count, size) in of_sessions.items():
                record = known.get(session_id)
                project = record.project_id if record else ""
                before = of_projects.get(project, (0, 0))
                of_projects[project] = (before[0] + count, before[1] + size)
            rows += [Stored(one, project, *both) for project, both in sorted(of_projects.items())]
        return rows

    async def sessions(self, session_ids: Collection[str]) -> dict[str, SessionRecord]:
        """Those of the sessions that are known."""
        names: Sequence[str] = [name for name in session_ids if name]
        known: dict[str, SessionRecord] = {}
        for start in range(0, len(names), _AT_ONCE):
            # A damaged record says nothing of its session, and leaves the others' use to be told.
            found = await self._sessions.readable(names[start : start + _AT_ONCE])
            known |= {record.session_id: record for record in found if record is not None}
        return known

    async def _note_stored(self) -> None:
        await self._usage.note_stored(time.time())
