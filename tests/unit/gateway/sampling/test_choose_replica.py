"""Which replica a sample goes to."""

from __future__ import annotations

from collections import Counter

from services.gateway.sampling.choose_replica import SLACK, SWAP_SLACK, Affinity, Replica, affinity, choose


def idle(*names: str) -> list[Replica]:
    return [Replica(name, 0) for name in names]


def adapter(version: int, prompt: bytes = b"prompt", model_id: str = "s:train:0") -> Affinity:
    return affinity(model_id, version, False, prompt)


def full(version: int, prompt: bytes = b"prompt", model_id: str = "s:train:0") -> Affinity:
    return affinity(model_id, version, True, prompt)


def keys(count: int) -> list[Affinity]:
    return [adapter(version) for version in range(count)]


def test_without_replicas_there_is_none_to_choose() -> None:
    assert choose([], adapter(1)) is None


def test_the_same_snapshot_and_prompt_beginning_go_to_the_same_replica() -> None:
    start = bytes(256)
    first = adapter(3, start + b"one")
    assert adapter(3, start + b"two") == first
    assert adapter(4, start) != first
    assert adapter(3, start, "s:train:1") != first
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
    key = adapter(3)
    favourite = choose(idle("a", "b", "c"), key)
    assert favourite is not None
    others = [Replica(name, 5) for name in "abc" if name != favourite.id]
    assert choose([Replica(favourite.id, 5 + SLACK), *others], key) == Replica(favourite.id, 5 + SLACK)
    given = choose([Replica(favourite.id, 6 + SLACK), *others], key)
    assert given is not None
    assert given.in_flight == 5


# Replicas that have other weights in their engine.


def test_requests_go_where_their_weights_are() -> None:
    replicas = [Replica("a", 0), Replica("b", 0, "s:train:0@3"), Replica("c", 0, "s:train:1@9")]
    for start in range(20):
        prompt = bytes([start]) * 256
        for wanted, name in (
            (full(3, prompt), "b"),
            (adapter(3, prompt), "a"),
            (adapter(0, prompt, ""), "a"),
        ):
            assert choose(replicas, wanted) == next(r for r in replicas if r.id == name)


def test_prompts_spread_over_the_replicas_that_have_the_weights() -> None:
    replicas = [Replica(name, 0, "s:train:0@3") for name in "ab"] + [Replica("c", 0)]
    found = Counter(choose(replicas, full(3, bytes([n]) * 256)) for n in range(100))
    assert set(found) == set(replicas[:2])


def test_all_versions_and_prompts_of_a_full_model_that_no_engine_has_share_a_home() -> None:
    replicas = idle("a", "b", "c")
    home = choose(replicas, full(1))
    assert all(choose(replicas, full(version, bytes([version]) * 256)) == home for version in range(20))
    homes = {choose(replicas, full(1, model_id=f"s:train:{n}")) for n in range(40)}
    assert homes == set(replicas)


def test_only_much_work_moves_requests_to_a_replica_that_has_to_swap() -> None:
    other = Replica("b", 5)
    for ahead, chosen in ((SWAP_SLACK, "a"), (SWAP_SLACK + 1, "b")):
        there = Replica("a", 5 + ahead, "s:train:0@3")
        found = choose([there, other], full(3))
        assert found is not None and found.id == chosen


def test_between_replicas_with_the_weights_the_usual_slack_decides() -> None:
    first, second = Replica("a", 0, "s:train:0@3"), Replica("b", 0, "s:train:0@3")
    favourite = choose([first, second], full(3))
    assert favourite is not None
    busy = [Replica(r.id, SLACK + 1 if r.id == favourite.id else 0, r.weights) for r in (first, second)]
    found = choose([*busy, Replica("c", 0)], full(3))
    assert found is not None and (found.id, found.in_flight) != (favourite.id, SLACK + 1)
    assert found.weights == "s:train:0@3"
