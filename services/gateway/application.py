"""The application layer: everything a client can do, free of any transport.

HTTP and gRPC are two thin edges over one `Application`. Invariant: nothing here keeps state that
another gateway would need; what is kept is caches of records that no longer change.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass

from services.common.contract import ids
from services.common.contract.errors import (
    Draining,
    Gone,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    TinsmithError,
)
from services.common.telemetry import subject
from services.gateway.access.answer_room import AnswerAccount, AnswerRoom
from services.gateway.access.body_budget import BodyBudget
from services.gateway.access.gate import Gate
from services.gateway.access.limits import Limits
from services.gateway.access.page_turns import PageTurns
from services.gateway.access.turns import Turns
from services.gateway.administration.administration import Administration
from services.gateway.audit.store import AuditStore
from services.gateway.audit.trail import AuditTrail
from services.gateway.checkpoints.checkpoints import Checkpoints
from services.gateway.checkpoints.downloads import Downloads
from services.gateway.cluster.base_models import BaseModels
from services.gateway.cluster.readiness import Readiness
from services.gateway.cluster.redis_restart import RedoLog
from services.gateway.identity.door import Door
from services.gateway.identity.key import ADMIN, Caller
from services.gateway.identity.key_store import KeyStore
from services.gateway.identity.owner import named
from services.gateway.identity.ring import KeyRing
from services.gateway.identity.signed_urls import SignedUrls
from services.gateway.inference.inference import Inference
from services.gateway.inference.streams import SampleStreams
from services.gateway.inference.tokenizer_files import TokenizerFiles
from services.gateway.records.sample_journal import Completion
from services.gateway.results.fetched import FetchedResults
from services.gateway.results.futures import Futures, FutureView
from services.gateway.results.several import Several
from services.gateway.sampling.accept import Sampling
from services.gateway.sampling.completions import Completions, Page, Target
from services.gateway.sessions.search import SessionSearch
from services.gateway.sessions.sessions import Sessions
from services.gateway.sessions.use import SessionUse
from services.gateway.timelines.timelines import Timelines
from services.gateway.training.accept import Models
from services.gateway.training.copies import Copies
from services.gateway.training.exports import Exports
from services.gateway.training.runs import Runs
from services.gateway.training.saves import Saves

ACKNOWLEDGED_S = 60
"""A result that its client says it has may be asked for so much longer."""

_ROOM_S = 4.0
"""How long a result waits for memory: the SDK gives a long poll five seconds more than it asks for."""

_LOOK_S = 5.0
"""How often who watches samples notes a sign of life, and sees that the session is over."""


@dataclass(frozen=True)
class Application:
    """What the edges call. Every method takes the owner of the caller that `door` let in."""

    keys: KeyRing
    key_store: KeyStore
    administration: Administration
    door: Door
    audit: AuditTrail
    audit_store: AuditStore
    base_models: BaseModels
    sessions: Sessions
    session_search: SessionSearch
    use: SessionUse
    models: Models
    saves: Saves
    exports: Exports
    checkpoints: Checkpoints
    copies: Copies
    downloads: Downloads
    signed_urls: SignedUrls
    timelines: Timelines
    runs: Runs
    sampling: Sampling
    inference: Inference
    sample_streams: SampleStreams
    tokenizer_files: TokenizerFiles
    futures: Futures
    several: Several
    fetched: FetchedResults
    completions: Completions
    redo_log: RedoLog
    readiness: Readiness
    limits: Limits
    near_clients: bool
    gate: Gate
    budget: BodyBudget
    answers: AnswerRoom
    turns: Turns
    page_turns: PageTurns

    def audited(self, caller: Caller, owner: str) -> str | None:
        """Whose records a caller is shown who asks for an owner's; None: everybody's.

        Args:
            owner: empty: all that the caller may see.

        Raises:
            InvalidRequest: no owner has that name.
            PermissionDenied: somebody else's, which only role admin sees.
        """
        if owner:
            named(owner)
        if caller.role == ADMIN:
            return owner or None
        if owner not in ("", caller.owner):
            raise PermissionDenied(
                f"{owner[:80]!r} is another owner, whose records take an API key of role admin",
                "role_missing",
            )
        return caller.owner

    async def found_result(self, owner: str, request_id: str, held: ExitStack) -> FutureView | None:
        """A future that is resolved, when there is room for its result at once; else None, and it is to be
        waited for. Raises as `wait_result`.

        Args:
            held: as of `wait_result`.
        """
        subject.note(request_id=request_id)
        await self._check_asker(owner, request_id)
        if self.futures.expected(request_id):
            return None
        view = await self.futures.wait(request_id, 0)
        takes = self.answers.of_result(len(view.result or b""))
        if view.state != "done" or not held.enter_context(self.answers.account(owner)).take_now(takes):
            return None
        self.fetched.note(request_id)
        return view

    async def wait_result(self, owner: str, request_id: str, seconds: float, held: ExitStack) -> FutureView:
        """The state of a future: as soon as it is resolved, at the latest after `seconds`.

        Returns early, as pending, when this gateway drains: another one can be asked.

        Args:
            held: counts the memory of the result until it is closed.

        Raises:
            LimitReached: there is no room for the result.
            NotFound: the model or request does not exist, is somebody else's, or the result expired.
            Gone: the same of a sample, which may simply be sampled anew.
        """
        subject.note(request_id=request_id)
        await self._check_asker(owner, request_id)
        account = held.enter_context(self.answers.account(owner))
        view = await self._counted(account, request_id, [await self.futures.wait(request_id, seconds)])
        await self._check_known(request_id, view)
        if view.state == "done":
            self.fetched.note(request_id)
        return view

    async def _counted(self, account: AnswerAccount, request_id: str, found: list[FutureView]) -> FutureView:
        """The future that was found, which leaves the list. What its result takes until its client has it is
        counted; while it waits for room it takes none."""
        takes = self.answers.of_result(len(found[0].result or b""))
        # What is still pending takes nothing, and is told as that whatever its key holds.
        if not takes or account.take_now(takes):
            return found.pop()
        found.pop()
        await account.take(takes, _ROOM_S)
        return await self.futures.wait(request_id, 0)

    async def read_results(
        self, owner: str, request_ids: Sequence[str], seconds: float
    ) -> AsyncGenerator[tuple[str, bytes | TinsmithError]]:
        """What came of each request, as soon as it is resolved: its result, or why there is none. Ends when
        all were told, at the latest after `seconds`, and early when this gateway drains. Each result is
        counted until the next is asked for.

        Raises:
            LimitReached: there is no room for a result.
        """
        asked = []
        for request_id in dict.fromkeys(request_ids):
            try:
                await self._check_asker(owner, request_id)
                asked.append(request_id)
            except (NotFound, Gone) as error:
                yield request_id, error
        async with aclosing(self.several.resolved(asked, seconds)) as resolved:
            async for request_id, view in resolved:
                found = [view]
                del view
                with self.answers.account(owner) as account:
                    yield request_id, await self._outcome(account, request_id, found)
                self.fetched.note(request_id)

    async def watch_samples(
        self, owner: str, target: Target, cursor: int, seconds: float
    ) -> AsyncGenerator[tuple[Completion, bytes | TinsmithError]]:
        """The samples of a sampling client that were resolved after a cursor, in that order and each as soon
        as it is: its result, or why there is none any more. Ends after `seconds`. Each result is read when
        the one before it is with the client, and counted until the next is asked for. They stay until they
        are acknowledged, so that they are there for whoever goes on from an earlier cursor.

        Raises:
            NotFound: the sampling session does not exist.
            Gone: some of what followed the cursor may not be kept ("cursor_expired"); or all is told, and the
                session is over ("session_finished").
            Draining: this gateway ends.
            LimitReached: there is no room for a result.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        await self.sampling.get(owner, target.sampling_session_id)
        while (left := deadline - loop.time()) > 0:
            # What a slow reader has not come to may go meanwhile, too.
            await self.completions.check_kept(cursor)
            over = await self._over(owner, target)
            seconds = 0 if over else min(left, _LOOK_S)
            page = await self.completions.wait(target, cursor, seconds, forgets=False)
            if over and not page.completions:
                raise over
            for completion in page.completions:
                if self.draining or loop.time() >= deadline:
                    break
                cursor = completion.cursor
                found = [await self.futures.wait(completion.request_id, 0)]
                # Its result expired and it was asked for anew: it is told when it is resolved again.
                if found[0].state != "pending":
                    with self.answers.account(owner) as account:
                        yield completion, await self._outcome(account, completion.request_id, found)
            if self.draining:
                raise Draining("this gateway ends; go on at another one, from the last cursor")

    async def _over(self, owner: str, target: Target) -> Gone | None:
        """Why nothing more will be resolved of a sampling client, if that is so; else it lives on."""
        try:
            await self.sessions.open(owner, ids.session_of(target.sampling_session_id))
        except Gone as error:
            return error if await self.completions.none_pending(target) else None
        return None

    async def _outcome(
        self, account: AnswerAccount, request_id: str, found: list[FutureView]
    ) -> bytes | TinsmithError:
        """The result of a resolved future, which leaves the list and is counted; or why there is none."""
        found.append(await self._counted(account, request_id, found))
        try:
            await self._check_known(request_id, found[0])
        except (NotFound, Gone) as error:
            return error
        return found.pop().result or b""

    async def acknowledge_results(self, owner: str, request_ids: Sequence[str]) -> None:
        """Lets results go that their client has.

        Raises:
            NotFound, Gone: one is no request of the caller's. Nothing was let go.
        """
        for request_id in request_ids:
            await self._check_asker(owner, request_id)
        await self.fetched.let_go(request_ids, ACKNOWLEDGED_S)

    async def _check_asker(self, owner: str, request_id: str) -> None:
        """Notes a sign of life of a request's session, if the request may be the caller's. Raises as
        `wait_result`."""
        try:
            object_id, _ = ids.parse_request_id(request_id)
        except InvalidRequest as error:
            raise NotFound(error.message) from error
        if ids.is_sampling_session_id(object_id):
            try:
                await self.sampling.get(owner, object_id)
            except NotFound as error:
                raise Gone(error.message) from error
        else:
            await self.models.get(owner, object_id)
        await self.sessions.note_alive(ids.session_of(object_id))

    async def _check_known(self, request_id: str, view: FutureView) -> None:
        if view.state != "unknown":
            return
        message = f"request {request_id} does not exist, or its result expired"
        if ids.is_sampling_session_id(ids.parse_request_id(request_id)[0]):
            raise Gone(message)
        await self.redo_log.refuse_while_restoring()
        raise NotFound(message)

    async def finish_session(self, owner: str, session_id: str, reason: str, detail: str) -> None:
        """Ends a session for good, with the samples that wait or run for it. Raises as `Sessions.finish`."""
        await self.sessions.finish(owner, session_id, reason, detail)
        await self.sampling.cancel_samples_of_session(session_id, f"session {session_id} was finished")

    async def free_completions(self, owner: str, target: Target, fetched: Sequence[str]) -> None:
        """Requests whose results a sampling client has can be asked for for a minute more.

        Raises:
            NotFound: the sampling session does not exist.
            InvalidRequest: a fetched request is not the client's.
        """
        await self.sampling.get(owner, target.sampling_session_id)
        await self.completions.free(target, fetched)

    async def wait_completions(self, owner: str, target: Target, cursor: int, seconds: float) -> Page:
        """Which samples of a sampling client were resolved after a cursor; as soon as there are any.

        Raises:
            NotFound: the sampling session does not exist.
        """
        await self.sampling.get(owner, target.sampling_session_id)
        await self.sessions.note_alive(ids.session_of(target.sampling_session_id))
        return await self.completions.wait(target, cursor, seconds)

    @property
    def draining(self) -> bool:
        """Nothing is waited for any more."""
        return self.futures.draining

    def drain(self) -> None:
        """Ends all waiting, so that clients turn to another gateway."""
        self.futures.drain()
