"""Which of several replicas that are as good as each other a sample goes to.

They share what comes one by one. What begins alike stays together, also when it comes through gateways that
have not told each other yet."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from services.gateway.placement.choose_replica import Replica, Wanted, choose, wanted, work
from services.gateway.placement.placements import Load, Placements
from services.gateway.placement.prompt_blocks import BLOCK_TOKENS, TOKEN_BYTES

NAMES = [f"r{number}" for number in range(8)]
MANY = 800
LEAST, MOST = 60, 140
"""Of so many samples that each of the replicas is to get, when a hundred are its share."""


def gateways(count: int) -> list[Placements]:
    """Of which none has heard of what another one sent."""
    found = [Placements(f"g{number}", lambda: 0.0) for number in range(count)]
    for one in found:
        one.keep(dict.fromkeys(NAMES, 0))
    return found


def tokens(seed: int, count: int = 4 * BLOCK_TOKENS) -> bytes:
    return random.Random(seed).randbytes(count * TOKEN_BYTES)


def sample(number: int, prompt: bytes, model_id: str = "") -> Wanted:
    return wanted(model_id, 1, False, "", prompt, 1, 256, f"s:sample:0:{number}")


def begun(gateway: Placements, asked: Wanted, weights: str = "") -> tuple[str, Load]:
    """Where a sample went, and what it is there."""
    known = {name: gateway.known(name, asked.blocks) for name in NAMES}
    found = choose([Replica(name, gateway.load(name), known[name], weights) for name in NAMES], asked)
    assert found is not None
    load = work(asked, known[found.id])
    gateway.begin(found.id, asked.blocks, load, asked.adapter)
    return found.id, load


def alone(gateway: Placements, asked: Wanted, weights: str = "") -> str:
    """Where a sample went that is answered before the next one comes."""
    name, load = begun(gateway, asked, weights)
    gateway.end(name, load, asked.adapter)
    return name


def check_shared(sent: list[str]) -> None:
    counts = Counter(sent)
    assert len(sent) == MANY
    assert (len(counts), min(counts.values()) >= LEAST, max(counts.values()) <= MOST) == (8, True, True), (
        counts
    )


@pytest.mark.parametrize("through", [1, 3])
def test_samples_that_come_one_by_one_are_shared(through: int) -> None:
    ways = gateways(through)
    check_shared([alone(ways[n % through], sample(n, tokens(n))) for n in range(MANY)])


@pytest.mark.parametrize("through", [1, 3])
@pytest.mark.parametrize("length", [0, BLOCK_TOKENS - 1])
def test_so_are_those_of_one_prompt_of_which_nothing_is_kept(through: int, length: int) -> None:
    ways = gateways(through)
    check_shared([alone(ways[n % through], sample(n, tokens(0, length))) for n in range(MANY)])


@pytest.mark.parametrize("model_id", ["", "s:train:0"])
def test_so_are_those_of_one_prompt_that_all_replicas_have_cached(model_id: str) -> None:
    [gateway] = gateways(1)
    for name in NAMES:
        gateway.begin(name, sample(0, tokens(0), model_id).blocks, Load())
    check_shared([alone(gateway, sample(n, tokens(0), model_id)) for n in range(MANY)])


def test_so_are_those_of_an_adapter_that_all_replicas_have_loaded() -> None:
    [gateway] = gateways(1)
    for name in NAMES:
        gateway.begin(name, sample(0, b"", "s:train:0").blocks, Load())
    check_shared([alone(gateway, sample(n, tokens(n), "s:train:0")) for n in range(MANY)])


def test_so_are_those_of_a_full_model_that_all_replicas_have_in_their_engines() -> None:
    [gateway] = gateways(1)
    asked = [wanted("s:train:0", 1, True, "", tokens(n), 1, 256, f"s:sample:0:{n}") for n in range(MANY)]
    check_shared([alone(gateway, one, "s:train:0@1") for one in asked])


def test_an_adapter_stays_where_it_is_loaded_while_that_replica_has_little_to_do() -> None:
    [gateway] = gateways(1)
    assert len({alone(gateway, sample(n, tokens(n), "s:train:0")) for n in range(MANY)}) == 1


def test_a_conversation_returns_to_its_cache_and_conversations_are_shared() -> None:
    [gateway] = gateways(1)
    said = dict.fromkeys(range(64), b"")
    went: dict[int, set[str]] = {talk: set() for talk in said}
    for turn in range(6):
        for talk in said:
            said[talk] += tokens(1000 * turn + talk)
            went[talk].add(alone(gateway, sample(100 * turn + talk, said[talk])))
    assert {len(names) for names in went.values()} == {1}
    assert {name for names in went.values() for name in names} == set(NAMES)


@pytest.mark.parametrize("model_id", ["", "s:train:0"])
def test_prompts_with_a_new_beginning_in_common_go_to_one_replica_through_whichever_gateways_they_come(
    model_id: str,
) -> None:
    for seed in range(50):
        asked = [sample(n, tokens(seed) + tokens(1000 + n), model_id) for n in range(5)]
        ways = gateways(5)
        assert len({begun(way, one)[0] for way, one in zip(ways, asked, strict=True)}) == 1


def test_so_do_those_that_go_on_alike_after_what_all_replicas_have_cached() -> None:
    system = tokens(0)
    places = set()
    for seed in range(1, 50):
        ways = gateways(3)
        for way in ways:
            for name in NAMES:
                way.begin(name, sample(0, system).blocks, Load())
        asked = [sample(n, system + tokens(seed) + tokens(1000 + n)) for n in range(3)]
        [place] = {begun(way, one)[0] for way, one in zip(ways, asked, strict=True)}
        places.add(place)
    assert places == set(NAMES), "and others go elsewhere"


def test_samples_of_one_new_prompt_that_come_at_once_stay_together() -> None:
    [gateway] = gateways(1)
    prompt = tokens(0, 16 * BLOCK_TOKENS)
    assert len({begun(gateway, sample(n, prompt))[0] for n in range(12)}) == 1
