"""What results that are kept for those who send an operation again take of the first rank, over all models.

A result is needed until a gateway has stored it: from then on the journal does not have the operation as
pending, and a gateway that repeats it takes no result of it (`Send.replayed`).

Invariants: only results go that have been stored for longer than Redis may lose, and never a model's last
one; what is known of whose a number is stays. What takes more than there is goes within seconds, if Redis
answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from redis.exceptions import RedisError

from services.common.telemetry.repeats import Repeats
from services.trainer.order.sequencer import Sequence

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Between two looks, and so what was stored for as long at least."""
_ASKED = 256
"""Models that are asked about at a time, of those that keep most."""


def largest_first(kept: Mapping[str, int]) -> list[str]:
    """Models in the order in which their results go. Pure."""
    return sorted((model for model in kept if kept[model]), key=lambda model: -kept[model])[:_ASKED]


class ResultRoom:
    """What kept results may take.

    Args:
        most: bytes of all of them.
        sequences: those of the trainer's models by id.
        lowest_pending: asks the journal for the lowest operation of a model whose result is not stored; -1:
            all are.
    """

    def __init__(
        self,
        most: int,
        sequences: Callable[[], Mapping[str, Sequence[Any, Any]]],
        lowest_pending: Callable[[str], Awaitable[int]],
    ) -> None:
        self._most = most
        self._sequences = sequences
        self._lowest_pending = lowest_pending
        self._stored: WeakKeyDictionary[Sequence[Any, Any], int] = WeakKeyDictionary()
        """Before which operation of a model all were, when it was last asked about."""
        self._unasked = Repeats(log, "kept results were not given up")

    def used(self) -> int:
        """Bytes that results take at present."""
        return sum(sequence.kept_bytes for sequence in self._sequences().values())

    async def watch(self) -> None:
        """Keeps to it. Runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.keep_to_it()
                self._unasked.over("")
            except (RedisError, OSError) as error:
                self._unasked.failed("", error)

    async def keep_to_it(self) -> None:
        """Has results go that were stored when this was last called, of who keeps most first, until no more
        are kept than may be.

        Raises:
            RedisError, OSError: the journal could not be asked.
        """
        sequences = self._sequences()
        kept = {model: sequence.kept_bytes for model, sequence in sequences.items()}
        over = sum(kept.values()) - self._most
        for model in largest_first(kept) if over > 0 else ():
            sequence = sequences[model]
            over -= sequence.forget(self._stored.get(sequence, 0))
            if over <= 0:
                return
            # What ends while the journal is asked may have come there after it was looked at.
            end = max(sequence.results, default=-1) + 1
            lowest = await self._lowest_pending(model)
            self._stored[sequence] = end if lowest < 0 else min(end, lowest)
