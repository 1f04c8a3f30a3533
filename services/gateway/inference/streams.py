"""Samples told as they are generated, for clients that speak tokens.

Invariants: what was told of a sequence is its beginning for ever, or the stream fails. A stream that ends
before its sample leaves the sample running: the same request tells it again, from its beginning.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.contract.errors import DataLoss, Unavailable
from services.common.process.pools import COMPUTE
from services.common.process.tasks import cancel_all
from services.gateway.inference import convert
from services.gateway.results.fetched import FetchedResults
from services.gateway.results.futures import Futures
from services.gateway.sampling.accept import Sampling
from services.gateway.sampling.replicas import Replicas
from services.gateway.sessions.sessions import Sessions

_LOOK_S = 30.0

_PART_BYTES = 2**18
"""Most bytes of token ids in a part: with as many of log-probabilities, half a MiB of a message."""


@dataclass(frozen=True)
class Accepted:
    """The sample is accepted."""

    request_id: str


@dataclass(frozen=True)
class New:
    """Tokens of a sequence, after `start` others: int32 ids and float32 log-probabilities, little-endian."""

    index: int
    start: int
    tokens: bytes
    logprobs: bytes


@dataclass(frozen=True)
class Ended:
    """A sequence is whole. `reason` is a StopReason."""

    index: int
    reason: int


@dataclass(eq=False)
class _Told:
    """What replicas told of a sample, and how much of it the client has."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: defaultdict[int, bytearray] = field(default_factory=lambda: defaultdict(bytearray))
    logprobs: defaultdict[int, bytearray] = field(default_factory=lambda: defaultdict(bytearray))
    sent: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    differs: bool = False

    def add(self, parts: Sequence[Any]) -> None:
        """Notes tokens as they come. What comes again must be the same; what follows a gap waits."""
        for part in parts:
            known, start = self.tokens[part.index], 4 * part.start
            tokens, logprobs = part.added.tokens.data, part.added.logprobs.data
            if start > len(known):
                continue
            both = min(len(known) - start, len(tokens))
            self.differs |= known[start : start + both] != tokens[:both]
            known += tokens[both:]
            self.logprobs[part.index] += logprobs[both:]
        self.changed.set()

    def end(self, sequences: Sequence[Any]) -> None:
        """Notes the whole sequences."""
        for index, whole in enumerate(sequences):
            known, tokens = self.tokens[index], whole.tokens.data
            self.differs |= not tokens.startswith(bytes(known))
            self.logprobs[index] += whole.logprobs.data[len(known) :]
            known += tokens[len(known) :]

    def take(self) -> list[New]:
        """What the client does not have yet.

        Raises:
            DataLoss: a sequence was begun anew, and with other tokens.
        """
        if self.differs:
            raise DataLoss(
                "a sampler was lost, and another one does not go on with the same tokens; send this as a new "
                "sample"
            )
        found = []
        for index, known in self.tokens.items():
            for start in range(self.sent[index], len(known), _PART_BYTES):
                part = slice(start, start + _PART_BYTES)
                found.append(New(index, start // 4, bytes(known[part]), bytes(self.logprobs[index][part])))
            self.sent[index] = len(known)
        return found


class SampleStreams:
    """Has samples accepted and tells them."""

    def __init__(
        self,
        sampling: Sampling,
        sessions: Sessions,
        replicas: Replicas,
        futures: Futures,
        fetched: FetchedResults,
    ) -> None:
        self._sampling = sampling
        self._sessions = sessions
        self._replicas = replicas
        self._futures = futures
        self._fetched = fetched

    async def tell(self, owner: str, request: Any) -> AsyncGenerator[Accepted | New | Ended]:
        """Accepts a sample (a SampleRequest of the contract) and tells it until it is whole.

        Raises:
            TinsmithError: as `Sampling.sample`; while iterating, what the sample failed with.
            Unavailable: this gateway ends; the sample goes on.
            DataLoss: the sample changed under way. Told again it would go on otherwise than it was begun.
        """
        session = await self._sampling.get(owner, request.sampling_session_id)
        request, request_id = convert.seeded(request)
        told = _Told()
        accepted = Accepted(await self._sampling.sample(owner, request))
        self._replicas.follow(request_id, told.add)
        try:
            yield accepted
            whole = asyncio.create_task(
                self._whole(request_id, session.session_id), name=f"tell {request_id}"
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
            yield Ended(index, sequence.stop_reason)

    async def _whole(self, request_id: str, session_id: str) -> Sequence[Any]:
        while True:
            view = await self._futures.wait(request_id, _LOOK_S)
            if view.state == "unknown":
                raise Unavailable("the request was lost with the last second of Redis; send it again")
            if view.result is not None:
                return await COMPUTE.run(convert.sequences, view.result)
            if self._futures.draining:
                raise Unavailable("this gateway ends; send the same again, and another one goes on")
            await self._sessions.note_alive(session_id)
