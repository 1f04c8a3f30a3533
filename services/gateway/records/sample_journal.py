"""Accepted samples, the futures of their results, and the lists that tell clients of completions.

Invariants. An accepted sample is on the list of the gateway that dispatches it until its future is
resolved; a future is resolved once, by a result or by being cancelled, and at that moment it joins its
client's completions under a cursor above all earlier ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Literal

import msgspec
import redis.asyncio

from services.common.contract import errors, ids
from services.common.contract.errors import Cancelled, Conflict, Overloaded
from services.common.state import keys
from services.common.state.journal_records import NOTHING_USED, Accepted, Published, Use, error_result
from services.common.state.room import ACCOUNT, Room
from services.common.state.scripts import Script, SharedScript
from services.gateway.records.sample_news import Kept
from tinsmith.v1 import results_pb2

GATEWAY_SAMPLES = 65_536
"""Unfinished samples that one gateway's list holds, those taken over from others included."""
ACCEPTANCE_S = 60.0
"""What was put on a list and is not accepted so long after is taken off it."""

MOST_COMPLETIONS = 4096
_WATCHED = 64
"""Most completions of one answer, and of one whose reader may be slow."""
_AT_ONCE = 256
_CLAIMED_BYTES = 16 << 20


@dataclass(frozen=True)
class Completion:
    """A sample that was resolved. `size`: bytes of its result; `cursor`: its place among its client's."""

    request_id: str
    state: Literal["finished", "failed"]
    size: int
    cursor: int


