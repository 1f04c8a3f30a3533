"""The way in: who calls is known, may do that, and if not is told so, ever more slowly.

Invariants: a refusal is counted, and a few of them are logged, with the key's id or its first characters,
never with the key. A right key is never slowed, whatever it asks for, unless it is a token that cannot be
looked up just then, so nobody keeps others out by sending wrong ones; of addresses that did only so many are
remembered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import ip_address, ip_network
from urllib.parse import unquote

from prometheus_client import Counter

from services.common.contract.errors import (
    Overloaded,
    PermissionDenied,
    TinsmithError,
    Unauthenticated,
    Unavailable,
)
from services.common.telemetry import subject
from services.gateway.identity import rights
from services.gateway.identity.key import Caller, shown
from services.gateway.identity.ring import KeyRing
from services.gateway.identity.tokens import is_token

log = logging.getLogger(__name__)

REFUSALS = Counter("tinsmith_refused_callers_total", "Calls that were refused for who made them", ["code"])

Told = Callable[[TinsmithError, str, str, str, Caller | None], None]
"""Is told of each call that is refused: why, its method and address, its key as it may stand in a log, and
whose that is."""

_ADDRESSES = 4096
_AT_ONCE = 10
"""So many refusals an address gets at once, and logged; one more each second."""
_PAUSE_S = 1.0
_WAITING = 256
"""So many slowed answers wait at a time; others are told to come again."""


class Door:
    """Lets callers in to one gateway.

    Args:
        refused: is told of the others.
    """

    def __init__(self, keys: KeyRing, refused: Told, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._refused = refused
        self._clock = clock
        # Refusals that each address still gets at once (of a right key: that are logged), and since when.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._waiting = 0

    async def enter(self, key: str | None, method: str, address: str) -> Caller:
        """Who calls a method of `rights.NEEDS`, whose owner is noted of the call.

        Args:
            address: where the call comes from.

        Raises:
            Unauthenticated: no key, or none that counts.
            PermissionDenied: the key may not do that.
            Unavailable: nobody can tell at present.
            Overloaded: too many wrong keys are sent.
        """
        caller = await self.caller(key, method, address)
        subject.note(owner=caller.owner)
        return caller

    async def refuse(self, error: PermissionDenied, method: str, address: str) -> None:
        """Treats as a wrong key what was sent in a key's place and does not count.

        Raises:
            Overloaded: too many wrong keys are sent.
        """
        REFUSALS.labels(error.code).inc()
        self._refused(error, method, address, "", None)
        await self._slow(error, None, method, address)

    async def caller(self, key: str | None, method: str, address: str, beside: bool = False) -> Caller:
        """Who has a key that may call a method.

        Args:
            beside: it is shown beside the key of the call, whose own record tells that it was refused.

        Raises as `enter`.
        """
        try:
            caller = self._keys.caller_of(key)
        except Unavailable:
            # What is made up may look like a token that is not known yet: as little is done for it. Whose it
            # is nobody can tell, so it is no refusal; that is told where errors of this side are.
            if key and is_token(key) and not self._at_once(address):
                await self._wait()
            raise
        except Unauthenticated as error:
            REFUSALS.labels(error.code).inc()
            if not beside:
                self._refused(error, method, address, shown(key) if key else "", None)
            await self._slow(error, key, method, address)
            raise
        try:
            rights.check(caller, method)
        except PermissionDenied as error:
            REFUSALS.labels(error.code).inc()
            if not beside:
                self._refused(error, method, address, shown(key), caller)
            # As many lines as of an address, but of a key: it takes none of those of others at its address.
            if self._at_once(f"key {caller.key_id}"):
                _tell(error, key, method, address)
            raise
        return caller

    async def _slow(self, error: TinsmithError, key: str | None, method: str, address: str) -> None:
        if self._at_once(address):
            _tell(error, key, method, address)
        else:
            await self._wait()

    async def _wait(self) -> None:
        if self._waiting >= _WAITING:
            raise Overloaded(
                "too many calls come with API keys that are wrong or cannot be looked up now; try again "
                "in a moment"
            )
        self._waiting += 1
        try:
            await asyncio.sleep(_PAUSE_S)
        finally:
            self._waiting -= 1

    def _at_once(self, address: str) -> bool:
        now, address = self._clock(), _network(address)
        left, at = self._left.get(address, (float(_AT_ONCE), now))
        left = min(_AT_ONCE, left + now - at)
        self._left[address] = (left - 1 if left >= 1 else left, now)
        self._left.move_to_end(address)
        if len(self._left) > _ADDRESSES:
            self._left.popitem(last=False)
        return left >= 1


def _tell(error: TinsmithError, key: str | None, method: str, address: str) -> None:
    log.warning("refused %s to %s from %s: %s", method, shown(key), address, error.code)


def _network(address: str) -> str:
    """What one client has of addresses: of IPv6 it has 2**64."""
    try:
        found = ip_address(address)
    except ValueError:
        return address[:64]
    return address if found.version == 4 else str(ip_network((int(found) >> 64 << 64, 64)))


def address_of(peer: str) -> str:
    """The address in what gRPC calls a peer: "ipv4:10.0.0.1:4321" or "ipv6:%5B::1%5D:4321"."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return unquote(rest).rpartition(":")[0].strip("[]")
