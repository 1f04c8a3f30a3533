"""vLLM's own scheduler, with few blocks, and a model that can be looked into, over updates of all weights.

What the model keeps at a place is which version computed which token over what was before it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from services.sampler.engine.shifts.full_core import Updates
from tests.component.sampler.process import make_model
from tests.component.vllm.test_shifts import BLOCK, TOKENS, Engine, expected

VERSIONS = range(1, 9)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", tied=True)


def salt(version: int) -> str:
    return f"model@{version}/owner"


class FullEngine(Engine):
    """With all weights of one version at a time."""

    def __init__(self, model_dir: Path, blocks: int, ahead: int, drafts: int = 0) -> None:
        super().__init__(model_dir, blocks, ahead, drafts)
        self.updates: Updates = self.scheduler.tinsmith_updates
        self.version = VERSIONS[0]
        self.first: dict[str, int] = {}

    def enter(self, name: str, prompt: list[int]) -> None:
        self.first[name] = self.version
        self._add(name, prompt, cache_salt=salt(self.version))

    def update(self, version: int) -> None:
        """As the front end does it: between two steps, with none under way."""
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self.busy or self.scheduler.has_requests():
            self.step()
        former, self.version = self.version, version
        for name in self._adapter:
            self._adapter[name] = version
        self.updates.update(f"model@{former}", f"model@{version}", version)
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def finish(self) -> None:
        while self.scheduler.has_requests() or self.busy:
            self.step()

    def check(self, name: str, prompt: list[int]) -> None:
        told = self.told.get(name, ())
        assert self.made[name] == expected(prompt, self.first[name], told, TOKENS), (name, told)

    def _of(self, new: Any) -> int:
        return self.version


@pytest.mark.parametrize("ahead", [0, 1, -1])
@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_what_its_version_makes_of_what_was_kept_and_nobody_finds_anothers(
    model_dir: Path, seed: int, ahead: int
) -> None:
    chance = random.Random(seed)
    engine, asked = FullEngine(model_dir, 40, ahead), dict[str, list[int]]()
    for number in range(400):
        if number < 300 and chance.random() < 0.3 and len(engine.scheduler.requests) < 8:
            name = f"request-{number}"
            asked[name] = [chance.randrange(2) for _ in range(chance.choice([3, 8, 13, 30]))]
            engine.enter(name, asked[name])
        if chance.random() < 0.03 and engine.version < VERSIONS[-1]:
            engine.update(engine.version + 1)
        engine.step()
    engine.finish()
    for name, prompt in asked.items():
        engine.check(name, prompt)
    kept = [keeps for told in engine.told.values() for _, _, keeps in told]
    assert engine.hits > 0
    assert any(kept) and not all(kept)


@pytest.mark.parametrize("ahead", [0, 1, -1])
@pytest.mark.parametrize("length", range(1, 3 * BLOCK))
def test_a_block_that_is_full_but_for_the_last_tokens_keys_is_not_taken_for_one_of_the_former_version(
    model_dir: Path, length: int, ahead: int
) -> None:
    engine, prompt = FullEngine(model_dir, 40, ahead), [1] * length
    engine.enter("moved", prompt)
    while len(engine.made["moved"]) < 2:
        engine.step()
    engine.update(2)
    engine.finish()
    ((start, version, kept),) = engine.told["moved"]
    assert (version, kept) == (2, True)
    engine.check("moved", prompt)
    whole = prompt + engine.made["moved"]
    engine.enter("later", whole)
    engine.finish()
    engine.check("later", whole)
    assert engine.hits == 0, "what the new one has computed has keys and values of the old one before it"
    # Nothing runs: as after a swap.
    engine.version = 1
    engine.enter("former", whole)
    engine.finish()
    engine.check("former", whole)
    assert engine.hits == (length + start - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("ahead", [0, 1, -1])
def test_what_has_not_been_computed_up_to_its_last_token_begins_again_in_its_order(
    model_dir: Path, ahead: int
) -> None:
    engine = FullEngine(model_dir, 40, ahead)
    prompts = {"long": [1] * 30, "second": [0, 1, 1] * 6, "third": [1, 0] * 8}
    for name, prompt in prompts.items():
        engine.enter(name, prompt)
    engine.step()
    assert not any(engine.made.values()), "a part of the first prompt was computed"
    engine.update(2)
    assert [request.request_id for request in engine.scheduler.running] == []
    assert [request.request_id for request in engine.scheduler.waiting] == list(prompts)
    engine.finish()
    for name, prompt in prompts.items():
        assert engine.told[name] == ((0, 2, False),)
        engine.check(name, prompt)


def test_two_updates_without_a_token_between_them_are_one(model_dir: Path) -> None:
    engine = FullEngine(model_dir, 40, 0)
    engine.enter("moved", [1, 0, 1])
    while len(engine.made["moved"]) < 3:
        engine.step()
    engine.update(2)
    engine.update(3)
    engine.finish()
    assert engine.told["moved"] == ((3, 3, True),)
    engine.check("moved", [1, 0, 1])


def test_a_request_of_other_weights_than_those_that_are_replaced_is_an_error(model_dir: Path) -> None:
    engine = FullEngine(model_dir, 40, 0)
    engine.enter("moved", [1, 0, 1])
    engine.step()
    with pytest.raises(RuntimeError, match="is not of another@1"):
        engine.updates.update("another@1", "another@2", 2)
