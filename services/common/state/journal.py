"""The journal: every accepted operation, and the futures of their results.

Invariants. What `accept` acknowledged is in Redis together with its future until its result is
published; a future is resolved exactly once; only the holder of the model's current fencing epoch
resolves it; an operation leaves the journal only when its result is published and a durable
snapshot covers it, or when repeating it would change nothing. So what a journal holds is what waits,
which goes by itself, and the batches since the last step, which go with the next: a step, a save or the
end of the model is never refused because of them.
"""

from __future__ import annotations

import hashlib
import time
from functools import partial
from typing import Any

import redis.asyncio
from google.protobuf.message import DecodeError

from services.common.contract import errors, ids
from services.common.contract.errors import Conflict, InvalidRequest
from services.common.process import clock
from services.common.process.pools import COMPUTE
from services.common.state import keys
from services.common.state.journal_records import (
    NOTHING_USED,
    Accepted,
    Closing,
    Entry,
    InVain,
    JournalIndex,
    JournalLimits,
    Published,
    Use,
    check_accepted,
    error_result,
)
from services.common.state.poison import Unreadable
from services.common.state.room import ACCOUNT, Room
from services.common.state.scripts import Script
from tinsmith.internal.v1 import operation_pb2

_ANNOUNCE_AGAIN_S = 10.0
IDLE_AFTER_S = 60.0
"""A model without work stays listed this long; longer than any acceptance can take, so that none is lost."""

_MAX_SEQ_ID = 2**53 - 1
_READ_ENTRIES = 512
_ASKED = 1000
"""Models at a time."""
_THREAD_ABOVE_BYTES = 256 * 1024
"""Larger operations are serialized off the event loop."""


class UnreadableOperation(Unreadable):
    """An operation in a journal cannot be read."""

    def __init__(self, journal: str, seq_id: int, reason: str) -> None:
        super().__init__(f"{journal} {seq_id}", reason)
        self.seq_id = seq_id


