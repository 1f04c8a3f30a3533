"""Which replica a sample goes to."""

from __future__ import annotations

from collections import Counter

from services.gateway.router import SLACK, Replica, affinity_key, choose


def idle(*names: str) -> list[Replica]:
    return [Replica(name, 0) for name in names]


def keys(count: int) -> list[bytes]:
    return [affinity_key("s:train:0", version, b"prompt") for version in range(count)]


def test_without_replicas_there_is_none_to_choose() -> None:
    assert choose([], b"key") is None


def test_the_same_snapshot_and_prompt_beginning_go_to_the_same_replica() -> None:
    start = bytes(256)
    first = affinity_key("s:train:0", 3, start + b"one")
    assert affinity_key("s:train:0", 3, start + b"two") == first
    assert affinity_key("s:train:0", 4, start) != first
    assert affinity_key("s:train:1", 3, start) != first
    replicas = idle("a", "b", "c")
    assert choose(replicas, first) == choose(replicas[::-1], first)


def test_keys_spread_over_the_replicas() -> None:
    counts = Counter(found.id for key in keys(600) if (found := choose(idle("a", "b", "c"), key)))
    assert min(counts.values()) > 140


def test_only_the_keys_of_a_lost_replica_move() -> None:
    for key in keys(200):
        before = choose(idle("a", "b", "c"), key)
        after = choose(idle("a", "b"), key)
        assert before is not None
        assert before.id == "c" or before == after


def test_a_busy_favourite_gives_way_to_the_idlest() -> None:
    key = b"key"
    favourite = choose(idle("a", "b", "c"), key)
    assert favourite is not None
    others = [Replica(name, 5) for name in "abc" if name != favourite.id]
    assert choose([Replica(favourite.id, 5 + SLACK), *others], key) == Replica(favourite.id, 5 + SLACK)
    given = choose([Replica(favourite.id, 6 + SLACK), *others], key)
    assert given is not None
    assert given.in_flight == 5
