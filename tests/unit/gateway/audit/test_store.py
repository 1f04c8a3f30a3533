"""Records in Redis: pages, and what goes."""

from __future__ import annotations

import asyncio
import time

import pytest
import redis.asyncio

from services.common.contract.errors import InvalidRequest
from services.common.state import keys
from services.gateway.audit import pages
from services.gateway.audit import store as module
from services.gateway.audit.pages import Page, Window, place_of, token_of
from services.gateway.audit.record import AuditRecord, of_type
from services.gateway.audit.store import AuditStore, fair_share, streams_of

ALL = of_type("all")
EVER = Window()


def record(
    number: int, owner: str = "alice", outcome: str = "ok", event: str = "model_create"
) -> AuditRecord:
    return AuditRecord(
        id=str(number), at=time.time(), event=event, outcome=outcome, owner=owner, object=f"m{number}"
    )


async def keep(store: AuditStore, *records: AuditRecord) -> None:
    """One after the other, each in a millisecond of its own."""
    for one in records:
        await store.add([one])
        await asyncio.sleep(0.002)


def ids(page: Page) -> list[str]:
    return [one.id for one in page.records]


@pytest.mark.parametrize("newest_first", [False, True])
async def test_pages_of_all_are_in_order_and_leave_out_nothing(
    redis_client: redis.asyncio.Redis, newest_first: bool
) -> None:
    store = AuditStore(redis_client)
    owners = ("alice", "bob", "")
    outcomes = ("ok", "not_found")
    made = [record(number, owners[number % 3], outcomes[number % 2]) for number in range(13)]
    await keep(store, *made)
    # Several of one owner in one millisecond.
    await store.add([record(number, "carol") for number in range(13, 17)])
    found: list[str] = []
    after = None
    for _ in range(20):
        page = await store.page(None, EVER, 3, after, ALL, newest_first)
        assert len(page.records) <= 3
        found += ids(page)
        after = place_of(token_of(page.next), "page_token")
        if after is None:
            break
    expected = [str(number) for number in range(17)]
    assert found == (expected[::-1] if newest_first else expected)


async def test_an_owner_sees_what_it_did_and_was_refused_and_nothing_else(
    redis_client: redis.asyncio.Redis,
) -> None:
    store = AuditStore(redis_client)
    await keep(store, record(0), record(1, "bob"), record(2, outcome="permission_denied"), record(3, ""))
    assert ids(await store.page("alice", EVER, 10, None, ALL, False)) == ["0", "2"]
    assert ids(await store.page("carol", EVER, 10, None, ALL, False)) == []


async def test_records_are_asked_for_by_time_and_by_kind(redis_client: redis.asyncio.Redis) -> None:
    store = AuditStore(redis_client)
    await keep(store, record(0), record(1, event="checkpoint_delete"))
    between = time.time()
    await asyncio.sleep(0.002)
    await keep(store, record(2, event="checkpoint_publish"), record(3, event="key_create"))

    async def found(window: Window, event_type: str = "all") -> list[str]:
        return ids(await store.page("alice", window, 10, None, of_type(event_type), False))

    assert await found(Window(0, between)) == ["0", "1"]
    assert await found(Window(between)) == ["2", "3"]
    assert await found(EVER, "checkpoints") == ["1", "2"]
    assert await found(EVER, "organizations") == ["3"]
    assert await found(EVER, "teams") == []