class Journal:
    """Journals of all models in one Redis.

    Args:
        gateway_id: the gateway that accepts; of the models that it leads it tells its dispatcher itself.
        room: what may be accepted over all models.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        limits: JournalLimits | None = None,
        gateway_id: str = "",
        room: Room | None = None,
    ) -> None:
        self._redis = client
        self.room = room or Room()
        self._gateway_id = gateway_id
        self._limits = limits or JournalLimits()
        self._announced: dict[str, float] = {}
        self._accept = Script(client, "accept")
        self._accept_unload = Script(client, "accept_unload")
        self._note_times = Script(client, "note_times")
        self._note_queue_state = Script(client, "note_queue_state")
        self._index = Script(client, "index")
        self._publish = Script(client, "publish")
        self._mark_durable = Script(client, "mark_durable")
        self._skip = Script(client, "skip")
        self._gap_age = Script(client, "gap_age")
        self._tried_in_vain = Script(client, "tried_in_vain")
        self._close_model = Script(client, "close_model")
        self._erase_journal = Script(client, "erase_journal")
        self._forget_idle = Script(client, "forget_idle")
        self._place_model = Script(client, "place_model")

    async def accept(
        self,
        operation: operation_pb2.Operation,
        owner: str,
        accepted_before: bool = False,
        digest: bytes = b"",
    ) -> Accepted:
        """Journals an operation and creates its future. One round trip.

        The same request again gives the same id. A `refused` operation's future fails at once, as
        does that of any operation of a model that was not created or is unloaded. A seq_id that was
        used up and forgotten (its result expired, or its gap was skipped) also gives a failed future.
        Where the owner has no room for a failure, it is told to send the request again; one that is refused
        has used up its seq_id by then.

        Args:
            accepted_before: this process did so moments ago, and Redis may have lost it.
            digest: of the request that the operation was made from; empty: the operation is the request.

        Raises:
            Conflict: seq_id was used for another request.
            InvalidRequest: seq_id is out of range.
            Overloaded: the model's journal is full, or its owner holds or has waiting too much.
        """
        model_id, seq_id = operation.model_id, operation.seq_id
        if not 0 <= seq_id <= _MAX_SEQ_ID:
            raise InvalidRequest(f"seq_id must be 0 to {_MAX_SEQ_ID}, not {seq_id}")
        if operation.ByteSize() > _THREAD_ABOVE_BYTES:
            payload = await COMPUTE.run(partial(operation.SerializeToString, deterministic=True))
        else:
            payload = operation.SerializeToString(deterministic=True)
        request_id = ids.request_id(model_id, seq_id)
        kind = operation.WhichOneof("kind")
        used = errors.to_pb(
            Conflict(
                f"seq_id {seq_id} of model {model_id} was used up before: its result expired, or it "
                "came after the service had stopped waiting for it; go on with the next seq_id",
                "seq_id_used",
            )
        )
        await self._announce(model_id)
        # What makes room gets in also while Redis has no memory left.
        accept = self._accept_unload if kind == "unload_model" else self._accept
        outcome = await accept(
            [
                keys.future(model_id, seq_id),
                keys.journal(model_id),
                keys.journal_order(model_id),
                keys.journal_pending(model_id),
                keys.journal_meta(model_id),
                keys.lease(model_id),
                keys.WAITING_OPERATIONS,
                *ACCOUNT,
            ],
            seq_id,
            payload,
            digest or hashlib.sha256(payload).digest(),
            owner,
            error_result(operation.refused) if kind == "refused" else b"",
            operation.create_model.base_model if kind == "create_model" else "",
            error_result(used),
            self.room.limits.result_life,
            model_id,
            request_id,
            keys.WORK_CHANNEL,
            keys.DONE_CHANNEL,
            self._limits.pending_bytes,
            self._limits.journal_bytes,
            self._limits.entries,
            self._limits.ahead,
            int(accepted_before),
            self._gateway_id,
            int(kind == "forward_backward"),
            *self.room.bounds,
            self.room.limits.owner_operations,
        )
        check_accepted(outcome, model_id, seq_id, self._limits, self.room)
        return Accepted(request_id, outcome == b"new")

    async def is_accepted(self, model_id: str, seq_id: int, digest: bytes) -> bool:
        """Whether the request with this digest was accepted under this seq_id before."""
        known: Any = await self._redis.hget(keys.future(model_id, seq_id), "digest")
        return bool(known == digest)

    async def _announce(self, model_id: str) -> None:
        """Lists the model as one with work, before the work is there and at most every few seconds."""
        now = time.monotonic()
        if now - self._announced.get(model_id, -_ANNOUNCE_AGAIN_S) < _ANNOUNCE_AGAIN_S:
            return
        await self._note_times([keys.PENDING_MODELS], "", repr(clock.to_note()), model_id)
        self._announced = {known: at for known, at in self._announced.items() if now - at < _ANNOUNCE_AGAIN_S}
        self._announced[model_id] = now

    def announce_again(self) -> None:
        """Redis may have lost which models are listed."""
        self._announced.clear()

    async def models_with_work(self) -> list[tuple[str, float]]:
        """(model id, time listed) of every model that may have unfinished operations."""
        found: Any = await self._redis.zrange(keys.PENDING_MODELS, 0, -1, withscores=True)
        return [(model_id.decode(), at) for model_id, at in found]

    async def forget_idle(self, model_id: str, listed_at: float) -> None:
        """Takes a model without work off that list, unless it was listed again meanwhile."""
        if clock.to_judge() - listed_at > IDLE_AFTER_S:
            await self._forget_idle([keys.PENDING_MODELS], model_id, repr(listed_at))

    async def index(self, model_id: str, after_seq: int, entries: int = _READ_ENTRIES) -> JournalIndex:
        """What the journal holds after a seq_id, without payloads; at most so many entries."""
        durable, floor, closed, base_model, trainer, moved, pending, lowest, flat = await self._index(
            [
                keys.journal(model_id),
                keys.journal_order(model_id),
                keys.journal_pending(model_id),
                keys.journal_meta(model_id),
            ],
            after_seq,
            entries,
        )
        found = tuple(Entry(flat[i], flat[i + 1], bool(flat[i + 2])) for i in range(0, len(flat), 3))
        return JournalIndex(
            durable, floor, closed, base_model.decode(), trainer.decode(), moved, pending, lowest, found
        )

    async def lowest_pending(self, model_id: str) -> int:
        """The first operation whose result is not stored; -1 = there is none."""
        return (await self.index(model_id, -1, entries=0)).lowest_pending

    async def operations(self, model_id: str, seq_ids: list[int]) -> list[operation_pb2.Operation | None]:
        """The operations of these seq_ids; None where nothing is to run (any more).

        Raises:
            UnreadableOperation: the first that is no Operation.
        """
        if not seq_ids:
            return []
        payloads: Any = await self._redis.hmget(keys.journal(model_id), [str(seq_id) for seq_id in seq_ids])
        found = zip(seq_ids, payloads, strict=True)
        return [_operation(model_id, seq_id, raw) if raw else None for seq_id, raw in found]

    async def publish(
        self,
        model_id: str,
        epoch: int,
        seq_id: int,
        result: bytes,
        *,
        replay_passes_over: bool = False,
        closing: bytes = b"",
        use: Use = NOTHING_USED,
    ) -> Published:
        """Resolves an operation's future if it is pending and the epoch is current.

        Args:
            result: serialized OperationResult.
            replay_passes_over: repeating the operation would change nothing, so its payload is dropped.
            closing: serialized OperationResult of all operations that come after this one.
            use: what the operation took, which is counted if it is resolved by this.
        """
        outcome = await self._publish(
            [
                keys.future(model_id, seq_id),
                keys.journal(model_id),
                keys.journal_order(model_id),
                keys.journal_pending(model_id),
                keys.journal_meta(model_id),
                keys.epoch(model_id),
                keys.WAITING_OPERATIONS,
                use.day_key,
                *ACCOUNT,
            ],
            seq_id,
            epoch,
            result,
            self.room.limits.result_life,
            int(replay_passes_over),
            closing,
            ids.request_id(model_id, seq_id),
            keys.DONE_CHANNEL,
            *use.args,
        )
        return Published(outcome)

    async def mark_durable(self, model_id: str, epoch: int, seq_id: int, location: str) -> bool:
        """Points at a durable snapshot and trims the journal up to it; whether the pointer now names it.

        False when the epoch is not current, or a newer snapshot is named already. An operation whose
        result is not published yet stays journaled until it is.
        """
        outcome = await self._mark_durable(
            [
                keys.journal(model_id),
                keys.journal_order(model_id),
                keys.journal_pending(model_id),
                keys.journal_meta(model_id),
                keys.epoch(model_id),
                *ACCOUNT,
            ],
            seq_id,
            epoch,
            location,
        )
        return bool(outcome == 1)

    async def durable(self, model_id: str) -> tuple[int, str] | None:
        """(seq_id, location) of the newest durable snapshot."""
        seq_id: Any
        location: Any
        seq_id, location = await self._redis.hmget(keys.journal_meta(model_id), ["durable", "location"])
        return None if seq_id is None else (int(seq_id), location.decode())

    async def last_seq_id(self, model_id: str) -> int:
        """The highest seq_id used so far; -1 = none."""
        top: Any = await self._redis.zrevrange(keys.journal_order(model_id), 0, 0)
        fields = ["durable", "floor", "through"]
        settled: Any = await self._redis.hmget(keys.journal_meta(model_id), fields)
        return max(int(found) for found in (*top, *settled, b"-1") if found is not None)

    async def skip(self, model_id: str, epoch: int, up_to: int) -> bool:
        """Declares every seq_id up to this one that is not journaled as used up; False on a stale epoch."""
        reply = await self._skip([keys.journal_meta(model_id), keys.epoch(model_id)], up_to, epoch)
        return bool(reply == 1)

    async def place(self, model_id: str, epoch: int, trainer: str) -> bool:
        """Notes which trainer a model is on; False on a stale epoch."""
        reply = await self._place_model([keys.journal_meta(model_id), keys.epoch(model_id)], trainer, epoch)
        return bool(reply == 1)

    async def close(self, model_id: str, epoch: int, closing: bytes) -> Closing:
        """Ends a model for good unless operations of it wait: every later one comes to `closing`, a
        serialized OperationResult. A model that is closed already stays closed as it is."""
        reply = await self._close_model(
            [keys.journal_pending(model_id), keys.journal_meta(model_id), keys.epoch(model_id)],
            epoch,
            closing,
        )
        return Closing(reply)

    async def is_closed(self, model_id: str) -> bool:
        """Whether no operation of the model will run any more. That never changes back."""
        return bool(await self._redis.hexists(keys.journal_meta(model_id), "closed"))

    async def is_half_full(self, model_id: str) -> bool:
        """Whether what is kept for a replay reached half of its bound since the last durable snapshot."""
        return bool(await self._redis.hexists(keys.journal_meta(model_id), "half_full"))

    async def erase(self, model_id: str) -> bool:
        """Deletes what is kept to replay a closed model, the pointer to its durable snapshot included;
        False when the model is open, or operations of it wait."""
        reply = await self._erase_journal(
            [
                keys.journal(model_id),
                keys.journal_order(model_id),
                keys.journal_pending(model_id),
                keys.journal_meta(model_id),
                *ACCOUNT,
            ]
        )
        return bool(reply == 1)

    async def gap_age(self, model_id: str, epoch: int, first: int) -> float | None:
        """Seconds since some dispatcher first missed this seq_id; None on a stale epoch."""
        age = await self._gap_age([keys.journal_meta(model_id), keys.epoch(model_id)], first, epoch)
        return None if age < 0 else age / 1000

    async def tried_in_vain(self, model_id: str, epoch: int, waited: float, refused: bool) -> InVain | None:
        """Counts a try to bring a model where its journal is; how long there were such, whoever made them,
        until a result of the model is published. None on a stale epoch.

        Args:
            waited: pause before this try, in seconds.
            refused: it came to what comes again until something changes.
        """
        names = [keys.journal_meta(model_id), keys.epoch(model_id)]
        total, since = await self._tried_in_vain(names, epoch, round(waited * 1000), int(refused))
        return None if total < 0 else InVain(total / 1000, since / 1000)

    async def set_queue_state(self, model_id: str, reason: str, seconds: float = 0.0) -> None:
        """Says why a model's operations wait, for so long and half a minute more; empty = they run."""
        if reason:
            await self._note_queue_state([keys.queue_state(model_id)], reason, 30 + round(seconds))
        else:
            await self._redis.delete(keys.queue_state(model_id))

    async def queue_states(self) -> dict[str, str]:
        """Of models that may have unfinished operations why these wait, where somebody has said so."""
        models = [model_id for model_id, _ in await self.models_with_work()]
        found: dict[str, str] = {}
        for some in (models[at : at + _ASKED] for at in range(0, len(models), _ASKED)):
            said: Any = await self._redis.mget([keys.queue_state(model_id) for model_id in some])
            found |= {model_id: why.decode() for model_id, why in zip(some, said, strict=True) if why}
        return found


def _operation(model_id: str, seq_id: int, raw: bytes) -> operation_pb2.Operation:
    try:
        return operation_pb2.Operation.FromString(raw)
    except DecodeError as error:
        raise UnreadableOperation(keys.journal(model_id), seq_id, str(error)) from error