class Unclaimed(Enum):
    """Why a sample cannot be dispatched."""

    SETTLED = "settled"
    """It is resolved, or with a third gateway."""
    UNKNOWN = "unknown"
    """Redis does not know it: it lost the acceptance, or has it and the list from different times."""


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
        self._join = Script(client, "join_samples")
        self._accept = SharedScript(client, "accept_sample")
        self._claim = Script(client, "claim_samples")
        self._publish = SharedScript(client, "publish_sample")
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
        origin: bytes = b"",
    ) -> Accepted:
        """Keeps a sample's request and creates its future.

        Args:
            request: serialized sampler_pb2.SampleRequest.
            gateway_id: gateway that will dispatch it.
            answer_bytes: of the largest result that it can have.
            origin: more of the request, which may differ when it is repeated.

        Raises:
            Conflict: seq_id was used for another sample of the session.
            TooLarge: the request and its result are more than one owner may hold.
            Overloaded: too many samples of this gateway wait, or the owner holds too much.
        """
        request_id = ids.request_id(sampling_session_id, seq_id)
        self._room.check_fits(len(request) + answer_bytes)
        digest = hashlib.sha256(request).digest()
        future, listed = keys.future(sampling_session_id, seq_id), keys.gateway_samples(gateway_id)
        outcome, dispatcher = await self._accept(
            [future, keys.pending_samples(sampling_session_id), listed, *ACCOUNT],
            request + origin,
            digest,
            gateway_id,
            owner,
            seq_id,
            answer_bytes,
            *self._room.bounds,
            request_id,
            self._most,
        )
        if outcome == b"full":
            raise Overloaded(f"{self._most} samples wait on this gateway; send this again later")
        if outcome == b"held":
            raise self._room.refusal()
        if outcome == b"conflict":
            raise Conflict(
                f"seq_id {seq_id} of sampling session {sampling_session_id} was used for another request"
            )
        if dispatcher and outcome == b"same":
            # Of a gateway that was struck off, perhaps.
            await self.join(dispatcher.decode())
            await self._redis.sadd(keys.gateway_samples(dispatcher.decode()), request_id)
        return Accepted(request_id, outcome == b"new")

    async def claim(self, request_id: str, from_gateway: str, to_gateway: str) -> bytes | Unclaimed:
        """The request of a pending sample, which the second gateway dispatches from now on."""
        (found,) = await self.claim_some([request_id], from_gateway, to_gateway)
        return found

    async def claim_some(
        self, request_ids: Sequence[str], from_gateway: str, to_gateway: str
    ) -> list[bytes | Unclaimed]:
        """The same of several samples in one step, of the first of them at least: as many as make a moderate
        answer."""
        lists = [keys.gateway_samples(from_gateway), keys.gateway_samples(to_gateway)]
        futures = [keys.future(*ids.parse_request_id(request_id)) for request_id in request_ids]
        found = await self._claim([*lists, *futures], from_gateway, to_gateway, _CLAIMED_BYTES, *request_ids)
        return [Unclaimed.UNKNOWN if one is None else one or Unclaimed.SETTLED for one in found]

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
            # Of very many hardly any have some. One question for all of them costs less than one for each.
            if len(some) > 1 and not await self._redis.exists(*map(keys.pending_samples, some)):
                continue
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
        await self._join([keys.SAMPLE_GATEWAYS], gateway_id)

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

    async def publish(
        self,
        request_id: str,
        result: results_pb2.OperationResult,
        use: Use = NOTHING_USED,
        gateway_id: str = "",
    ) -> bool:
        """Resolves a sample's future unless it is resolved; whether it did.

        Args:
            use: what the sample took, which is counted if it is resolved by this.
            gateway_id: gateway that most probably dispatches it.
        """
        failed = result.WhichOneof("kind") == "error"
        payload = result.SerializeToString()
        return await self.publish_bytes(request_id, payload, failed, use, gateway_id) is Published.PUBLISHED

    async def publish_bytes(
        self, request_id: str, result: bytes, failed: bool, use: Use = NOTHING_USED, gateway_id: str = ""
    ) -> Published:
        """The same with a serialized result. `failed`: it is an error."""
        outcome = await self._resolve(request_id, result, failed, True, use, gateway_id)
        return Published.PUBLISHED if outcome is Resolution.NOW else Published.NOT_PENDING

    async def cancel(self, request_id: str, reason: str) -> Resolution:
        """Resolves a pending sample's future as failed and tells the gateway that runs it to stop."""
        result = error_result(errors.to_pb(Cancelled(reason)))
        # Off its gateway's list in the same step, so that the gateway sees it also when the answer is lost.
        found: Any = await self._redis.hget(keys.future(*ids.parse_request_id(request_id)), "gateway")
        gateway_id = (found or b"").decode()
        outcome = await self._resolve(request_id, result, failed=True, lost_too=False, gateway_id=gateway_id)
        if outcome is Resolution.NOW:
            await self._redis.publish(keys.CANCEL_CHANNEL, request_id)
        return outcome

    async def state(self, request_id: str) -> Literal["unknown", "pending", "done"]:
        """Whether a sample's future is resolved."""
        found: Any = await self._redis.hget(keys.future(*ids.parse_request_id(request_id)), "state")
        if found is None:
            return "unknown"
        return "done" if found == b"done" else "pending"

    async def keep(self, request_id: str) -> None:
        """Tells the gateway that runs a sample to end it with what it has come to."""
        await self._redis.publish(keys.SAMPLE_CHANNEL, msgspec.json.encode(Kept(request_id)))

    async def _resolve(
        self,
        request_id: str,
        result: bytes,
        failed: bool,
        lost_too: bool,
        use: Use = NOTHING_USED,
        gateway_id: str = "",
    ) -> Resolution:
        object_id, seq_id = ids.parse_request_id(request_id)
        outcome, gateway = await self._publish(
            [
                keys.future(object_id, seq_id),
                keys.pending_samples(object_id),
                keys.completions(object_id, seq_id // ids.CLONE_SEQ_IDS),
                use.day_key,
                keys.gateway_samples(gateway_id),
                *ACCOUNT,
            ],
            result,
            self._room.limits.result_life,
            request_id,
            keys.DONE_CHANNEL,
            seq_id,
            "failed" if failed else "finished",
            int(lost_too),
            gateway_id,
            use.base_model,
            *use.args,
        )
        if gateway:
            await self._redis.srem(keys.gateway_samples(gateway.decode()), request_id)
        return Resolution(outcome)

    async def completions(
        self, sampling_session_id: str, clone: int, cursor: int, forgets: bool = True
    ) -> tuple[list[Completion], int]:
        """Completions of one client after a cursor (0 = from the beginning), and the cursor of the last.

        Args:
            forgets: what is at or before the cursor counts as seen, and is forgotten; up to
                MOST_COMPLETIONS are told at once.
        """
        seen, most = (cursor, MOST_COMPLETIONS) if forgets else (0, _WATCHED)
        flat = await self._completions([keys.completions(sampling_session_id, clone)], cursor, most, seen)
        pairs = zip(flat[::2], flat[1::2], strict=True)
        found = [_completion(sampling_session_id, member, int(float(at))) for member, at in pairs]
        return found, found[-1].cursor if found else cursor

    async def kept_since(self) -> int:
        """The cursor of now, less the time for which completions are kept."""
        seconds, micros = await self._redis.time()
        return (int(seconds) - self._room.limits.result_life) * 1_000_000 + int(micros)


def _completion(sampling_session_id: str, member: bytes, cursor: int) -> Completion:
    seq_id, state, size = member.decode().split(":")
    request_id = ids.request_id(sampling_session_id, int(seq_id))
    return Completion(request_id, "failed" if state == "failed" else "finished", int(size), cursor)
