"""The lists of gateways' unfinished samples: what is on them, and whose a sample becomes.

Invariants: a sample is claimed by one gateway, however many want it; a gateway claims no more from lists than
it has room for, and a few at a time, so that what a large one leaves is shared by those that live.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable

from google.protobuf.message import DecodeError

from services.common.contract import errors, ids
from services.common.contract.errors import InvalidRequest
from services.common.state import keys
from services.common.state.poison import Poison, Unreadable
from services.gateway.records.sample_journal import ACCEPTANCE_S, SampleJournal, Unclaimed
from services.gateway.sampling.admission import Admission
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import results_pb2

_AT_ONCE = 32

OnClaimed = Callable[[str, sampler_pb2.SampleRequest], None]


class Claims:
    """The claims of one gateway.

    Args:
        on_claimed: told each sample of a list that became this gateway's, and its request.
        admission: counts this gateway's samples.
    """

    def __init__(
        self,
        journal: SampleJournal,
        poison: Poison,
        gateway_id: str,
        admission: Admission,
        on_claimed: OnClaimed,
    ) -> None:
        self._journal = journal
        self._poison = poison
        self._gateway_id = gateway_id
        self._admission = admission
        self._on_claimed = on_claimed
        self._unknown_since: dict[str, float] = {}

    async def listed(self, gateway_id: str) -> set[str]:
        """The samples on a gateway's list."""
        listed = set()
        for request_id in await self._journal.samples_of(gateway_id):
            try:
                ids.parse_request_id(request_id)
                listed.add(request_id)
            except InvalidRequest as error:
                self._poison.note(f"{keys.gateway_samples(gateway_id)} {request_id}", error.message)
        return listed

    async def one(self, request_id: str, from_gateway: str) -> sampler_pb2.SampleRequest | None:
        """The request of a sample that waits on a gateway's list, unless it is not to be run.

        Raises:
            Unreadable: it cannot be read.
        """
        payload = await self._journal.claim(request_id, from_gateway, self._gateway_id)
        return await self._read(request_id, payload, from_gateway)

    async def _read(
        self, request_id: str, payload: bytes | Unclaimed, from_gateway: str
    ) -> sampler_pb2.SampleRequest | None:
        if payload is Unclaimed.UNKNOWN:
            await self._not_accepted(request_id, from_gateway)
        if isinstance(payload, Unclaimed):
            return None
        try:
            return sampler_pb2.SampleRequest.FromString(payload)
        except DecodeError as error:
            name = keys.future(*ids.parse_request_id(request_id))
            self._poison.note(name, str(error))
            raise Unreadable(name, str(error)) from error

    async def all(self, request_ids: Iterable[str], from_gateway: str) -> None:
        """Claims samples of a gateway's list, as far as there is room."""
        waiting = list(request_ids)
        # Every live gateway does this: each begins elsewhere.
        random.shuffle(waiting)
        while waiting and not self._admission.is_full:
            some = waiting[:_AT_ONCE]
            found = await self._journal.claim_some(some, from_gateway, self._gateway_id)
            del waiting[: len(found)]
            for request_id, payload in zip(some, found, strict=False):
                await self._take(request_id, payload, from_gateway)

    def forget(self, listed: set[str]) -> None:
        """What is not listed any more needs no thought."""
        unknown = self._unknown_since.items()
        self._unknown_since = {name: since for name, since in unknown if name in listed}

    async def _take(self, request_id: str, payload: bytes | Unclaimed, from_gateway: str) -> None:
        try:
            request = await self._read(request_id, payload, from_gateway)
        except Unreadable as error:
            unreadable = results_pb2.OperationResult(error=errors.to_pb(error))
            await self._journal.publish(request_id, unreadable, gateway_id=self._gateway_id)
        else:
            if request is not None:
                self._on_claimed(request_id, request)

    async def _not_accepted(self, request_id: str, gateway_id: str) -> None:
        """The list has a sample that nothing else is known of."""
        now = asyncio.get_running_loop().time()
        if now - self._unknown_since.setdefault(request_id, now) >= ACCEPTANCE_S:
            await self._journal.give_up(request_id, gateway_id)
