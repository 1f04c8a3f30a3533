"""The trainer's end of the weight wire: keeps the group of live samplers and sends snapshots to it.

Invariant: every step has a deadline, and a member that fails one is left out for a while, so that one
sampler that hangs does not slow every publish down. Sends of one base model happen one at a time, whichever
trainer they are of (turn.py); a member that another trainer's group took in is no failure.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence, Set
from typing import Any

import grpc.aio
import redis.asyncio
import torch
from prometheus_client import Counter
from redis.exceptions import RedisError
from torch import Tensor

from services.common import weights
from services.common.contract.tensors import DTYPES, HostTensor
from services.common.process import rpc
from services.common.process.tasks import cancel_all, unheard
from services.common.process.threads import WorkerThread
from services.common.state import keys, registry
from services.common.state.registry import ServiceRecord
from services.common.telemetry import subject
from services.common.tls.wires import Identity
from services.common.weights.medium import Medium, choose_medium
from services.trainer.compute.data import LoraSpec
from services.trainer.convert import lora_to_pb
from services.trainer.publish.answers import (
    STILL_RECEIVING,
    at_fault,
    code,
    described,
    failure,
    is_silence,
    waited_in_vain,
)
from services.trainer.publish.answers import moved as is_moved
from services.trainer.publish.cargo import Cargo, on_host, packed_adapter, whole_model
from services.trainer.publish.leaving import Leaving
from services.trainer.publish.members import Group, Member, first_ranks, of_ranks
from services.trainer.publish.turn import Turn
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 20.0
_ANSWER_S = 5.0
LEFT_OUT_S = 60.0
LEFT_OUT = Counter(
    "tinsmith_samplers_left_out_total", "Times that a sampler was left out of broadcasts for a while"
)
_JOIN_ATTEMPTS = 3
_SENDS = 2
_MEDIA: dict[Medium, sampler_pb2.WeightMedium.ValueType] = {
    "gloo": sampler_pb2.WEIGHT_MEDIUM_GLOO,
    "nccl": sampler_pb2.WEIGHT_MEDIUM_NCCL,
}


class Broadcaster:
    """Sends adapters and whole models of one base model to its samplers.

    Args:
        device: of the trainer's rank 0, "cpu" or "cuda:n".
        dtype: element type of adapters on the wire. Whole models go as they are.
        who: this trainer, to samplers; None: they are called in the clear.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        redis_url: str,
        base_model: str,
        device: str,
        dtype: torch.dtype,
        who: Identity | None = None,
    ) -> None:
        self._who = who
        self._redis = client
        self._redis_url = redis_url
        self._base_model = base_model
        self._device = device
        self._gpu = _gpu_uuid(device)
        self._dtype = dtype
        self._lock = asyncio.Lock()
        self._turn = Turn(client, base_model)
        self._group: Group | None = None
        # By address and the number of this trainer's certificate.
        self._channels: dict[tuple[str, int], grpc.aio.Channel] = {}
        self._left_out: dict[tuple[str, str], float] = {}
        self._abandoned: set[asyncio.Future[Any]] = set()
        self._leaving = Leaving()

    def pack(self, lora: LoraSpec | None, tensors: Mapping[str, Tensor]) -> Cargo | None:
        """What `send` takes, of a snapshot's tensors where they are; None: their device has no room for it.
        Blocking.

        Args:
            lora: None = these are all weights of a model.
        """
        try:
            return self._packed(lora, tensors)
        except torch.OutOfMemoryError:
            return None

    async def send(
        self, model_id: str, version: int, lora: LoraSpec | None, what: Cargo | Mapping[str, HostTensor]
    ) -> tuple[int, int]:
        """Broadcasts a snapshot. Returns (bytes of tensors sent, sampler workers that have it).

        Args:
            lora: None = these are all weights of a model.
            what: it, packed, or its tensors, which are when there is somebody to send them to.

        Never fails for a sampler's sake; what does not arrive is logged.
        """
        snapshot = sampler_pb2.Snapshot(model_id=model_id, version=version)
        async with self._lock:
            try:
                async with self._turn.taken() as mine:
                    if mine:
                        return await self._send(snapshot, lora, what)
                log.warning("no broadcast of %s at %d: another trainer sends for long", model_id, version)
            except RedisError as error:
                log.warning("no broadcast of %s at %d, Redis does not answer: %s", model_id, version, error)
            return 0, 0

    async def _send(
        self, snapshot: sampler_pb2.Snapshot, lora: LoraSpec | None, what: Cargo | Mapping[str, HostTensor]
    ) -> tuple[int, int]:
        """Sends to the group, and once more when another trainer's group has its members."""
        cargo = what if isinstance(what, Cargo) else None
        have_it: Sequence[Member] = ()
        for _ in range(_SENDS):
            group = await self._current_group()
            if group is None:
                return 0, 0
            if cargo is None:
                assert not isinstance(what, Cargo)
                cargo = await asyncio.to_thread(lambda: self._packed(lora, on_host(what)))
            request = sampler_pb2.ReceiveSnapshotRequest(
                epoch=group.handle.epoch,
                snapshot=snapshot,
                lora=None if lora is None else lora_to_pb(lora),
                tensors=[
                    sampler_pb2.TensorSpec(name=spec.name, dtype=DTYPES[spec.dtype].pb, shape=spec.shape)
                    for spec in cargo.specs
                ],
                checksum=cargo.checksum,
                timeout_seconds=weights.most_seconds(cargo.nbytes),
            )
            have_it, moved = await self._transfer(group, cargo, request)
            if not moved:
                break
        return 0 if cargo is None else cargo.nbytes, sum(member.record.world_size for member in have_it)

    async def sends_from_device(self) -> bool:
        """Whether a group of the samplers that live now takes bytes out of the device's memory."""
        try:
            members = self._members(await registry.live(self._redis, "sampler"))
        except RedisError:
            return False
        return bool(members) and self._medium(members) == "nccl"

    async def close(self) -> None:
        """Leaves the group and closes the channels."""
        self._leave()
        for future in list(self._abandoned):
            future.cancel()
        await self._leaving.close()
        await self._close_channels(kept=frozenset())

    def _packed(self, lora: LoraSpec | None, tensors: Mapping[str, Tensor]) -> Cargo:
        return whole_model(tensors) if lora is None else packed_adapter(tensors, self._dtype)

    async def _current_group(self) -> Group | None:
        """The group of all live samplers, made anew when they changed; None when there are none."""
        now = time.monotonic()
        self._left_out = {key: until for key, until in self._left_out.items() if until > now}
        live = await registry.live(self._redis, "sampler")
        await self._close_channels(kept={record.address for record in live})
        members = self._members(live)
        if self._group is not None and [m.key for m in self._group.members] == [m.key for m in members]:
            return self._group
        self._leave()
        for _ in range(_JOIN_ATTEMPTS):
            if not members:
                return None
            if not self._leaving.has_room:
                log.warning("no weight group: too many are not left yet; samplers read from the store")
                return None
            self._group, members = await self._join(members)
            if self._group is not None:
                return self._group
        return None

    def _members(self, live: Sequence[ServiceRecord]) -> tuple[Member, ...]:
        """Those of the samplers that live which a group is made of."""
        return tuple(
            Member(record)
            for record in live
            if record.base_model == self._base_model
            and record.state == "ready"
            and (record.id, record.incarnation) not in self._left_out
        )

    def _medium(self, members: Sequence[Member]) -> Medium:
        return choose_medium([self._gpu, *(gpu for member in members for gpu in member.gpus)])

    async def _close_channels(self, kept: Set[str]) -> None:
        """Closes those to addresses where no sampler lives any more: a restarted one has another."""
        # What was called with the certificate before the present one may still run.
        for key in [key for key in self._channels if key[0] not in kept or key[1] < self._number - 1]:
            await self._channels.pop(key).close()

    def _leave(self) -> None:
        if self._group is not None:
            self._leaving.give_up(self._group.handle)
            self._group.thread.close()
            self._group = None

    async def _join(self, members: Sequence[Member]) -> tuple[Group | None, tuple[Member, ...]]:
        """Makes a new group. When it does not come together: None, and the members worth another try."""
        epoch = await self._redis.incr(keys.weight_epoch(self._base_model))
        *starts, world_size = first_ranks(members)
        medium = self._medium(members)
        device = self._device if medium == "nccl" else "cpu"
        calls: list[asyncio.Future[Any]] = []
        for member, first_rank in zip(members, starts, strict=True):
            request = sampler_pb2.JoinGroupRequest(
                epoch=epoch,
                first_rank=first_rank,
                world_size=world_size,
                timeout_seconds=JOIN_TIMEOUT_S,
                medium=_MEDIA[medium],
            )
            calls.append(_called(self._stub(member).JoinGroup, request, JOIN_TIMEOUT_S))
        began = asyncio.get_running_loop().time()
        # A thread for each group: one that is stuck until its deadline must not hold up the next.
        thread = WorkerThread(f"weights-{epoch}")
        own = asyncio.wrap_future(
            thread.submit(
                lambda: weights.join(
                    self._base_model, epoch, 0, world_size, device, self._redis_url, JOIN_TIMEOUT_S
                )
            )
        )
        whole = JOIN_TIMEOUT_S + _ANSWER_S
        await asyncio.wait([own, *calls], timeout=whole, return_when=asyncio.FIRST_EXCEPTION)
        if not any(is_silence(failure(call)) for call in calls):
            # Whoever only waited for another in vain says so soon.
            await asyncio.wait([own, *calls], timeout=_ANSWER_S)
        if all(future.done() and failure(future) is None for future in (own, *calls)):
            log.info("weight group %d (%s): %s", epoch, medium, ", ".join(map(str, members)))
            return Group(tuple(members), own.result(), thread), tuple(members)
        thread.close()
        late = asyncio.get_running_loop().time() - began >= JOIN_TIMEOUT_S
        met = failure(own)
        away = of_ranks(members, met.absent if isinstance(met, weights.NotMet) else ())
        absent = [gone or (late and not call.done()) for gone, call in zip(away, calls, strict=True)]
        answers = [failure(call) for call in calls]
        self._leaving.give_up_once_joined(own)
        for future in (own, *calls):
            self._abandon(future)
        log.warning("weight group %d did not come together", epoch)
        return None, self._worth_another_try(epoch, members, answers, absent)

    def _worth_another_try(
        self,
        epoch: int,
        members: Sequence[Member],
        answers: Sequence[BaseException | None],
        absent: Sequence[bool],
    ) -> tuple[Member, ...]:
        """Members of a group that did not come together which it was not for. Those that it was for are left
        out for a while, unless they are busy."""
        for member, answer, away in zip(members, answers, absent, strict=True):
            if answer is not None or away:
                why = "it did not come" if answer is None else described(answer)
                log.warning("sampler %s did not join weight group %d: %s", member, epoch, why)
        blamed = [m for m, guilty in zip(members, at_fault(answers, absent), strict=True) if guilty]
        busy = [m for m, answer in zip(members, answers, strict=True) if code(answer) == STILL_RECEIVING]
        self._leave_out([member for member in blamed if member not in busy])
        # When no member failed, this end did: there is nothing better to try.
        return tuple(member for member in members if member not in blamed) if blamed else ()

    def _abandon(self, future: asyncio.Future[Any]) -> None:
        """Nobody waits any more for this part of a join, which ends by itself at its deadline."""
        self._abandoned.add(unheard(future))
        future.add_done_callback(self._abandoned.discard)

    def _leave_out(self, members: Sequence[Member]) -> None:
        LEFT_OUT.inc(len(members))
        until = time.monotonic() + LEFT_OUT_S
        self._left_out.update({member.key: until for member in members})

    async def _transfer(
        self, group: Group, cargo: Cargo, request: sampler_pb2.ReceiveSnapshotRequest
    ) -> tuple[Sequence[Member], bool]:
        """Sends the tensors; the members that confirmed it, and whether a member is in another group by now.
        A group that failed is given up."""
        limit = request.timeout_seconds
        began = asyncio.get_running_loop().time()
        own = asyncio.wrap_future(
            group.thread.submit(lambda: group.handle.broadcast_buckets(cargo.buckets(), timeout=limit))
        )
        calls = [_called(self._stub(member).ReceiveSnapshot, request, limit) for member in group.members]
        _, unfinished = await asyncio.wait(
            [own, *calls], timeout=limit + _ANSWER_S, return_when=asyncio.FIRST_EXCEPTION
        )
        first_answers = [failure(call) for call in calls]
        in_vain = waited_in_vain(failure(own), first_answers)
        if unfinished and not is_moved(calls):
            # The others may wait in vain for the one that failed; who has the snapshot says so soon.
            early = in_vain and asyncio.get_running_loop().time() - began < limit
            bucket_s = weights.most_seconds(weights.BUCKET_BYTES) if early else 0.0
            await asyncio.wait(unfinished, timeout=bucket_s + _ANSWER_S)
        late = in_vain or asyncio.get_running_loop().time() - began >= limit
        blamed = at_fault(first_answers, [late and _is_silent(call) for call in calls])
        moved = [m for m, c in zip(group.members, calls, strict=True) if is_moved([c])]
        have_it = []
        for member, call in zip(group.members, calls, strict=True):
            if not call.done():
                log.warning("sampler %s did not receive a snapshot: it waits for another", member)
            elif (error := call.exception()) is not None:
                log.warning("sampler %s did not receive a snapshot: %s", member, described(error))
            else:
                have_it.append(member)
        await cancel_all(calls)
        if len(have_it) < len(group.members) or not own.done() or own.exception() is not None:
            log.warning("weight group %d is given up", group.handle.epoch)
            # The own end may be stuck until its deadline; nobody waits for it.
            unheard(own)
            at_once = zip(group.members, blamed, strict=True)
            self._leave_out([member for member, guilty in at_once if guilty and member not in moved])
            self._leave()
        return have_it, bool(moved)

    def _stub(self, member: Member) -> Any:
        key = (member.record.address, self._number)
        if key not in self._channels:
            self._channels[key] = rpc.channel(key[0], self._who, "sampler")
        return sampler_pb2_grpc.SamplerServiceStub(self._channels[key])

    @property
    def _number(self) -> int:
        return 0 if self._who is None else self._who.number


def _gpu_uuid(device: str) -> str:
    return "" if device == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def _called(method: Any, request: object, seconds: float) -> asyncio.Task[Any]:
    """A call under way, of something that takes so long at most."""
    call = method(request, timeout=seconds + _ANSWER_S, metadata=subject.metadata())
    return asyncio.ensure_future(call)


def _is_silent(call: asyncio.Future[Any]) -> bool:
    return not call.done() or is_silence(failure(call))
