"""Where records are made: in the log at once, in Redis soon."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

import pytest
import redis.asyncio
from prometheus_client import REGISTRY
from redis.exceptions import ConnectionError as RedisAway

from services.common.contract.errors import NotFound
from services.common.telemetry import logs, subject
from services.gateway.audit.pages import Window
from services.gateway.audit.record import AuditRecord, of_type
from services.gateway.audit.refusals import Refusal, Refusals
from services.gateway.audit.store import AuditStore
from services.gateway.audit.trail import AuditTrail


class Broken(AuditStore):
    """A Redis that goes away and comes back."""

    away = True

    async def add(self, records: Sequence[AuditRecord]) -> None:
        if self.away:
            raise RedisAway("gone")
        await super().add(records)


async def kept(store: AuditStore) -> list[AuditRecord]:
    return (await store.page(None, Window(), 100, None, of_type("all"), False)).records


def dropped() -> float:
    return REGISTRY.get_sample_value("tinsmith_audit_dropped_total") or 0.0


async def test_a_call_is_one_record_with_who_what_where_and_how_it_ended(
    redis_client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    store = AuditStore(redis_client)
    trail = AuditTrail(store)
    with subject.about(subject.Subject()) as about, caplog.at_level(logging.INFO, "tinsmith.audit"):
        with trail.act("SetCheckpointTtl", "alice", "k1", "10.0.0.9") as act:
            act.saw({"path": "tinker://m/weights/a", "ttl_seconds": 60}.get)
        with pytest.raises(NotFound), trail.act("DeleteCheckpoint", "alice", "k1", "10.0.0.9"):
            raise NotFound("no")
        with trail.act("ListCheckpoints", "alice", "k1", "10.0.0.9") as act:
            act.saw({"path": "x"}.get)
        # An accepted operation, and one that is accepted to fail.
        subject.note(model_id="m", request_id="m:1")
        with trail.act("SaveState", "alice", "k1", "10.0.0.9") as act:
            act.saw({"name": "a"}.get)
        subject.note(refused="name_taken")
        with trail.act("SaveState", "alice", "k1", "10.0.0.9"):
            pass
        # A snapshot without a name is work.
        with trail.act("SaveForSampler", "alice", "k1", "10.0.0.9"):
            pass
    await trail.flush()
    found = sorted(await kept(store), key=lambda one: one.at)
    assert [(one.event, one.object, one.outcome) for one in found] == [
        ("checkpoint_ttl_set", "tinker://m/weights/a", "ok"),
        ("checkpoint_delete", "", "not_found"),
        ("checkpoint_save", "tinker://m/weights/a", "accepted"),
        ("checkpoint_save", "m:1", "name_taken"),
    ]
    first = found[0]
    assert (first.owner, first.key_id, first.method) == ("alice", "k1", "SetCheckpointTtl")
    assert (first.address, first.trace_id, first.details) == (
        "10.0.0.9",
        about.trace_id,
        {"ttl_seconds": "60"},
    )
    lines = [json.loads(logs.JsonFormatter("gateway-0").format(line)) for line in caplog.records]
    assert [line["audit_id"] for line in lines] == [one.id for one in found]
    assert (lines[0]["owner"], lines[0]["object"], lines[0]["detail_ttl_seconds"]) == (
        *("alice", "tinker://m/weights/a"),
        "60",
    )


async def test_while_redis_is_away_records_wait_and_what_finds_no_room_is_counted_and_logged(
    redis_client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    store = Broken(redis_client)
    trail, before = AuditTrail(store, most_waiting=3), dropped()
    with caplog.at_level(logging.INFO, "tinsmith.audit"):
        for number in range(5):
            with trail.act("CreateSession", "alice", "k", "") as act:
                act.saw({"session_id": f"s{number}"}.get)
        with pytest.raises(RedisAway):
            await trail.flush()
    assert (trail.waiting, dropped() - before) == (3, 2)
    assert sum("session_create s" in line.getMessage() for line in caplog.records) == 5
    store.away = False
    await trail.flush()
    assert trail.waiting == 0
    assert [one.object for one in await kept(store)] == ["s0", "s1", "s2"]


async def test_a_gateway_that_stops_hands_over_what_waits_or_counts_it(
    redis_client: redis.asyncio.Redis,
) -> None:
    store = Broken(redis_client)
    trail = AuditTrail(store)
    trail.refused(Refusal("unauthenticated", "Sample", "10.0.0.9", "no key"))
    before = dropped()
    await trail.stop()
    assert dropped() - before == 1
    store.away = False
    await trail.stop()
    (found,) = await kept(store)
    assert (found.event, found.outcome, found.owner) == ("identity_refuse", "unauthenticated", "")


def test_refusals_of_a_minute_are_few_records_however_many_they_are() -> None:
    refusals = Refusals()
    for number in range(5000):
        refusals.note(Refusal("unauthenticated", "Sample", f"10.0.{number // 250}.{number % 250}", "key 'x'"))
        refusals.note(Refusal("role_missing", f"M{number % 50}", "10.0.0.1", "", "alice", "k1"))
    records = refusals.take(1.0)
    strangers = [one for one in records if not one.owner]
    own = [one for one in records if one.owner == "alice"]
    assert (len(strangers), len(own)) == (17, 9)
    assert sum(one.count for one in strangers) == sum(one.count for one in own) == 5000
    assert (own[0].method, own[0].key_id, own[0].count) == ("M0", "k1", 100)
    assert strangers[-1].outcome == own[-1].outcome == "several"
    assert strangers[0].details == {"key": "key 'x'"}
    assert refusals.take(2.0) == []
