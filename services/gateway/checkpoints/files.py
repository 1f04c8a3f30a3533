"""The files behind checkpoints: who still needs them, and their removal.

A training checkpoint and an export are a version in the checkpoint storage. A sampler checkpoint is a
snapshot in the data directory, which sampling sessions answer from: it outlives its checkpoint until every
sampling session that was opened on it is over. Invariant: nothing is removed that a session still
answers from.
"""

from __future__ import annotations

from services.common.contract import ids
from services.common.process.pools import DELETIONS
from services.common.process.tasks import a_few_at_once
from services.common.storage.base import Key, Storage
from services.common.storage.data_dir import DataDir
from services.common.storage.directory import delete_directory
from services.gateway.records.sampling_session import SamplingSessionStore
from services.gateway.records.session import SessionStore

_SAMPLED_S = 600.0
"""A snapshot that is still sampled is looked at again after this long."""


class CheckpointFiles:
    """Removes what checkpoints leave behind."""

    def __init__(
        self, storage: Storage, data: DataDir, sampling_sessions: SamplingSessionStore, sessions: SessionStore
    ) -> None:
        self.storage = storage
        self._data = data
        self._sampling_sessions = sampling_sessions
        self._sessions = sessions

    async def remove(self, key: Key) -> float | None:
        """Removes the files of a version without a record.

        Returns:
            None when nothing is left of them, else seconds after which to try again, because somebody may
            still need them.

        Raises:
            OSError: they could not be removed now.
        """
        if not key.checkpoint_id.startswith("sampler_weights/"):
            return await DELETIONS.run(self.storage.delete, key)
        if await sampled_versions(key.model_id, self._sampling_sessions, self._sessions, key.version):
            return _SAMPLED_S
        await DELETIONS.run(delete_directory, self._data.snapshot(key.model_id, key.version))
        return None


async def sampled_versions(
    model_id: str,
    sampling_sessions: SamplingSessionStore,
    sessions: SessionStore,
    version: int | None = None,
) -> set[int]:
    """Versions of a model's snapshots that sampling sessions answer from which are not over.

    Args:
        version: look at this one only.
    """
    used: dict[str, set[int]] = {}
    for sampling_session_id, found in await sampling_sessions.of_model(model_id, version):
        used.setdefault(ids.session_of(sampling_session_id), set()).add(found)
    records = await a_few_at_once(sessions.get, list(used))
    return {
        number
        for record, versions in zip(records, used.values(), strict=True)
        if record is not None and not record.finished
        for number in versions
    }
