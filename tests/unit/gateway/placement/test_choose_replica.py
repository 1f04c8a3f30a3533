"""Which replica a sample goes to."""

from __future__ import annotations

from collections import Counter

import pytest

from services.gateway.placement.choose_replica import (
    CACHED_WORTH,
    FEW_SEQUENCES,
    KNOWN_TOKENS,
    SEQUENCE_TOKENS,
    SWAP_TOKENS,
    Replica,
    Wanted,
    choose,
    spared,
    waits,
    wanted,
    work,
)
from services.gateway.placement.placements import Load
from services.gateway.placement.prompt_blocks import BLOCK_TOKENS, TOKEN_BYTES

PROMPT = bytes(8 * BLOCK_TOKENS * TOKEN_BYTES)


def idle(*names: str) -> list[Replica]:
    return [Replica(name, Load()) for name in names]


def adapter(version: int, prompt: bytes = PROMPT, model_id: str = "s:train:0", namespace: str = "") -> Wanted:
    return wanted(model_id, version, False, namespace, prompt, 1, None, "request")


def full(version: int, prompt: bytes = PROMPT, model_id: str = "s:train:0") -> Wanted:
    return wanted(model_id, version, True, "", prompt, 1, None, "request")


def chosen(replicas: list[Replica], sample: Wanted) -> Replica:
    found = choose(replicas, sample)
    assert found is not None
    return found


def test_without_replicas_there_is_none_to_choose() -> None:
    assert choose([], adapter(3)) is None


def test_prompts_share_blocks_as_far_as_they_agree_under_the_same_weights_and_namespace() -> None:
    first = adapter(3, PROMPT).blocks
    assert len(first) == 1 + 8
    assert adapter(3, PROMPT + bytes(100)).blocks == first
    other = adapter(3, PROMPT[:-1] + b"x").blocks
    assert (other[:-1], other[-1] == first[-1]) == (first[:-1], False)
    for elsewhere in (adapter(4), adapter(3, model_id="s:train:1"), adapter(3, namespace="ann")):
        assert not set(elsewhere.blocks) & set(first)


def test_a_samples_work_is_what_is_not_cached_and_some_of_each_answer() -> None:
    sample = wanted("m", 1, False, "", PROMPT, 4, 10, "request")
    assert work(sample, 0) == Load(8 * BLOCK_TOKENS + 40, 4)
    assert work(sample, 1 + 6) == Load(2 * BLOCK_TOKENS + 40, 4)
    assert wanted("m", 1, False, "", PROMPT, 4, 100_000, "request").answer_tokens == 4 * SEQUENCE_TOKENS
    assert wanted("m", 1, False, "", PROMPT, 4, None, "request").answer_tokens == 4 * SEQUENCE_TOKENS


def test_each_sequence_whose_experts_are_told_computes_its_whole_prompt_wherever_that_is_cached() -> None:
    sample = wanted("m", 1, True, "", PROMPT, 4, 10, "request", routed_experts=True)
    assert work(sample, 0) == work(sample, 1 + 6) == Load(4 * 8 * BLOCK_TOKENS + 40, 4)
    assert spared(sample, 1 + 6) == spared(sample, 1) == 0
    # What it leaves there is for others, as ever.
    assert sample.blocks == full(1, model_id="m").blocks


def test_an_idle_snapshot_goes_to_the_same_replica_whoever_asks() -> None:
    replicas = idle("a", "b", "c")
    assert chosen(replicas, adapter(3)) == chosen(replicas[::-1], adapter(3, bytes(12)))


def test_snapshots_spread_over_idle_replicas() -> None:
    counts = Counter(chosen(idle("a", "b", "c"), adapter(version)).id for version in range(600))
    assert len(counts) == 3 and min(counts.values()) > 140


def test_the_first_prompts_of_the_base_model_spread_over_idle_replicas() -> None:
    block = BLOCK_TOKENS * TOKEN_BYTES
    samples = [adapter(0, bytes([number]) * block, model_id="") for number in range(60)]
    counts = Counter(chosen(idle("a", "b", "c"), sample).id for sample in samples)
    assert len(counts) == 3 and min(counts.values()) > 5


def test_only_the_snapshots_of_a_lost_replica_move() -> None:
    for version in range(200):
        before = chosen(idle("a", "b", "c"), adapter(version))
        assert before.id == "c" or before == chosen(idle("a", "b"), adapter(version))


def test_a_cached_prompt_is_worth_several_times_the_work_that_it_spares() -> None:
    cached = spared(adapter(3), 1 + 100)
    assert cached == KNOWN_TOKENS + CACHED_WORTH * 100 * BLOCK_TOKENS
    warm = Replica("warm", Load(5000 + cached - 1), 1 + 100)
    assert chosen([warm, Replica("idle", Load(5000))], adapter(3)) == warm
    warm = Replica("warm", Load(5000 + cached + 1), 1 + 100)
    assert chosen([warm, Replica("idle", Load(5000))], adapter(3)).id == "idle"


