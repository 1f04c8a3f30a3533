"""Samples told as they are generated, for clients that speak tokens.

Invariants: what was told of a sequence is its beginning for ever, or the stream fails. A stream that ends
before its sample leaves the sample running: the same request tells it again, from its beginning. What a
stream holds is counted (`answer_room`), and its request is not kept once it is accepted.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.contract.errors import DataLoss, Internal, Unavailable
from services.common.process.pools import COMPUTE
from services.common.process.tasks import cancel_all
from services.gateway.access.answer_room import PART_BYTES, AnswerAccount, AnswerRoom
from services.gateway.inference import convert
from services.gateway.inference.beginning import Beginning
from services.gateway.results.fetched import FetchedResults
from services.gateway.results.futures import Futures
from services.gateway.sampling.accept import Sampling
from services.gateway.sampling.replicas import Replicas
from services.gateway.sessions.sessions import Sessions

_LOOK_S = 30.0

STREAMED_TIMES = 2
"""Memory that new tokens take until they are sent, in times of what was told: here, and as a message."""

_PART_BYTES = 2**18
"""Most bytes of token ids in a part: with as many of log-probabilities, half a MiB of a message."""


@dataclass(frozen=True)
class Accepted:
    """The sample is accepted."""

    request_id: str


@dataclass(frozen=True)
class New:
    """Tokens of a sequence, after `start` others, that one version of the weights made: int32 ids and float32
    log-probabilities, little-endian."""

    index: int
    start: int
    version: int
    tokens: bytes
    logprobs: bytes


@dataclass(frozen=True)
class Ended:
    """A sequence is whole. `reason` is a StopReason, `versions` (version, tokens, keys and values were kept)
    of the weights that made it, in order."""

    index: int
    reason: int
    versions: tuple[tuple[int, int, bool], ...]


class _Told:
    """What replicas told of a sample and the client does not have yet.

    Invariant: it has room for all that it keeps. What there is no room for, because the client reads slowly,
    and what follows it, comes with the end of the sample.
    """

    def __init__(self, account: AnswerAccount) -> None:
        self.changed = asyncio.Event()
        self._account = account
        self._beginnings: defaultdict[int, Beginning] = defaultdict(Beginning)
        self._parts: deque[tuple[New, int]] = deque()
        self._differs = False

    def add(self, parts: Sequence[Any]) -> None:
        """Notes tokens as they come. What comes again must be the same; what follows a gap waits."""
        for part in parts:
            tokens, logprobs = part.added.tokens.data, part.added.logprobs.data
            beginning = self._beginnings[part.index]
            fresh = beginning.fresh(4 * part.start, tokens)
            self._differs |= beginning.differs
            takes = PART_BYTES + STREAMED_TIMES * 2 * fresh
            if fresh and self._account.take_now(takes):
                self._tell(part.index, part.version, tokens[-fresh:], logprobs[-fresh:], takes)
        self.changed.set()

    def _tell(self, index: int, version: int, tokens: bytes, logprobs: bytes, takes: int) -> None:
        told = self._beginnings[index].told
        for start in range(0, len(tokens), _PART_BYTES):
            part = slice(start, start + _PART_BYTES)
            new = New(index, (told + start) // 4, version, tokens[part], logprobs[part])
            self._parts.append((new, takes if start + _PART_BYTES >= len(tokens) else 0))
        self._beginnings[index].tell(tokens)

    def end(self, sequences: Sequence[Any]) -> None:
        """Notes the whole sequences, which the account has room for.

        Raises:
            Internal: a sampler did not say which weights made a token.
        """
        for index, whole in enumerate(sequences):
            tokens, told = whole.tokens.data, self._beginnings[index].told
            self._differs |= not self._beginnings[index].begins(tokens)
            end = 0
            for span in whole.versions:
                start, end = max(told, end), end + 4 * span.tokens
                if start < end:
                    self._tell(index, span.version, tokens[start:end], whole.logprobs.data[start:end], 0)
            if end != len(tokens):
                raise Internal(f"a sampler told of {end // 4} of {len(tokens) // 4} tokens what made them")

    def take(self) -> Iterator[New]:
        """What the client does not have yet. Each part gives its room back when the next is asked for.

        Raises:
            DataLoss: a sequence was begun anew, and with other tokens.
        """
        while self._parts or self._differs:
            if self._differs:
                raise DataLoss(
                    "a sampler was lost, and another one does not go on with the same tokens; send this as a "
                    "new sample"
                )
            new, takes = self._parts.popleft()
            try:
                yield new
            finally:
                self._account.give(takes)


class SampleStreams:
    """Has samples accepted and tells them."""

    def __init__(
        self,
        sampling: Sampling,
        sessions: Sessions,
        replicas: Replicas,
        futures: Futures,
        fetched: FetchedResults,
        room: AnswerRoom,
    ) -> None:
        self._sampling = sampling
        self._sessions = sessions
        self._replicas = replicas
        self._futures = futures
        self._fetched = fetched
        self._room = room

    async def tell(self, owner: str, request: Any) -> AsyncGenerator[Accepted | New | Ended]:
        """Accepts a sample (a SampleRequest of the contract) and tells it until it is whole.

        Raises:
            TinsmithError: as `Sampling.sample`; while iterating, what the sample failed with.
            Unavailable: this gateway ends; the sample goes on.
            DataLoss: the sample changed under way. Told again it would go on otherwise than it was begun.
        """
        session = await self._sampling.get(owner, request.sampling_session_id)
        request, request_id = convert.seeded(request)
        with self._room.account(owner) as account:
            told = _Told(account)
            accepted = Accepted(await self._sampling.sample(owner, request))
            del request
            self._replicas.follow(request_id, told.add)
            try:
                yield accepted
                whole = asyncio.create_task(
                    self._whole(request_id, session.session_id, account), name=f"tell {request_id}"
                )
                whole.add_done_callback(lambda _: told.changed.set())
                try:
                    while not whole.done():
                        await told.changed.wait()
                        told.changed.clear()
                        for new in told.take():
                            yield new
                    sequences = whole.result()
                finally:
                    await cancel_all([whole])
            finally:
                self._replicas.unfollow(request_id, told.add)
            told.end(sequences)
            for new in told.take():
                yield new
            self._fetched.note(request_id)
            for index, sequence in enumerate(sequences):
                spans = tuple((span.version, span.tokens, span.kv_kept) for span in sequence.versions)
                yield Ended(index, sequence.stop_reason, spans)

    async def _whole(self, request_id: str, session_id: str, account: AnswerAccount) -> Sequence[Any]:
        """The sequences, for which room is taken."""
        result = await self._result(request_id, session_id)
        needed = self._room.of_result(len(result))
        if not account.take_now(needed):
            # What waits for room takes none meanwhile.
            del result
            await account.take(needed)
            result = await self._result(request_id, session_id)
        return await COMPUTE.run(convert.sequences, result)

    async def _result(self, request_id: str, session_id: str) -> bytes:
        while True:
            view = await self._futures.wait(request_id, _LOOK_S)
            if view.state == "unknown":
                raise Unavailable("the request was lost with the last second of Redis; send it again")
            if view.result is not None:
                return view.result
            if self._futures.draining:
                raise Unavailable("this gateway ends; send the same again, and another one goes on")
            await self._sessions.note_alive(session_id)