async def test_a_record_that_is_wanted_is_found_behind_many_that_are_not(
    redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_CHUNK", 2)
    store = AuditStore(redis_client)
    await store.add([*(record(number) for number in range(9)), record(9, event="checkpoint_delete")])
    for newest_first in (False, True):
        page = await store.page("alice", EVER, 1, None, of_type("checkpoints"), newest_first)
        assert (ids(page), page.next) == (["9"], None)


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize(("bound", "most"), [("MOST_LOOKED", 7), ("MOST_BYTES", 300)])
async def test_a_page_ends_where_it_has_cost_enough_and_the_next_goes_on_from_there(
    redis_client: redis.asyncio.Redis,
    monkeypatch: pytest.MonkeyPatch,
    newest_first: bool,
    bound: str,
    most: int,
) -> None:
    monkeypatch.setattr(pages, bound, most)
    store = AuditStore(redis_client)
    made = [
        record(number, f"o{number % 4}", event="checkpoint_delete" if number % 5 else "session_create")
        for number in range(60)
    ]
    await store.add(made)
    found: list[str] = []
    after, count = None, 0
    while count == 0 or after is not None:
        page = await store.page(None, EVER, 50, after, of_type("checkpoints"), newest_first)
        found, after, count = found + ids(page), page.next, count + 1
        assert len(page.records) <= 7
    assert count >= 8
    assert sorted(found, key=int) == [one.id for one in made if one.event == "checkpoint_delete"]


async def test_of_too_many_owners_those_who_were_quiet_longest_are_dropped(
    redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_OWNERS", 2)
    store = AuditStore(redis_client)
    for number, owner in enumerate(("alice", "bob", "carol", "alice")):
        await keep(store, record(number, owner))
    await store.sweep()
    assert ids(await store.page(None, EVER, 10, None, ALL, False)) == ["0", "2", "3"]
    assert await redis_client.exists(*streams_of("bob")) == 0


async def test_a_page_of_some_time_reads_nothing_of_owners_who_were_quiet_since_then(
    redis_client: redis.asyncio.Redis,
) -> None:
    store = AuditStore(redis_client)
    await keep(store, record(0, "alice"), record(1, "bob"))
    await redis_client.zadd(keys.AUDIT_OWNERS, {"bob": time.time() - 3600})
    await redis_client.config_resetstat()
    assert ids(await store.page(None, Window(time.time() - 60), 10, None, ALL, True)) == ["0"]
    # Of strangers, and both of alice's.
    assert (await redis_client.info("commandstats"))["cmdstat_xrevrange"]["calls"] == 3


async def test_what_cannot_be_read_stands_in_nobodys_way(redis_client: redis.asyncio.Redis) -> None:
    store = AuditStore(redis_client)
    await redis_client.xadd(streams_of("alice")[0], {"r": b"{"})
    await redis_client.xadd(streams_of("alice")[0], {"other": b""})
    await keep(store, record(1))
    assert ids(await store.page(None, EVER, 5, None, ALL, True)) == ["1"]


async def test_refusals_push_out_no_acts_and_strangers_nothing_of_anybodys(
    redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MOST_OF_OWNER", "MOST_REFUSED", "MOST_OF_STRANGERS"):
        monkeypatch.setattr(module, name, 200)
    store = AuditStore(redis_client)
    await store.add([record(0), record(1, "bob")])
    await store.add([record(number, outcome="not_found") for number in range(2, 600)])
    await store.add([record(number, "", "unauthenticated") for number in range(600, 1200)])
    found = set(ids(await store.page(None, EVER, 5000, None, ALL, False)))
    assert {"0", "1"} <= found
    # Redis cuts by blocks of at most a hundred.
    for part in (range(2, 600), range(600, 1200)):
        assert 200 <= len(found & {str(number) for number in part}) < 300


async def test_a_sweep_cuts_the_longest_first_and_lets_the_old_go(
    redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_OF_OWNERS", 12)
    store = AuditStore(redis_client)
    await store.add([record(number) for number in range(40)])
    await store.add([record(number, "bob") for number in range(40, 43)])
    old = round((time.time() - module.LIFE_S - 60) * 1000)
    await redis_client.xadd(streams_of("carol")[0], {"r": b"{}"}, id=f"{old}-0")
    await redis_client.zadd(keys.AUDIT_OWNERS, {"carol": old / 1000, "bob": time.time()})
    await redis_client.xadd(keys.AUDIT_STRANGERS, {"r": b"{}"}, id=f"{old}-0")
    await store.sweep()
    assert ids(await store.page("bob", EVER, 100, None, ALL, False)) == ["40", "41", "42"]
    assert ids(await store.page("alice", EVER, 100, None, ALL, False)) == [str(n) for n in range(31, 40)]
    assert await redis_client.xlen(keys.AUDIT_STRANGERS) == 0
    assert await redis_client.zscore(keys.AUDIT_OWNERS, "carol") is None
    assert 0 < await redis_client.ttl(streams_of("bob")[0]) <= module.LIFE_S
    # Within a minute nobody sweeps again.
    await store.add([record(number) for number in range(50, 60)])
    await store.sweep()
    assert len(ids(await store.page("alice", EVER, 100, None, ALL, False))) == 19


@pytest.mark.parametrize(
    ("lengths", "most", "share"),
    [([], 10, 0), ([3, 4], 10, 4), ([100, 2, 3], 11, 6), ([100, 100, 100], 30, 10), ([5, 5, 5], 1, 1)],
)
def test_shares_are_fair(lengths: list[int], most: int, share: int) -> None:
    assert fair_share(lengths, most) == share


@pytest.mark.parametrize("token", ["x", "1-2", "1/x", "-/x", "1-٢/x", "1-2/" + "x" * 400])
def test_a_token_of_somebody_elses_making_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequest):
        place_of(token, "page_token")


async def test_a_page_of_everybody_lets_others_in_while_it_is_merged(
    redis_client: redis.asyncio.Redis,
) -> None:
    store = AuditStore(redis_client)
    await store.add([record(number, f"owner-{number}") for number in range(1000)])
    turns, seen = 0, set()

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    def wanted(_: AuditRecord) -> bool:
        seen.add(turns)
        return False

    counting = asyncio.create_task(count_turns())
    await store.page(None, EVER, 10, None, wanted, False)
    counting.cancel()
    assert len(seen) >= 3, "nobody else had a turn while a thousand records were looked at"
