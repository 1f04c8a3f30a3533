"""A gateway hears of what others publish, again as soon as it can."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio

from services.gateway.results import subscription as module
from services.gateway.results.subscription import Subscription


async def test_however_often_a_subscription_breaks_the_log_has_the_first_time_and_the_end(
    redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(module, "_BACKOFF_S", 0.001)
    subscribed = asyncio.Event()
    heard = Subscription(redis_client, "a-channel", lambda _: None, subscribed.set)
    pubsub, tries = redis_client.pubsub, 0

    def fails() -> redis.asyncio.client.PubSub:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise redis.exceptions.ConnectionError("Redis is away")
        return pubsub()

    monkeypatch.setattr(redis_client, "pubsub", fails)
    heard.start()
    try:
        async with asyncio.timeout(60):
            await subscribed.wait()
    finally:
        await heard.stop()
    assert caplog.messages == [
        "a subscription broke, subscribing again: a-channel: Redis is away",
        "a subscription broke, subscribing again: no more of a-channel, after 3 failures",
    ]


async def test_messages_that_come_together_are_heard_one_by_one_in_their_order(
    redis_client: redis.asyncio.Redis,
) -> None:
    subscribed, done = asyncio.Event(), asyncio.Event()
    texts: list[str] = []

    def hear(text: str) -> None:
        texts.append(text)
        if text == "the last":
            done.set()

    heard = Subscription(redis_client, "a-channel", hear, subscribed.set)
    heard.start()
    try:
        async with asyncio.timeout(60):
            await subscribed.wait()
            pipeline = redis_client.pipeline(transaction=False)
            for number in range(3000):
                pipeline.publish("a-channel", f"{number}")
            pipeline.publish("a-channel", "the last")
            await pipeline.execute()
            await done.wait()
    finally:
        await heard.stop()
    assert texts == [*(f"{number}" for number in range(3000)), "the last"]


async def test_a_subscription_leaves_a_connection_that_leads_to_a_redis_of_before(
    redis_client: redis.asyncio.Redis,
) -> None:
    subscribed = asyncio.Event()
    heard = Subscription(redis_client, "a-channel", lambda _: None, subscribed.set)
    heard.start()
    try:
        async with asyncio.timeout(60):
            await subscribed.wait()
            subscribed.clear()
            await redis_client.connection_pool.update_active_connections_for_reconnect()
            await subscribed.wait()
    finally:
        await heard.stop()
