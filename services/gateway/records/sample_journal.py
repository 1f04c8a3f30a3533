"""Accepted samples, the futures of their results, and the lists that tell clients of completions.

Invariants. An accepted sample is on the list of the gateway that dispatches it until its future is
resolved; a future is resolved once, by a result or by being cancelled, and at that moment it joins its
client's completions under a cursor above all earlier ones.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Literal

import redis.asyncio

from services.common.contract import errors, ids
from services.common.contract.errors import Cancelled, Conflict, Overloaded
from services.common.state import keys
from services.common.state.journal_records import Accepted, error_result
from services.common.state.room import ACCOUNT, Room
from services.common.state.scripts import Script
from tinsmith.v1 import results_pb2

GATEWAY_SAMPLES = 65_536
"""Unfinished samples that one gateway's list holds, those taken over from others included."""
ACCEPTANCE_S = 60.0
"""What was put on a list and is not accepted so long after is taken off it."""

_COMPLETIONS = 4096
_AT_ONCE = 256


@dataclass(frozen=True)
class Completion:
    """A sample that was resolved. `size`: bytes of its result."""

    request_id: str
    state: Literal["finished", "failed"]
    size: int


class Unclaimed(Enum):
    """Why a sample cannot be dispatched."""

    SETTLED = "settled"
    """It is resolved, or with a third gateway."""
    UNKNOWN = "unknown"
    """It is not accepted: not yet, or its gateway died over it."""


class Resolution(IntEnum):
    """What became of an attempt to resolve a future."""

    UNKNOWN = -1
    BEFORE = 0
    NOW = 1


