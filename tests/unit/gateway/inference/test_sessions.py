"""The sessions of requests that have none: one for each owner, on the snapshots that they ask for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from services.common.contract.errors import Gone, NotFound
from services.gateway.inference.sessions import InferenceSessions, SessionLives
from services.gateway.sampling.accept import Weights
from services.gateway.sessions.sessions import NewSession

BASE = Weights("org/base", "", 0, "", False)
SAVED = Weights("org/base", "s:train:0", 4, "tinker://s:train:0/sampler_weights/a", False)


class Cluster:
    """What sessions are made and finished in; it isolates their bookkeeping."""

    def __init__(self) -> None:
        self.now = 0.0
        self.created: list[str] = []
        self.finished: list[str] = []
        self.opened: list[tuple[str, int, Weights]] = []
        self.lost: set[str] = set()
        self.failures: list[Exception] = []
        """Of the next openings."""
        self._numbers = itertools.count()

    async def create(self, owner: str, new: NewSession, idempotency_key: str | None) -> str:
        self.created.append(owner)
        return f"session-{next(self._numbers)}"

    async def finish(self, owner: str, session_id: str, reason: str, detail: str) -> None:
        if session_id in self.lost:
            raise NotFound(f"session {session_id} does not exist")
        self.finished.append(session_id)

    async def open_on(self, owner: str, session_id: str, seq_id: int, weights: Weights) -> str:
        if self.failures:
            raise self.failures.pop()
        self.opened.append((session_id, seq_id, weights))
        return f"{session_id}:sample:{seq_id}"


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def sessions(cluster: Cluster) -> InferenceSessions:
    lives = SessionLives(idle=10, most=100)
    return InferenceSessions(cluster, cluster, lives, lambda: cluster.now)  # type: ignore[arg-type]


async def used(
    sessions: InferenceSessions, *weights: Weights, owner: str = "ann"
) -> Sequence[tuple[str, int]]:
    """Sampling session and number of one request on each of the weights."""
    found = []
    for one in weights:
        async with sessions.sampler(owner, one) as sampler:
            found.append((sampler.sampling_session_id, next(sampler.numbers)))
    return found


async def test_an_owners_requests_share_a_session_and_those_on_a_snapshot_its_numbers(
    sessions: InferenceSessions, cluster: Cluster
) -> None:
    found = await used(sessions, BASE, SAVED, BASE, SAVED)
    assert found == [
        ("session-0:sample:0", 0),
        ("session-0:sample:1", 0),
        ("session-0:sample:0", 1),
        ("session-0:sample:1", 1),
    ]
    assert await used(sessions, BASE, owner="bob") == [("session-1:sample:0", 0)]
    assert cluster.created == ["ann", "bob"]


async def test_an_idle_session_is_finished_and_the_next_request_begins_another(
    sessions: InferenceSessions, cluster: Cluster
) -> None:
    await used(sessions, BASE)
    cluster.now = 9.0
    await sessions.sweep()
    assert cluster.finished == []
    cluster.now = 10.0
    await sessions.sweep()
    assert cluster.finished == ["session-0"]
    assert await used(sessions, BASE) == [("session-1:sample:0", 0)]


async def test_what_runs_keeps_its_session_also_one_that_is_too_old(
    sessions: InferenceSessions, cluster: Cluster
) -> None:
    async with sessions.sampler("ann", BASE):
        cluster.now = 200.0
        await sessions.sweep()
        assert cluster.finished == []
        assert await used(sessions, BASE) == [("session-1:sample:0", 0)], "new requests go to a new one"
    await sessions.sweep()
    assert cluster.finished == ["session-0"]


async def test_a_session_that_was_ended_from_outside_is_not_used_again(
    sessions: InferenceSessions, cluster: Cluster
) -> None:
    async with sessions.sampler("ann", BASE) as old:
        sessions.forget("ann", old)
        assert await used(sessions, BASE) == [("session-1:sample:0", 0)]
        sessions.forget("ann", old)
        assert await used(sessions, BASE) == [("session-1:sample:0", 1)], "the new one is not forgotten too"
    await sessions.sweep()
    assert cluster.finished == ["session-0"]


async def test_a_session_that_takes_no_more_samplers_is_not_asked_again(
    sessions: InferenceSessions, cluster: Cluster
) -> None:
    await used(sessions, BASE)
    cluster.failures.append(Gone("the session was finished"))
    with pytest.raises(Gone):
        await used(sessions, SAVED)
    assert await used(sessions, SAVED) == [("session-1:sample:0", 0)]


async def test_a_number_whose_opening_broke_off_is_not_used_again(
    sessions: InferenceSessions, cluster: Cluster
) -> None:
    cluster.failures.append(TimeoutError())
    with pytest.raises(TimeoutError):
        await used(sessions, BASE)
    assert await used(sessions, SAVED, BASE) == [("session-0:sample:1", 0), ("session-0:sample:2", 0)]


async def test_a_session_that_is_gone_keeps_no_other_from_being_finished(
    sessions: InferenceSessions, cluster: Cluster
) -> None:
    cluster.lost.add("session-0")
    for owner in ("ann", "bob", "eve"):
        await used(sessions, BASE, owner=owner)
    cluster.now = 20
    await sessions.sweep()
    assert sorted(cluster.finished) == ["session-1", "session-2"]
    cluster.lost.clear()
    await sessions.sweep()
    assert len(cluster.finished) == 2


async def test_at_the_end_what_nothing_runs_in_is_finished(
    sessions: InferenceSessions, cluster: Cluster
) -> None:
    await used(sessions, BASE)
    async with sessions.sampler("bob", BASE):
        await sessions.start()
        await sessions.stop()
    assert cluster.finished == ["session-0"]
