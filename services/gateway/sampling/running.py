"""Accepted samples that are not done: what they are told meanwhile, through whichever gateway.

Invariants: a sample that moves hears of every newer version of its model that an inflight save made, from
before it asks for a version until it is done; a word that was lost while Redis was away is made up for.
A sample that is to be kept ends where it is: it has come to nothing only when no replica has it, and one that
cannot be asked may have it. From before a sample waits for its turn until it is done its snapshot is noted as
used.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from services.common.contract.errors import Overloaded, Unavailable
from services.common.process.periodic import Periodic
from services.common.process.tasks import a_few_at_once, cancel_all
from services.common.state import keys
from services.gateway.dispatch.plan import backoff
from services.gateway.records.sample_news import Kept, Moved, SampleNews
from services.gateway.records.sampling_session import InflightStore, SamplingSessionRecord
from services.gateway.records.snapshot import SnapshotStore
from services.gateway.results.subscription import Subscription
from services.gateway.sampling.replicas import Replicas, wanted_by
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import results_pb2, sampling_pb2, types_pb2

log = logging.getLogger(__name__)

# The store writes a use down once a minute; a snapshot that is not used may go after two.
_USE_S = 15.0
_USE_DEADLINE_S = 60.0


class Followed:
    """One sample of this gateway.

    Attributes:
        owner: of its session.
        waiting: ends when the sample is to be kept and no replica runs it for this gateway.
    """

    def __init__(self, request: sampler_pb2.SampleRequest, owner: str) -> None:
        self.request = request
        self.owner = owner
        self.waiting = asyncio.timeout(None)
        self._settled = False

    def settle(self) -> None:
        """It is done; only its result is still to be written."""
        self._settled = True

    def keep(self) -> None:
        """Ends it, unless it is done."""
        if not self._settled:
            self._settled = True
            self.waiting.reschedule(asyncio.get_running_loop().time())


class Running:
    """The samples of one gateway that are not done."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        inflight: InflightStore,
        snapshots: SnapshotStore,
        replicas: Replicas,
    ) -> None:
        self._inflight = inflight
        self._snapshots = snapshots
        self._replicas = replicas
        self._heard = Subscription(client, keys.SAMPLE_CHANNEL, self._hear, self._look)
        self._followed: dict[str, Followed] = {}
        self._moving: defaultdict[str, dict[str, sampler_pb2.SampleRequest]] = defaultdict(dict)
        self._unseen: set[str] = set()
        self._looking: asyncio.Task[None] | None = None
        self._uses = Periodic("use of snapshots", _USE_S, self._note_uses, _USE_DEADLINE_S)

    def start(self) -> None:
        """Starts listening."""
        self._heard.start()
        self._uses.start()

    async def stop(self) -> None:
        """Stops listening."""
        await self._heard.stop()
        await self._uses.stop()
        await cancel_all([self._looking])

    def follow(self, request: sampler_pb2.SampleRequest, owner: str) -> _Following:
        """A context in which a sample is told what it is to be told; its request names newer weights when it
        moves."""
        return _Following(self, Followed(request, owner))

    def _begin(self, followed: Followed) -> None:
        request = followed.request
        self._followed[request.request_id] = followed
        if request.moves:
            self._moving[request.snapshot.model_id][request.request_id] = request

    def _end(self, followed: Followed) -> None:
        name, model_id = followed.request.request_id, followed.request.snapshot.model_id
        del self._followed[name]
        if followed.request.moves:
            del self._moving[model_id][name]
            if not self._moving[model_id]:
                del self._moving[model_id]

    async def note_use(self, followed: Followed) -> None:
        """The snapshot that a sample asks for stays while the sample waits or runs."""
        snapshot = followed.request.snapshot
        if snapshot.model_id:
            await self._snapshots.note_used(snapshot.model_id, snapshot.version, followed.owner)

    async def _note_uses(self) -> None:
        for followed in list(self._followed.values()):
            await self.note_use(followed)

    def _hear(self, text: str) -> None:
        news: SampleNews = msgspec.json.decode(text, type=SampleNews)
        if isinstance(news, Moved):
            self._move(news.model_id, news.version)
        else:
            self._keep(news)

    def _move(self, model_id: str, version: int) -> None:
        for request in self._moving.get(model_id, {}).values():
            if version > request.snapshot.version:
                request.snapshot.version = version
                self._replicas.move(request.request_id, request.snapshot)

    def _keep(self, news: Kept) -> None:
        followed = self._followed.get(news.request_id)
        if followed is not None and not self._replicas.end(news.request_id, keep=True):
            followed.keep()

    def _look(self) -> None:
        """Makes up for what was said while nobody listened."""
        self._unseen |= self._moving.keys()
        if self._unseen and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look_all(), name="look for newer weights")

    async def _look_all(self) -> None:
        while self._unseen:
            models, self._unseen = list(self._unseen), set()
            await a_few_at_once(self._look_at, models)

    async def _look_at(self, model_id: str) -> None:
        """Looks until Redis answers, however long it is away, or no sample of the model is left."""
        tries = 0
        while model_id in self._moving:
            try:
                self._move(model_id, await self._inflight.current(model_id) or 0)
                return
            except (RedisError, OSError) as error:
                tries += 1
                if tries == 1:
                    log.warning("newer weights of %s are looked for until Redis answers: %s", model_id, error)
            await asyncio.sleep(backoff(tries))


class _Following:
    def __init__(self, running: Running, followed: Followed) -> None:
        self._running = running
        self._followed = followed

    def __enter__(self) -> Followed:
        self._running._begin(self._followed)
        return self._followed

    def __exit__(self, *error: object) -> None:
        self._running._end(self._followed)


async def kept(
    replicas: Replicas, request: sampler_pb2.SampleRequest, session: SamplingSessionRecord
) -> results_pb2.OperationResult | None:
    """What a sample has come to that is to be kept, and that this gateway has no replica run now, though it
    or another one did. None: no replica has it any more. One that has it is asked until it answers, or is
    gone.

    Raises:
        TinsmithError: the sample failed.
    """
    tries = 0
    while has_it := await replicas.find(session.base_model, request.request_id):
        asyncio.get_running_loop().call_soon(replicas.end, request.request_id, True)
        try:
            return await replicas.call(has_it, request, wanted_by(request, session.full), session.owner)
        except (Unavailable, Overloaded):
            tries += 1
        await asyncio.sleep(backoff(tries))
    return None


def untouched(request: sampler_pb2.SampleRequest) -> results_pb2.OperationResult:
    """What a sample has come to that was kept before its first token."""
    k = request.topk_sample_logprobs
    empty = sampling_pb2.SampledSequence(
        stop_reason=sampling_pb2.STOP_REASON_CANCELLED,
        tokens=_nothing(types_pb2.DATA_TYPE_INT32, 0),
        logprobs=_nothing(types_pb2.DATA_TYPE_FLOAT32, 0),
    )
    if k:
        empty.topk_logprobs.token_ids.CopyFrom(_nothing(types_pb2.DATA_TYPE_INT32, 0, k))
        empty.topk_logprobs.logprobs.CopyFrom(_nothing(types_pb2.DATA_TYPE_FLOAT32, 0, k))
    sample = sampling_pb2.SampleResult(sequences=[empty] * request.num_samples)
    return results_pb2.OperationResult(sample=sample)


def _nothing(dtype: types_pb2.DataType.ValueType, *shape: int) -> types_pb2.Tensor:
    return types_pb2.Tensor(dtype=dtype, shape=shape)
