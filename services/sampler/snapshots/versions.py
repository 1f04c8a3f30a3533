"""Which versions of models a replica has heard of: how old what it samples from is.

Invariant: a version counts from when it is announced here, whether it arrives or not; the count of newer ones
is never too high, and too low only for what this replica was not told: before it started, or while trainers
left it out. What is kept is bounded, however many models and versions there are.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict

from services.sampler.engine.snapshot_key import SnapshotKey

MOST_MODELS = 4096
"""The models that were heard of last are known."""
MOST_VERSIONS = 256
"""Of each model, the newest ones."""


class KnownVersions:
    """The versions that one replica knows."""

    def __init__(self) -> None:
        self._of_model: OrderedDict[str, list[int]] = OrderedDict()

    def note(self, key: SnapshotKey) -> None:
        """This version exists."""
        versions = self._of_model.setdefault(key.model_id, [])
        self._of_model.move_to_end(key.model_id)
        if key.version not in versions:
            insort(versions, key.version)
            del versions[:-MOST_VERSIONS]
        if len(self._of_model) > MOST_MODELS:
            self._of_model.popitem(last=False)

    def newer(self, key: SnapshotKey) -> int:
        """How many versions of its model are newer."""
        versions = self._of_model.get(key.model_id, [])
        return len(versions) - bisect_right(versions, key.version)
