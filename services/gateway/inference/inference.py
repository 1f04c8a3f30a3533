"""Answers questions of text: on a base model or a named checkpoint, without a session of the client's own.

Invariants: every prompt is a sample like any other, in a session of the question's owner. Once an answer
ends, however it ends, nothing of it waits or runs on. What was told of a sequence is its beginning for ever:
a replica's loss changes nothing of it, or the answer fails. What it holds is counted (`answer_room`): a
stream whose client reads too slowly for its share is told the rest at its end.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from services.common.contract.errors import Gone, TinsmithError, Unavailable
from services.common.process.tasks import cancel_all
from services.gateway.access.answer_room import PART_BYTES, AnswerAccount, AnswerRoom, Together
from services.gateway.access.turns import Turns
from services.gateway.inference import convert
from services.gateway.inference.beginning import Beginning
from services.gateway.inference.question import Done, ModelName, New, Question, bounded
from services.gateway.inference.sessions import InferenceSessions, Sampler
from services.gateway.inference.tokenizers import Tokenizers
from services.gateway.results.fetched import FetchedResults
from services.gateway.results.futures import Futures
from services.gateway.sampling.accept import Sampling, Weights
from services.gateway.sampling.replicas import Follower, Replicas
from services.gateway.sessions.sessions import Sessions
from services.gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_LOOK_S = 30.0
_DRAINING_S = 0.2
"""Between looks in a gateway that ends, where waits do not wait any more."""


@dataclass(frozen=True)
class Model:
    """A model that can be asked: the weights that its name stood for, and their tokenizer."""

    weights: Weights
    tokenizer: Tokenizer


class Inference:
    """Asks samplers, for clients that speak text."""

    def __init__(
        self,
        sampling: Sampling,
        sessions: Sessions,
        kept: InferenceSessions,
        tokenizers: Tokenizers,
        replicas: Replicas,
        futures: Futures,
        fetched: FetchedResults,
        turns: Turns,
        room: AnswerRoom,
    ) -> None:
        self._sampling = sampling
        self._sessions = sessions
        self._kept = kept
        self._tokenizers = tokenizers
        self._replicas = replicas
        self._futures = futures
        self._fetched = fetched
        self._turns = turns
        self._room = room

    async def model(self, owner: str, name: ModelName) -> Model:
        """What a name stands for now.

        Raises:
            InvalidRequest, NotFound, Gone: it is no model that the caller can sample.
            Starting: it cannot be told yet.
        """
        weights = await self._sampling.resolve(owner, name.base_model, name.path)
        return Model(weights, await self._tokenizers.of(weights.base_model))

    @asynccontextmanager
    async def ask(
        self, owner: str, model: Model, question: Question
    ) -> AsyncIterator[AsyncIterator[New | Done]]:
        """Asks, and answers with what comes of it until the context ends: of every prompt one Done, before
        that, when the question streams, what is New.

        Raises:
            InvalidRequest: the answer may become too large whatever is sampled.
            TinsmithError: as `Sampling.sample`; while iterating, what a sample failed with.
        """
        question = bounded(question, self._room.largest)
        if question.stream and question.seed is None:
            # Another replica that takes over goes on with the same tokens.
            question = replace(question, seed=secrets.randbits(64))
        async with AsyncExitStack() as held:
            answer = _Answer(self, owner, question, held.enter_context(self._room.account(owner)))
            sampler: Sampler | None = None
            try:
                sampler = await held.enter_async_context(self._kept.sampler(owner, model.weights))
                held.push_async_callback(answer.end)
                await answer.begin(sampler)
            except Gone:
                if answer.begun:
                    raise
                # Its session was finished from outside.
                if sampler is not None:
                    self._kept.forget(owner, sampler)
                sampler = await held.enter_async_context(self._kept.sampler(owner, model.weights))
                held.push_async_callback(answer.end)
                await answer.begin(sampler)
            yield answer.parts()


class _Answer:
    """One question under way."""

    def __init__(self, inference: Inference, owner: str, question: Question, account: AnswerAccount) -> None:
        self._on = inference
        self._account = account
        self._together = Together(account, len(question.prompts))
        self._owner = owner
        self._question = question
        # With what each takes of the account until it is taken from here.
        self._parts: asyncio.Queue[tuple[New | Done | Exception, int]] = asyncio.Queue()
        self._waits: dict[str, asyncio.Task[None]] = {}
        self._open: set[str] = set()
        """Samples that may run."""
        self._followers: dict[str, Follower] = {}
        self._differs = False
        """A sequence was begun anew with other tokens, which is told once."""
        self._told: defaultdict[tuple[int, int], Beginning] = defaultdict(Beginning)

    @property
    def begun(self) -> bool:
        return bool(self._waits)

    async def begin(self, sampler: Sampler) -> None:
        """Has every prompt accepted."""
        for prompt in range(len(self._question.prompts)):
            seq_id = next(sampler.numbers)
            request = convert.sample_request(self._question, prompt, sampler.sampling_session_id, seq_id)
            request_id = f"{sampler.sampling_session_id}:{seq_id}"
            limit = convert.constraint(self._question.constraint)
            self._open.add(request_id)
            try:
                await self._on._sampling.sample(self._owner, request, limit)
            except TinsmithError:
                # Refused. Whatever else breaks it off, it may have been accepted.
                self._open.discard(request_id)
                raise
            if self._question.stream:
                # No turn of the loop after it was accepted, so before it runs.
                self._followers[request_id] = partial(self._tell, prompt)
                self._on._replicas.follow(request_id, self._followers[request_id])
            wait = self._wait(prompt, request_id)
            self._waits[request_id] = asyncio.create_task(wait, name=f"answer {request_id}")

    async def parts(self) -> AsyncIterator[New | Done]:
        """Raises what a sample failed with."""
        left = len(self._question.prompts)
        while left:
            part, taken = await self._parts.get()
            try:
                if isinstance(part, Exception):
                    raise part
                left -= isinstance(part, Done)
                yield part
            finally:
                # Who listens has made bytes of it, and sent them.
                self._account.give(taken)

    async def end(self) -> None:
        """Gives up what still runs. Repeating changes nothing."""
        for request_id, follower in self._followers.items():
            self._on._replicas.unfollow(request_id, follower)
        await cancel_all(self._waits.values())
        while self._open:
            request_id = self._open.pop()
            try:
                await self._on._sampling.cancel(self._owner, request_id)
            except (TinsmithError, RedisError) as error:
                # Its session ends in time, and it with that.
                log.warning("could not give sample %s up: %s", request_id, error)

    async def _wait(self, prompt: int, request_id: str) -> None:
        try:
            self._parts.put_nowait(await self._done(prompt, request_id))
        except Exception as error:
            self._parts.put_nowait((error, 0))

    async def _done(self, prompt: int, request_id: str) -> tuple[Done, int]:
        """What a prompt came to, and what it gives back of the account once it is told. What does not stream
        is told with the other prompts' and stays until all of it was."""
        result = await self._result(request_id)
        # One that failed ends the others without waiting for them.
        convert.check_done(result)
        needed = self._question.answer_bytes(prompt, len(result))
        alone = self._question.stream or len(self._question.prompts) == 1
        if not (alone and self._account.take_now(needed)):
            # What waits for room takes none meanwhile.
            del result
            await (self._account.take(needed) if alone else self._together.take(needed))
            result = await self._result(request_id)
        done = await self._on._turns.run(self._owner, convert.done, result, self._question, prompt)
        for index, sequence in enumerate(done.sequences):
            told = self._told.get((prompt, index))
            if told is not None and not told.begins(sequence.tokens.ids.tobytes()):
                raise _differing()
        return done, needed if self._question.stream else 0

    async def _result(self, request_id: str) -> bytes:
        session_id = request_id.rpartition(":sample:")[0]
        while True:
            view = await self._on._futures.wait(request_id, _LOOK_S)
            if view.state != "pending":
                self._open.discard(request_id)
            if view.state == "unknown":
                raise Unavailable("the request was lost with the last second of Redis; send it again")
            if view.state == "done" and view.result is not None:
                self._on._fetched.note(request_id)
                return view.result
            if self._on._futures.draining:
                await asyncio.sleep(_DRAINING_S)
            await self._on._sessions.note_alive(session_id)

    def _tell(self, prompt: int, new: Any) -> None:
        for part in () if self._differs else new:
            tokens, beginning = convert.tokens_of(part.added), self._told[prompt, part.index]
            size = tokens.ids.itemsize
            count = beginning.fresh(size * part.start, tokens.ids.tobytes()) // size
            if beginning.differs:
                self._differs = True
                self._parts.put_nowait((_differing(), 0))
                return
            fresh = tokens[len(tokens) - count :]
            takes = PART_BYTES + self._question.times * fresh.nbytes
            # What there is no room for, and what follows it, comes with the end of the sequence.
            if fresh and self._account.take_now(takes):
                beginning.tell(fresh.ids.tobytes())
                self._parts.put_nowait((New(prompt, part.index, fresh), takes))


def _differing() -> Unavailable:
    return Unavailable(
        "a sampler was lost, and another one does not go on with the same tokens; send the request again"
    )
