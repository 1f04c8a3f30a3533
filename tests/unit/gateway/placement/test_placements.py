"""What was sent where, as one gateway knows it and as several do."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import redis.asyncio

from services.gateway.placement import placements
from services.gateway.placement.choose_replica import Replica, Wanted, choose, wanted, work
from services.gateway.placement.news import PlacementNews
from services.gateway.placement.placements import SILENT_S, Load, Placements
from services.gateway.placement.prompt_blocks import BLOCK_TOKENS, TOKEN_BYTES


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def gateway(name: str = "g", clock: Clock | None = None, **kv_tokens: int) -> Placements:
    found = Placements(name, clock or Clock())
    found.keep(kv_tokens or {"a": 0, "b": 0})
    return found


def test_work_counts_from_when_it_is_sent_until_it_ends() -> None:
    own = gateway()
    own.begin("a", (1, 2), Load(10, 1))
    own.begin("a", (1, 3), Load(5, 1))
    assert (own.load("a"), own.load("b")) == (Load(15, 2), Load())
    own.end("a", Load(10, 1))
    own.end("a", Load(5, 1))
    assert own.load("a") == Load()


def test_a_replica_knows_a_chain_as_far_as_it_was_sent() -> None:
    own = gateway()
    own.begin("a", (1, 2, 3), Load(1, 1))
    assert own.known("a", (1, 2, 3, 4)) == 3
    assert own.known("a", (1, 9, 3)) == 1
    assert own.known("b", (1, 2, 3)) == 0


def test_beginnings_stay_longer_than_ends_within_the_room_of_a_replica() -> None:
    own = gateway(a=2 * BLOCK_TOKENS)
    own.begin("a", (1, 2, 3), Load(1, 1))
    own.begin("a", (1, 4), Load(1, 1))
    assert own.known("a", (1, 2, 3)) == 2
    assert own.known("a", (1, 4)) == 2


def test_all_replicas_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placements, "MOST_BLOCKS", 10)
    own = gateway()
    own.begin("a", range(100), Load(1, 1))
    assert own.known("a", range(100)) == 5


def test_a_replica_that_is_gone_is_forgotten() -> None:
    own = gateway()
    own.begin("a", (1,), Load(7, 1))
    own.end("a", Load(7, 1))
    own.keep({"b": 0})
    own.keep({"a": 0, "b": 0})
    assert own.known("a", (1,)) == 0
    own.keep({"b": 0})
    news = own.news()
    assert news is None or "a" not in news.blocks


def test_what_others_sent_counts_until_they_are_silent() -> None:
    clock = Clock()
    one, other = gateway("one", clock), gateway("other", clock)
    one.begin("a", (1, 2), Load(10, 1))
    told = one.news()
    assert told is not None
    for hearer in (one, other):
        hearer.hear(told)
    assert one.load("a") == other.load("a") == Load(10, 1), "nobody counts itself twice"
    assert other.known("a", (1, 2)) == 2
    clock.now += SILENT_S
    assert (one.load("a"), other.load("a")) == (Load(10, 1), Load())
    assert other.known("a", (1, 2)) == 2


def test_load_is_told_while_there_is_some_and_once_when_there_is_none_blocks_once() -> None:
    own = gateway()
    assert own.news() is None
    own.begin("a", (1, 2), Load(10, 1))
    first, second = own.news(), own.news()
    assert first is not None and first.blocks == {"a": [1, 2]} and first.load == {"a": Load(10, 1)}
    assert second is not None and second.blocks == {} and second.load == {"a": Load(10, 1)}
    own.end("a", Load(10, 1))
    last = own.news()
    assert last is not None and last.load == {}
    assert own.news() is None


def test_an_adapter_is_needed_until_the_last_sample_that_needs_it_has_ended_wherever_it_came_from() -> None:
    one, other = gateway("one"), gateway("other")
    for adapter in ("x", "x", "y", ""):
        one.begin("a", (1,), Load(1, 1), adapter)
    other.begin("a", (1,), Load(1, 1), "z")
    assert (one.adapters("a"), one.adapters("b")) == ({"x", "y"}, set())
    told = one.news()
    assert told is not None
    other.hear(told)
    assert other.adapters("a") == {"x", "y", "z"}
    one.end("a", Load(1, 1), "x")
    one.end("a", Load(1, 1), "y")
    assert one.adapters("a") == {"x"}
    one.end("a", Load(1, 1), "x")
    told = one.news()
    assert told is not None
    other.hear(told)
    assert (one.adapters("a"), other.adapters("a")) == (set(), {"z"})


def test_one_message_has_a_bound_whatever_was_sent() -> None:
    own = gateway()
    for start in range(0, 30_000, 100):
        own.begin("a", range(start, start + 100), Load(1, 1), f"adapter {start}")
    told = own.news()
    assert told is not None
    assert len(told.blocks["a"]) == placements.MOST_TOLD
    assert len(told.adapters["a"]) == placements.MOST_ADAPTERS


async def test_gateways_hear_of_each_other_through_redis(redis_client: redis.asyncio.Redis) -> None:
    one, other = gateway("one"), gateway("other")
    parts = [PlacementNews(redis_client, one), PlacementNews(redis_client, other)]
    for part in parts:
        await part.start()
    try:
        one.begin("b", (5, 6), Load(42, 1))
        async with asyncio.timeout(60):
            while other.load("b").tokens != 42 or other.known("b", (5, 6)) < 2:
                # What is told before the other listens is lost.
                one.begin("b", (5, 6), Load())
                await asyncio.sleep(0.05)
    finally:
        for part in parts:
            await part.stop()


# Conversations: what the chooser comes to, simulated.

SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 512, 192, 256
CONVERSATIONS, TURNS, REPLICAS = 64, 10, 8


@dataclass
class Talk:
    """A conversation of turns that each repeat all before them."""

    number: int
    tokens: list[int]
    turn: int = 0
    rng: random.Random = field(default_factory=random.Random)

    def next(self) -> Wanted:
        self.tokens += self.rng.choices(range(1_000_000), k=TURN_TOKENS)
        self.turn += 1
        data = b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in self.tokens)
        return wanted("m", 1, False, "", data, 1, ANSWER_TOKENS, f"{self.number}:{self.turn}")

    def answered(self) -> None:
        self.tokens += self.rng.choices(range(1_000_000), k=ANSWER_TOKENS)


@dataclass
class Outcome:
    """Tokens of prompts that replicas had cached, that one that has seen all would have, and the work of each
    replica."""

    found: int = 0
    cacheable: int = 0
    done: Counter[str] = field(default_factory=Counter)


def simulated(gateways: int, at_once: int, seed: int = 0) -> Outcome:
    """Conversations whose turns take random times; each turn goes through a random gateway, and gateways tell
    each other what they sent every 250 ms. Of so many sequences at once that a replica generates."""
    rng, clock = random.Random(seed), Clock()
    names = [f"r{n}" for n in range(REPLICAS)]
    views = [gateway(f"g{n}", clock, **dict.fromkeys(names, 0)) for n in range(gateways)]
    system = rng.choices(range(1_000_000), k=SYSTEM_TOKENS)
    talks = [Talk(n, list(system), rng=random.Random(n)) for n in range(CONVERSATIONS)]
    really: dict[str, set[int]] = {name: set() for name in names}
    seen: set[int] = set()
    outcome = Outcome()
    ready = [(clock.now + rng.random(), talk, None) for talk in talks]
    events: list[tuple[float, Talk, tuple[Placements, str, Load] | None]] = list(ready)
    told = clock.now
    while events:
        events.sort(key=lambda event: (event[0], event[1].number))
        clock.now, talk, running = events.pop(0)
        while told + 0.25 <= clock.now:
            told += 0.25
            messages = [view.news() for view in views]
            for view in views:
                for message in messages:
                    if message is not None:
                        view.hear(message)
        if running is not None:
            view, name, load = running
            view.end(name, load)
            talk.answered()
            if talk.turn < TURNS:
                events.append((clock.now + rng.uniform(0.3, 2), talk, None))
            continue
        sample, view = talk.next(), rng.choice(views)
        known = {name: view.known(name, sample.blocks) for name in names}
        found = choose([Replica(n, view.load(n), known[n], max_sequences=at_once) for n in names], sample)
        assert found is not None
        name = found.id
        cached = next((n for n, b in enumerate(sample.blocks) if b not in really[name]), len(sample.blocks))
        best = next((n for n, b in enumerate(sample.blocks) if b not in seen), len(sample.blocks))
        outcome.found += max(0, cached - 1) * BLOCK_TOKENS
        outcome.cacheable += max(0, best - 1) * BLOCK_TOKENS
        outcome.done[name] += work(sample, cached).tokens
        really[name].update(sample.blocks)
        seen.update(sample.blocks)
        load = work(sample, known[name])
        view.begin(name, sample.blocks, load)
        events.append((clock.now + rng.uniform(0.5, 3), talk, (view, name, load)))
    return outcome


@pytest.mark.parametrize("gateways", [1, 3])
@pytest.mark.parametrize("at_once", [4, 16, 32, 256])
@pytest.mark.parametrize("seed", range(3))
def test_conversations_find_what_is_cached_of_them_and_load_stays_even(
    gateways: int, at_once: int, seed: int
) -> None:
    outcome = simulated(gateways, at_once, seed)
    assert outcome.found >= 0.9 * outcome.cacheable
    even = sum(outcome.done.values()) / REPLICAS
    assert max(outcome.done.values()) <= 1.3 * even


def test_without_what_was_sent_conversations_would_find_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placements, "known", lambda *_: 0)
    outcome = simulated(1, at_once=256)
    assert outcome.found < 0.6 * outcome.cacheable


@pytest.mark.parametrize("shared", [512, 8192, 100_000])
@pytest.mark.parametrize("at_once", [16, 32, 256])
def test_a_prompt_that_all_share_leaves_no_replica_idle_while_another_refuses(
    shared: int, at_once: int
) -> None:
    own = gateway("g", Clock(), **{f"r{n}": 0 for n in range(4)})
    sent: Counter[str] = Counter()
    for number in range(2 * at_once):
        sample = wanted("m", 1, False, "", bytes(shared * TOKEN_BYTES), 1, 1024, str(number))
        known = {f"r{n}": own.known(f"r{n}", sample.blocks) for n in range(4)}
        replicas = [Replica(n, own.load(n), k, max_sequences=at_once) for n, k in known.items()]
        found = choose(replicas, sample)
        assert found is not None
        # The prompt is computed once; what is measured is how answers spread.
        own.begin(found.id, sample.blocks, Load(sample.answer_tokens, 1))
        sent[found.id] += 1
    assert len(sent) == 4
    assert max(sent.values()) <= min(sent.values()) + at_once // 2 + 1
