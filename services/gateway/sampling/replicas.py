"""The sampler replicas as one gateway uses them: who runs a sample, and what became of it.

Invariants: a sample's work counts at its replica (`Placements`) from when it is sent until it is answered,
however that ends; a replica that is not ready (draining) gets nothing new; one that fails by a fault of its
own gets nothing while it rests and another one is there, so that its speed at failing attracts nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import grpc.aio

from services.common.contract.errors import Internal, Starting, TinsmithError, Unavailable
from services.common.state.registry import ServiceRecord
from services.common.telemetry import subject
from services.gateway.access.answer_room import AnswerAccount, AnswerRoom
from services.gateway.cluster.discovery import Services, call_error
from services.gateway.dispatch.plan import backoff
from services.gateway.placement import choose_replica
from services.gateway.placement.able import Able
from services.gateway.placement.choose_replica import Wanted
from services.gateway.placement.placements import Placements
from services.gateway.sampling.tries import Rests, Silent, Stalled
from services.gateway.sampling.words import COMES_S, TELL_S, Words
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc
from tinsmith.v1 import results_pb2, sampling_pb2, types_pb2

log = logging.getLogger(__name__)

STALL_S = 1800.0
_ASK_AGAIN_S = 60.0
_ANSWER_S = 30.0
_AT_ONCE_S = 0.001
_FIND_S = 2.0
_ASKED_FOR_AT_ONCE = 32
_SAMPLE, _STREAM = (f"/tinsmith.internal.v1.SamplerService/{name}" for name in ("Sample", "StreamSample"))
_KEPT_S = 60.0
"""A replica keeps no sample longer than this that nobody asks for; see `Generations` of samplers."""

Follower = Callable[[Sequence[sampler_pb2.SequenceDelta]], None]
"""Is told tokens of a sample as they come. A sample that is run again, because its replica was lost, is told
from its beginning again."""


class _Heard:
    """What a replica has told of a sample so far: 8 bytes for each token, for as long as it tells more and
    there is room for it. Who follows the sample later hears no more than that before its end."""

    def __init__(self, account: AnswerAccount) -> None:
        self._account = account
        self._full = False
        # Of a sequence and a version. One that moves goes to newer versions only.
        self._told: defaultdict[tuple[int, int], tuple[bytearray, bytearray]] = defaultdict(
            lambda: (bytearray(), bytearray())
        )

    def add(self, parts: Sequence[sampler_pb2.SequenceDelta]) -> None:
        for part in parts:
            self._full = self._full or not self._account.take_now(2 * len(part.added.tokens.data))
            if self._full:
                return
            tokens, logprobs = self._told[part.index, part.version]
            tokens += part.added.tokens.data
            logprobs += part.added.logprobs.data

    def parts(self) -> Iterator[sampler_pb2.SequenceDelta]:
        """All of it, from the beginning, without likely tokens."""
        starts: Counter[int] = Counter()
        for (index, version), (tokens, logprobs) in self._told.items():
            start, shape = starts[index], [len(tokens) // 4]
            starts[index] += shape[0]
            ids = types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT32, shape=shape, data=bytes(tokens))
            floats = types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=shape, data=bytes(logprobs))
            added = sampling_pb2.SampledSequence(tokens=ids, logprobs=floats)
            yield sampler_pb2.SequenceDelta(index=index, start=start, added=added, version=version)


def wanted_by(request: sampler_pb2.SampleRequest, full: bool) -> Wanted:
    """What a sample of a session wants of a replica."""
    return choose_replica.wanted(
        request.snapshot.model_id,
        request.snapshot.version,
        full,
        request.cache_namespace,
        request.prompt.data,
        request.num_samples,
        request.params.max_tokens if request.params.HasField("max_tokens") else None,
        request.request_id,
        routed_experts=request.routed_experts,
    )


class Replicas:
    """Samplers of all base models.

    Args:
        placements: what this gateway and others sent to each.
        room: for what they have told of samples that somebody follows.
        stall: seconds without a new token after which a sample is given up. One that goes on may take as long
            as it takes.
        ask_again: seconds after which a replica is asked how far it is.
    """

    def __init__(
        self,
        samplers: Services,
        placements: Placements,
        room: AnswerRoom,
        stall: float = STALL_S,
        ask_again: float = _ASK_AGAIN_S,
    ) -> None:
        self._samplers = samplers
        self._placements = placements
        samplers.listen(self._wake)
        self._room = room
        self._stall = stall
        self._ask_again = ask_again
        self._change = asyncio.Event()
        self._runs_on: dict[str, ServiceRecord] = {}
        self._followers: dict[str, set[Follower]] = {}
        self._heard: dict[str, _Heard] = {}
        self._words = Words()
        self._rests = Rests()
        self._able = Able()
        self._silent = Silent(_FIND_S)
        self._asking = asyncio.Semaphore(_ASKED_FOR_AT_ONCE)

    def listen(self, on_change: Callable[[], None]) -> None:
        """Has a function called whenever a replica came, went or changed."""
        self._samplers.listen(on_change)

    def follow(self, request_id: str, follower: Follower) -> None:
        """Has a function told the tokens of a sample, if this gateway has it run from now on; at once those
        that others who follow it were told before."""
        self._followers.setdefault(request_id, set()).add(follower)
        heard = self._heard.get(request_id)
        if heard is not None:
            follower(list(heard.parts()))

    def unfollow(self, request_id: str, follower: Follower) -> None:
        """Ends that for this function, and for no other. Repeating changes nothing."""
        followers = self._followers.get(request_id, set())
        followers.discard(follower)
        if not followers:
            self._followers.pop(request_id, None)

    async def tokenizer(self, base_model: str) -> sampler_pb2.GetTokenizerResponse:
        """The tokenizer of a base model, from one of its replicas.

        Raises:
            Starting: there is none at present.
            InvalidRequest: it cannot be told.
        """
        for replica in self._samplers.serving(base_model):
            try:
                request = sampler_pb2.GetTokenizerRequest()
                return await self._stub(replica).GetTokenizer(request, timeout=_ANSWER_S)
            except grpc.aio.AioRpcError as raw:
                error = call_error(raw)
                if error.category == "user":
                    raise error from raw
                log.info("sampler %s does not tell its tokenizer: %s", replica.id, error)
        raise Starting(f"no sampler for {base_model} is running to tell its tokenizer; send this again later")

    def ready(self, base_model: str) -> dict[str, ServiceRecord]:
        """Replicas that take new samples, by incarnation."""
        serving = self._samplers.serving(base_model)
        return {record.incarnation: record for record in serving if record.state == "ready"}

    def retired(self, base_model: str) -> bool:
        """Whether no replica samples a base model, and none will."""
        return self._samplers.retired(base_model)

    def choose(self, base_model: str, wanted: Wanted, avoided: set[str]) -> ServiceRecord | None:
        """The replica for a sample that wants this; None when there is none at present but avoided ones."""
        ready = self.ready(base_model)
        now = asyncio.get_running_loop().time()
        able = self._able.among(base_model, ready, wanted, now)
        usable = [name for name in able if name not in avoided]
        if len(usable) == 1:
            return ready[usable[0]]
        sound = [name for name in usable if self._rests.sound(name, now)]
        replicas = [choose_replica.seen(ready[name], wanted, self._placements) for name in sound or usable]
        chosen = choose_replica.choose(replicas, wanted)
        return None if chosen is None else ready[chosen.id]

    async def find(self, base_model: str, request_id: str) -> ServiceRecord | None:
        """The replica, draining or not, that has a sample which another gateway, or an earlier start of this
        one, sent out; None = none has. One that does not answer is asked until it does or is gone, or for a
        minute: then it has ended what nobody asked for. So are those that are not announced just now."""
        clock = asyncio.get_running_loop().time
        until, tries, without = 0.0, 0, set[str]()
        while True:
            # A dead gateway may leave tens of thousands: calls for all at once would not be answered in time.
            async with self._asking:
                until = until or clock() + _KEPT_S
                serving = self._samplers.serving(base_model)
                replicas = [one for one in serving if one.incarnation not in without]
                asked = [one for one in replicas if self._silent.may_ask(one.incarnation, clock())]
                known = await asyncio.gather(*(self._knows(replica, request_id) for replica in asked))
            for replica, has in zip(asked, known, strict=True):
                if has:
                    return replica
                if has is not None:
                    without.add(replica.incarnation)
            all_said = len(asked) == len(replicas) and None not in known
            if (all_said and not self._samplers.missing(base_model)) or clock() >= until:
                return None
            tries += 1
            await asyncio.sleep(backoff(tries))

    async def _knows(self, replica: ServiceRecord, request_id: str) -> bool | None:
        """Whether a replica has a sample; None when it cannot be asked."""
        try:
            request = sampler_pb2.FindSampleRequest(request_id=request_id)
            known = (await self._stub(replica).FindSample(request, timeout=_FIND_S)).known
        except grpc.aio.AioRpcError:
            self._silent.note(replica.incarnation, asyncio.get_running_loop().time())
            return None
        self._silent.well(replica.incarnation)
        return known

    async def call(
        self, replica: ServiceRecord, request: sampler_pb2.SampleRequest, wanted: Wanted, owner: str
    ) -> results_pb2.OperationResult:
        """Has a replica run a sample that wants this. Cancelling the caller leaves it running there, for who
        takes it over.

        Raises:
            Unavailable: the replica is gone.
            Draining: it ends in order.
            Overloaded: it takes on no more now.
            Stalled: the sample makes no progress. It was ended there.
            TinsmithError: the sample failed.
        """
        name = replica.incarnation
        work = choose_replica.work(wanted, self._placements.known(name, wanted.blocks))
        self._placements.begin(name, wanted.blocks, work, wanted.adapter)
        self._runs_on[request.request_id] = replica
        try:
            reply = await self._answer(replica, request, owner)
        except TinsmithError as error:
            self._rests.note(replica, error, asyncio.get_running_loop().time())
            raise
        except grpc.aio.AioRpcError as error:
            # The transport's, who is not to blame for what it carries.
            raise call_error(error) from error
        except TimeoutError as error:
            # It answers every minute, whatever it works on.
            raise Unavailable(f"sampler {replica.id} does not answer") from error
        finally:
            del self._runs_on[request.request_id]
            self._placements.end(name, work, wanted.adapter)
        kind = reply.WhichOneof("kind")
        if kind == "result":
            self._rests.well(name)
            return results_pb2.OperationResult(sample=reply.result)
        if kind == "error":
            return results_pb2.OperationResult(error=reply.error)
        nothing = Internal(f"sampler {replica.id} answered with nothing")
        self._rests.note(replica, nothing, asyncio.get_running_loop().time())
        raise nothing

    def end(self, request_id: str, keep: bool = False) -> bool:
        """Has the replica that runs a sample for this gateway end it, whoever waits there; whether one does.

        Args:
            keep: the sample is answered with what it has come to.
        """
        replica = self._runs_on.get(request_id)
        if replica is None:
            return False
        kind = f"{'keep' if keep else 'end'} at {replica.id}"
        if self._words.says(kind, request_id):
            return True
        clock = asyncio.get_running_loop().time
        until = clock() + _KEPT_S
        asked = sampler_pb2.EndSampleRequest(request_id=request_id, keep=keep)

        async def end() -> bool:
            nonlocal until
            reply = await self._stub(replica).EndSample(asked, timeout=TELL_S, metadata=subject.metadata())
            # One that it does not know has ended by itself, or is yet to come: its call goes another way.
            until = min(until, clock() + COMES_S)
            return reply.known

        def wanted() -> bool:
            return self._runs_on.get(request_id) is replica if keep else clock() < until

        self._words.say(kind, request_id, end, wanted)
        return True

    def move(self, request_id: str, snapshot: sampler_pb2.Snapshot) -> None:
        """Has the replica that runs a sample for this gateway go on with newer weights."""
        replica = self._runs_on.get(request_id)
        if replica is None:
            return
        asked = sampler_pb2.MoveSampleRequest(request_id=request_id, snapshot=snapshot)

        async def move() -> bool:
            reply = await self._stub(replica).MoveSample(asked, timeout=TELL_S, metadata=subject.metadata())
            return reply.known

        self._words.say("move", request_id, move, lambda: self._runs_on.get(request_id) is replica)

    async def stop(self) -> None:
        """Gives replicas some time to hear of what was ended."""
        await self._words.stop()

    async def _answer(
        self, replica: ServiceRecord, request: sampler_pb2.SampleRequest, owner: str
    ) -> sampler_pb2.SampleResponse:
        """The answer, however long it takes, as long as tokens are generated."""
        request.wait_seconds = self._ask_again
        if request.request_id in self._followers:
            with self._room.account(owner) as account:
                return await self._stream(replica, request, account)
        clock = asyncio.get_running_loop().time
        tokens, since = -1, clock()
        while True:
            reply = await self._sample(replica, request, self._ask_again + _ANSWER_S)
            if reply.WhichOneof("kind") != "progress":
                return reply
            if reply.progress.tokens != tokens:
                tokens, since = reply.progress.tokens, clock()
            elif clock() - since >= self._stall:
                raise self._stalled(request.request_id, tokens)

    async def _stream(
        self, replica: ServiceRecord, request: sampler_pb2.SampleRequest, account: AnswerAccount
    ) -> sampler_pb2.SampleResponse:
        """The same, telling who follows the sample what is generated meanwhile."""
        asked = sampler_pb2.StreamSampleRequest(sample=request)
        several = self._samplers.link(replica).several(_STREAM, asked, sampler_pb2.StreamSampleResponse)
        heard = self._heard[request.request_id] = _Heard(account)
        clock = asyncio.get_running_loop().time
        tokens, since = 0, clock()
        try:
            with several as answers:
                while True:
                    # No deadline of the whole, which may take as long as it takes, but one of every answer.
                    answer = await answers.read(self._ask_again + _ANSWER_S)
                    if answer is None:
                        raise Unavailable(f"sampler {replica.id} ended a stream without a result")
                    if answer.WhichOneof("kind") == "last":
                        return answer.last
                    new = answer.new_tokens.sequences
                    if new:
                        tokens, since = tokens + sum(part.added.tokens.shape[0] for part in new), clock()
                        heard.add(new)
                        for follower in tuple(self._followers.get(request.request_id, ())):
                            follower(new)
                    elif (reached := await self._reached(replica, request)) != tokens:
                        # One that joined what an earlier call began is told nothing before its end.
                        tokens, since = reached, clock()
                    elif clock() - since >= self._stall:
                        raise self._stalled(request.request_id, tokens)
        finally:
            del self._heard[request.request_id]

    async def _reached(self, replica: ServiceRecord, request: sampler_pb2.SampleRequest) -> int:
        """Tokens so far of a sample that a replica runs; 0 when it has just ended."""
        request.wait_seconds = _AT_ONCE_S
        return (await self._sample(replica, request, _ANSWER_S)).progress.tokens

    async def _sample(
        self, replica: ServiceRecord, request: sampler_pb2.SampleRequest, seconds: float
    ) -> sampler_pb2.SampleResponse:
        return await self._samplers.link(replica).ask(_SAMPLE, request, sampler_pb2.SampleResponse, seconds)

    def _stalled(self, request_id: str, tokens: int) -> Stalled:
        self.end(request_id)
        return Stalled(
            f"the sample made no progress in {self._stall:.0f} s, after {tokens} tokens; send it again"
        )

    def _stub(self, replica: ServiceRecord) -> sampler_pb2_grpc.SamplerServiceStub:
        return sampler_pb2_grpc.SamplerServiceStub(self._samplers.channel(replica))

    @property
    def change(self) -> asyncio.Event:
        """Set when a replica next comes, goes or changes. Take it before looking."""
        return self._change

    def _wake(self) -> None:
        live = {record.incarnation: record.kv_tokens for record in self._samplers.all()}
        self._placements.keep(live)
        self._rests.keep(live)
        self._silent.keep(live)
        self._change.set()
        self._change = asyncio.Event()
