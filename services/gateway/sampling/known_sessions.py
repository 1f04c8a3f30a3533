"""The sampling sessions whose samples a gateway runs.

Invariant: one that this gateway does not know and that is not there is waited for, as it was there when its
sample was accepted: a Redis that lost its last second gets it again.
"""

from __future__ import annotations

import asyncio

from services.common.contract import ids
from services.common.contract.errors import NotFound
from services.gateway.records.sampling_session import SamplingSessionRecord, SamplingSessionStore

_AGAIN_S = 0.2


class KnownSessions:
    """Looks them up.

    Args:
        timeout: seconds that one which is not found may take to be restored.
    """

    def __init__(self, store: SamplingSessionStore, timeout: float) -> None:
        self._store = store
        self._timeout = timeout

    async def of(self, request_id: str) -> SamplingSessionRecord:
        """That of a sample. Raises NotFound."""
        session_id, _ = ids.parse_request_id(request_id)
        record = await self._store.known(session_id)
        deadline = asyncio.get_running_loop().time() + self._timeout
        while record is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_AGAIN_S)
            record = await self._store.known(session_id)
        if record is None:
            raise NotFound(f"sampling session {session_id} does not exist; create one first")
        return record