class SampleJournal:
    """The samples of all sampling sessions in one Redis."""

    def __init__(
        self, client: redis.asyncio.Redis, gateway_samples: int = GATEWAY_SAMPLES, room: Room | None = None
    ) -> None:
        self._redis = client
        self._room = room or Room()
        self._most = gateway_samples
        self._admit = Script(client, "admit_sample")
        self._accept = Script(client, "accept_sample")
        self._claim = Script(client, "claim_sample")
        self._publish = Script(client, "publish_sample")
        self._note_waiting = Script(client, "note_waiting")
        self._completions = Script(client, "completions")

    async def accept(
        self,
        sampling_session_id: str,
        seq_id: int,
        request: bytes,
        gateway_id: str,
        owner: str = "",
        answer_bytes: int = 0,
    ) -> Accepted:
        """Keeps a sample's request and creates its future.

        Args:
            request: serialized sampler_pb2.SampleRequest.
            gateway_id: gateway that will dispatch it.
            answer_bytes: of the largest result that it can have.

        Raises:
            Conflict: seq_id was used for another sample of the session.
            TooLarge: the request and its result are more than one owner may hold.
            Overloaded: too many samples of this gateway wait, or the owner holds too much.
        """
        request_id = ids.request_id(sampling_session_id, seq_id)
        self._room.check_fits(len(request) + answer_bytes)
        # On the list first: an accepted sample is always found by whoever takes over from this gateway.
        if not await self._admit([keys.gateway_samples(gateway_id)], request_id, self._most):
            raise Overloaded(f"{self._most} samples wait on this gateway; send this again later")
        digest = hashlib.sha256(request).digest()
        future = keys.future(sampling_session_id, seq_id)
        listed = time.monotonic()
        outcome, dispatcher = await self._accept(
            [future, keys.pending_samples(sampling_session_id), *ACCOUNT],
            request,
            digest,
            gateway_id,
            owner,
            seq_id,
            answer_bytes,
            *self._room.bounds,
        )
        if outcome == b"held":
            await self.give_up(request_id, gateway_id)
            raise self._room.refusal()
        if outcome == b"conflict":
            raise Conflict(
                f"seq_id {seq_id} of sampling session {sampling_session_id} was used for another request"
            )
        # Before it is acknowledged: a process that was stopped in between may find its entry taken off.
        if dispatcher and (outcome == b"same" or time.monotonic() - listed > ACCEPTANCE_S / 2):
            await self.join(dispatcher.decode())
            await self._redis.sadd(keys.gateway_samples(dispatcher.decode()), request_id)
        return Accepted(request_id, outcome == b"new")

    async def claim(self, request_id: str, from_gateway: str, to_gateway: str) -> bytes | Unclaimed:
        """The request of a pending sample, which the second gateway dispatches from now on."""
        object_id, seq_id = ids.parse_request_id(request_id)
        takes_over = from_gateway != to_gateway
        if takes_over:
            await self._redis.sadd(keys.gateway_samples(to_gateway), request_id)
        found = await self._claim([keys.future(object_id, seq_id)], from_gateway, to_gateway)
        if not found and (takes_over or found is not None):
            await self._redis.srem(keys.gateway_samples(to_gateway), request_id)
        if found is None:
            return Unclaimed.UNKNOWN
        if takes_over:
            await self._redis.srem(keys.gateway_samples(from_gateway), request_id)
        return bytes(found) or Unclaimed.SETTLED

    async def give_up(self, request_id: str, gateway_id: str) -> None:
        """Takes a sample that was never accepted off a gateway's list."""
        listed = keys.gateway_samples(gateway_id)
        await self._redis.srem(listed, request_id)
        state: Any = await self._redis.hget(keys.future(*ids.parse_request_id(request_id)), "state")
        if state == b"pending":
            # Just now, after all.
            await self._redis.sadd(listed, request_id)

    async def samples_of(self, gateway_id: str) -> set[str]:
        """Request ids of the unfinished samples of a gateway."""
        found: Any = await self._redis.smembers(keys.gateway_samples(gateway_id))
        return {raw.decode() for raw in found}

    async def pending(self, sampling_session_ids: Sequence[str]) -> list[str]:
        """Request ids of the unfinished samples of sampling sessions."""
        found: list[str] = []
        for start in range(0, len(sampling_session_ids), _AT_ONCE):
            some = sampling_session_ids[start : start + _AT_ONCE]
            pipeline = self._redis.pipeline(transaction=False)
            for name in some:
                pipeline.smembers(keys.pending_samples(name))
            for name, numbers in zip(some, await pipeline.execute(), strict=True):
                found += [ids.request_id(name, int(number)) for number in numbers]
        return found

    async def resolved(self, request_ids: Collection[str]) -> list[str]:
        """Those of the samples whose futures are resolved."""
        if not request_ids:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        for request_id in request_ids:
            pipeline.hget(keys.future(*ids.parse_request_id(request_id)), "state")
        states = await pipeline.execute()
        return [name for name, state in zip(request_ids, states, strict=True) if state == b"done"]

    async def join(self, gateway_id: str) -> None:
        """Makes a gateway one that may have unfinished samples."""
        await self._redis.sadd(keys.SAMPLE_GATEWAYS, gateway_id)

    async def leave(self, gateway_id: str) -> None:
        """The gateway is gone, and its list empty."""
        await self._redis.srem(keys.SAMPLE_GATEWAYS, gateway_id)

    async def gateways(self) -> set[str]:
        """Ids of the gateways that may have unfinished samples."""
        found: Any = await self._redis.smembers(keys.SAMPLE_GATEWAYS)
        return {raw.decode() for raw in found}

    async def note_waiting(self, request_id: str, reason: str) -> None:
        """Says why a pending sample does not run; empty = it does."""
        await self._note_waiting([keys.future(*ids.parse_request_id(request_id))], reason)

    async def publish(self, request_id: str, result: results_pb2.OperationResult) -> bool:
        """Resolves a sample's future unless it is resolved; whether it did."""
        failed = result.WhichOneof("kind") == "error"
        outcome = await self._resolve(request_id, result.SerializeToString(), failed, lost_too=True)
        return outcome is Resolution.NOW

    async def cancel(self, request_id: str, reason: str) -> Resolution:
        """Resolves a pending sample's future as failed and tells the gateway that runs it to stop."""
        result = error_result(errors.to_pb(Cancelled(reason)))
        outcome = await self._resolve(request_id, result, failed=True, lost_too=False)
        if outcome is Resolution.NOW:
            await self._redis.publish(keys.CANCEL_CHANNEL, request_id)
        return outcome

    async def _resolve(self, request_id: str, result: bytes, failed: bool, lost_too: bool) -> Resolution:
        object_id, seq_id = ids.parse_request_id(request_id)
        outcome, gateway = await self._publish(
            [
                keys.future(object_id, seq_id),
                keys.pending_samples(object_id),
                keys.completions(object_id, seq_id // ids.CLONE_SEQ_IDS),
                *ACCOUNT,
            ],
            result,
            self._room.limits.result_life,
            request_id,
            keys.DONE_CHANNEL,
            seq_id,
            "failed" if failed else "finished",
            int(lost_too),
        )
        if gateway:
            await self._redis.srem(keys.gateway_samples(gateway.decode()), request_id)
        return Resolution(outcome)

    async def completions(
        self, sampling_session_id: str, clone: int, cursor: int
    ) -> tuple[list[Completion], int]:
        """Completions of one client after a cursor (0 = from the beginning), and the cursor of the last.

        What is at or before the cursor counts as seen, and is forgotten.
        """
        flat = await self._completions([keys.completions(sampling_session_id, clone)], cursor, _COMPLETIONS)
        found = [_completion(sampling_session_id, member) for member in flat[::2]]
        return found, int(float(flat[-1])) if flat else cursor


def _completion(sampling_session_id: str, member: bytes) -> Completion:
    seq_id, state, size = member.decode().split(":")
    request_id = ids.request_id(sampling_session_id, int(seq_id))
    return Completion(request_id, "failed" if state == "failed" else "finished", int(size))
