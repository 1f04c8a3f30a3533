"""Which releases work together: the version of what services tell one another and keep in Redis.

A release writes CONTRACT and gets along with OLDEST to CONTRACT. CONTRACT goes up with every change of an
internal message, of a script or of a record that the release before does not read; OLDEST follows a release
later, so that two neighbouring releases always work together.

Invariants: a service that would not read what is in Redis, or whose writing others there would not read, does
not start; a gateway sends nothing to a service that it does not get along with.
"""

from __future__ import annotations

import msgspec
import redis.asyncio

from services.common.contract.errors import Conflict
from services.common.state import keys
from services.common.state.scripts import Script

CONTRACT = 2
OLDEST = 1


class Range(msgspec.Struct, frozen=True):
    """Attributes:
    contract: what a release writes.
    oldest: the oldest contract that it gets along with.
    """

    contract: int = CONTRACT
    oldest: int = OLDEST

    def __str__(self) -> str:
        return f"{self.contract}" if self.oldest == self.contract else f"{self.oldest} to {self.contract}"


def together(one: Range, other: Range) -> bool:
    """Whether two releases read what each of them writes."""
    return one.contract >= other.oldest and other.contract >= one.oldest


async def join(client: redis.asyncio.Redis, mine: Range | None = None) -> None:
    """Notes what this release writes, unless a newer one has noted more.

    Raises:
        Conflict: what is in Redis was written by a release that is no neighbour of this one.
        RedisError: Redis does not answer.
    """
    mine = mine or Range()
    script = Script(client, "join_contract")
    contract, oldest = (int(one) for one in await script([keys.CONTRACT], mine.contract, mine.oldest))
    found = Range(contract, oldest)
    if together(mine, found):
        return
    advice = (
        "start a newer release; an older one cannot read what was written since"
        if found.contract > mine.contract
        else "start the releases in between first, one after the other"
    )
    raise Conflict(f"Redis has state of contract {found}, this release works with {mine}: {advice}")