@pytest.mark.parametrize(("at_once", "more"), [(4, FEW_SEQUENCES), (16, 8), (64, 32)])
def test_a_cache_keeps_nobody_where_many_more_sequences_are_generated_than_elsewhere(
    at_once: int, more: int
) -> None:
    for ahead, name in ((more, "warm"), (more + 1, "idle")):
        warm = Replica("warm", Load(100, 5 + ahead), 10**6, max_sequences=at_once)
        idle_ = Replica("idle", Load(50, 5), max_sequences=at_once)
        assert chosen([warm, idle_], adapter(3)).id == name
    endless = Replica("warm", Load(100, 1000), 10**6)
    assert chosen([endless, Replica("idle", Load())], adapter(3)) == endless


def test_an_idle_replica_that_had_to_make_room_first_takes_nobody_from_the_cache_of_another() -> None:
    warm = Replica("warm", Load(3300, 140), 1 + 20, max_sequences=256)
    other = Replica("other", Load(3200, 135), max_sequences=256)
    for elsewhere in (
        Replica("swaps", Load(), weights="s:train:1@9", max_sequences=256),
        Replica("full", Load(), waits=True, max_sequences=256),
    ):
        assert chosen([warm, other, elsewhere], adapter(3)) == warm


def test_a_sample_waits_for_a_slot_where_more_adapters_are_needed_than_there_are_slots() -> None:
    assert not waits("x", {"y"}, slots=2)
    assert not waits("x", {"x", "y"}, slots=2)
    assert waits("x", {"y", "z"}, slots=2)
    assert waits("x", {"x", "y", "z"}, slots=2), "it may be in line itself"
    assert not waits("x", {"y", "z"}, slots=0), "it does not say how many it has"
    assert not waits("", {"y", "z"}, slots=1)


def test_an_adapter_goes_where_it_finds_a_slot_unless_that_replica_has_much_more_to_do() -> None:
    for ahead, name in ((SWAP_TOKENS - 1, "free"), (SWAP_TOKENS + 1, "taken")):
        taken = Replica("taken", Load(5 + KNOWN_TOKENS), 1, waits=True)
        free = Replica("free", Load(5 + ahead))
        assert chosen([taken, free], adapter(3)).id == name


def test_where_no_replica_has_a_slot_the_one_with_the_least_to_do_is_waited_for() -> None:
    busy = [Replica(name, Load(tokens, 1), waits=True) for name, tokens in (("a", 9), ("b", 5), ("c", 7))]
    assert chosen(busy, adapter(3)).id == "b"


def test_the_base_model_needs_no_slot_of_an_adapter() -> None:
    assert adapter(0, model_id="").adapter == ""
    assert full(3).adapter == ""


# Replicas that have other weights in their engine.


def test_requests_go_where_their_weights_are() -> None:
    replicas = [
        Replica("a", Load()),
        Replica("b", Load(), 0, "s:train:0@3"),
        Replica("c", Load(), 0, "s:train:1@9"),
    ]
    for sample, name in ((full(3), "b"), (adapter(3), "a"), (adapter(0, model_id=""), "a")):
        assert chosen(replicas, sample).id == name


def test_work_spreads_over_the_replicas_that_have_the_weights() -> None:
    first, second = Replica("a", Load(9), 0, "s:train:0@3"), Replica("b", Load(), 0, "s:train:0@3")
    assert chosen([first, second, Replica("c", Load())], full(3)) == second


def test_all_versions_and_prompts_of_a_full_model_that_no_engine_has_share_a_home() -> None:
    replicas = idle("a", "b", "c")
    home = chosen(replicas, full(1))
    assert all(chosen(replicas, full(version, bytes([version]) * 256)) == home for version in range(20))
    homes = {chosen(replicas, full(1, model_id=f"s:train:{n}")) for n in range(40)}
    assert homes == set(replicas)


def test_only_much_work_moves_requests_to_a_replica_that_has_to_swap() -> None:
    for ahead, name in ((SWAP_TOKENS - 1, "a"), (SWAP_TOKENS + 1, "b")):
        there = Replica("a", Load(5 + ahead), 0, "s:train:0@3")
        assert chosen([there, Replica("b", Load(5))], full(3)).id == name


def test_only_much_work_moves_a_full_model_from_a_home_that_does_not_have_it_yet() -> None:
    home = chosen(idle("a", "b"), full(3))
    other = "b" if home.id == "a" else "a"
    for ahead, name in ((SWAP_TOKENS, home.id), (SWAP_TOKENS + 1, other)):
        assert chosen([Replica(home.id, Load(ahead)), Replica(other, Load())], full(3)).id == name


def test_a_full_model_that_leaves_its_home_goes_to_the_same_replica_whoever_asks() -> None:
    home = chosen(idle("a", "b", "c"), full(3))
    replicas = [Replica(name, Load((SWAP_TOKENS + 1) * (name == home.id))) for name in "abc"]
    assert chosen(replicas, full(3)) == chosen(replicas[::-1], full(3)) != home
