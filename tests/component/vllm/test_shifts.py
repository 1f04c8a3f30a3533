"""vLLM's own scheduler, with few blocks, and a model that can be looked into, over changes of adapters.

What the model keeps at a place is which adapter computed which token over what was before it: so whatever is
found in the prefix cache, or left by another request, is told from what should be there.
"""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.lora_utils import LoraState

from services.sampler.config import SamplerConfig
from services.sampler.engine.scheduler import make_scheduler
from services.sampler.engine.settings.arguments import engine_args
from services.sampler.engine.shifts.core import SHIFTS_KEY, Shifts
from services.sampler.worker.runner import attached
from services.sampler.worker.v2.runner import RunnerV2
from tests.component.sampler.process import make_model

BLOCK, SLOTS, TOKENS = 4, 2, 24
ADAPTERS = range(1, 7)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", tied=True)


def lora(adapter: int) -> LoRARequest:
    return LoRARequest(f"model@{adapter}", adapter, "/store")


def computed(adapter: int, token: int, before: int) -> int:
    """What is kept of a token."""
    return hash((adapter, token, before))


def chosen(kept: int) -> int:
    """The next token; few are possible, so that requests come to the same ones."""
    return kept % 2


class Engine:
    """A scheduler, and a worker's part that keeps in blocks what `computed` gives.

    Args:
        ahead: steps that are scheduled before the output of the first is there. Below 0: as many, by the
            scheduler that waits for a request's token before it schedules the next, as with pipeline stages.
        drafts: most tokens that are drafted for a request and step; none by themselves.
    """

    def __init__(self, model_dir: Path, blocks: int, ahead: int, drafts: int = 0) -> None:
        wanted = SamplerConfig(
            *("sampler-0", "org/model", str(model_dir), model_dir, "redis://"),
            max_loras=SLOTS,
            max_sequences=min(8, 16 // (1 + drafts)),
            max_batched_tokens=16,
            speculative_ngram_tokens=drafts,
        )
        config = engine_args(wanted, "cpu").create_engine_config()
        config.scheduler_config.async_scheduling = ahead > 0
        config.cache_config.num_gpu_blocks = blocks
        self._set(config)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        layers = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        structured = StructuredOutputManager(config)
        self.scheduler: Any = make_scheduler(
            config, kv_cache_config=layers, structured_output_manager=structured, block_size=BLOCK
        )
        self.shifts: Shifts = self.scheduler.tinsmith_shifts
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._ahead, self._steps = abs(ahead), deque[tuple[Any, ModelRunnerOutput]]()
        self._kept: dict[tuple[int, int], int] = {}
        self._adapter: dict[str, int] = {}
        self._blocks: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.made: dict[str, list[int]] = {}
        self.told: dict[str, Any] = {}
        self.places: dict[str, int] = {}
        """The first place that the last step computed of each of its requests."""
        self.hits = self.most = 0

    def _set(self, config: Any) -> None:
        """Further settings of vLLM's."""

    def add(self, name: str, prompt: list[int], adapter: int) -> None:
        self._add(name, prompt, lora_request=lora(adapter))

    def _add(self, name: str, prompt: list[int], **weights: Any) -> None:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=self._hasher, **weights))
        self.tokens[name], self.made[name] = list(prompt), []

    @property
    def busy(self) -> bool:
        """Whether a step's output is not read yet."""
        return bool(self._steps)

    def step(self) -> None:
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self._steps.append((scheduled, self._compute(scheduled)))
        if self._steps and (len(self._steps) > self._ahead or not self.scheduler.has_requests()):
            for outputs in self.scheduler.update_from_output(*self._steps.popleft()).values():
                for output in outputs.outputs:
                    self.made[output.request_id] += output.new_token_ids
                    if output.kv_transfer_params:
                        self.told[output.request_id] = output.kv_transfer_params[SHIFTS_KEY]

    def _compute(self, scheduled: Any) -> ModelRunnerOutput:
        for name, adapter in attached(scheduled).items():
            if name in self._adapter:
                self._adapter[name] = adapter.lora_int_id
        places = self.places = dict[str, int]()
        for new in scheduled.scheduled_new_reqs:
            self._adapter[new.req_id] = self._of(new)
            self._blocks[new.req_id] = list(new.block_ids[0])
            places[new.req_id] = new.num_computed_tokens
            self.hits += new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for name, blocks, place in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self._blocks[name] = []
            self._blocks[name] += blocks[0] if blocks else []
            places[name] = place
        self.most = max(self.most, len({self._adapter[name] for name in scheduled.num_scheduled_tokens}))
        sampled = []
        for name, count in scheduled.num_scheduled_tokens.items():
            tokens, end = self.tokens[name], places[name] + count
            read = tokens + scheduled.scheduled_spec_decode_tokens.get(name, [])
            for place in range(places[name], end):
                before = self._at(name, place - 1) if place else 0
                self._kept[self._slot(name, place)] = computed(self._adapter[name], read[place], before)
            sampled.append(list[int]())
            # A draft holds if it is the token that is chosen in its place.
            while end == len(read) and tokens == read[: len(tokens)] and len(tokens) <= end:
                sampled[-1].append(chosen(self._at(name, len(tokens) - 1)))
                tokens.append(sampled[-1][-1])
        names = list(scheduled.num_scheduled_tokens)
        return ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)

    def _of(self, new: Any) -> int:
        """With what a request enters."""
        return int(new.lora_request.lora_int_id)

    def _slot(self, name: str, place: int) -> tuple[int, int]:
        return self._blocks[name][place // BLOCK], place % BLOCK

    def _at(self, name: str, place: int) -> int:
        return self._kept[self._slot(name, place)]


def expected(prompt: list[int], adapter: int, told: Any, count: int) -> list[int]:
    """The tokens of a request that changed its adapter as it was told."""
    tokens, kept = list(prompt), list[int]()
    changes = {start: (to, keeps) for start, to, keeps in told}
    for made in range(count):
        if made in changes:
            adapter, keeps = changes[made]
            if not keeps:
                kept = []
        for token in tokens[len(kept) :]:
            kept.append(computed(adapter, token, kept[-1] if kept else 0))
        tokens.append(chosen(kept[-1]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("ahead", [0, 1, -1])
@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_what_its_adapter_makes_of_what_was_kept_and_nobody_finds_anothers(
    model_dir: Path, seed: int, ahead: int
) -> None:
    chance = random.Random(seed)
    engine, asked = Engine(model_dir, 40, ahead), dict[str, tuple[list[int], int]]()
    wanted: dict[str, int] = {}
    newest = 1
    for number in range(400):
        if number < 300 and chance.random() < 0.3 and len(engine.scheduler.requests) < 8:
            name = f"request-{number}"
            # Two adapters at most are let in at once.
            adapter = chance.choice([newest, max(newest - 1, 1)])
            asked[name] = [chance.randrange(2) for _ in range(chance.choice([3, 8, 13]))], adapter
            engine.add(name, *asked[name])
            wanted[name] = adapter
        present = {wanted[name] for name in engine.scheduler.requests}
        if chance.random() < 0.1 and newest < ADAPTERS[-1] and present <= {newest}:
            newest += 1
        for name in list(engine.scheduler.requests):
            if wanted[name] < newest and chance.random() < 0.2:
                wanted[name] = newest
        for adapter in sorted(present):
            names = [name for name in engine.scheduler.requests if wanted[name] == adapter]
            engine.shifts.ask(names, lora(adapter))
        engine.step()
    while engine.scheduler.has_requests() or engine.busy:
        engine.step()
    for name, (prompt, adapter) in asked.items():
        told = engine.told.get(name, ())
        assert engine.made[name] == expected(prompt, adapter, told, TOKENS), (name, told)
    kept = [keeps for told in engine.told.values() for _, _, keeps in told]
    assert engine.hits > 0
    assert engine.most <= SLOTS
    assert any(kept)


@pytest.mark.parametrize("ahead", [0, 1, -1])
@pytest.mark.parametrize("length", range(1, 3 * BLOCK))
def test_a_block_that_is_full_but_for_the_last_tokens_keys_is_not_taken_for_one_of_the_former_adapter(
    model_dir: Path, length: int, ahead: int
) -> None:
    engine, prompt = Engine(model_dir, 40, ahead), [1] * length
    engine.add("moved", prompt, 1)
    while len(engine.made["moved"]) < 2:
        engine.step()
    engine.shifts.ask(["moved"], lora(2))
    while engine.scheduler.has_requests() or engine.busy:
        engine.step()
    told = engine.told["moved"]
    assert [(adapter, kept) for _, adapter, kept in told] == [(2, True)]
    made = engine.made["moved"]
    assert made == expected(prompt, 1, told, TOKENS)
    for adapter in (1, 2):
        engine.add(f"later-{adapter}", prompt + made, adapter)
        while engine.scheduler.has_requests() or engine.busy:
            engine.step()
        assert engine.made[f"later-{adapter}"] == expected(prompt + made, adapter, (), TOKENS)
    # The former one's own blocks are found by it, and nothing else is by anybody.
    ((start, _, _),) = told
    assert engine.hits == (length + start - 1) // BLOCK * BLOCK


def test_old_and_new_that_do_not_fit_beside_the_others_change_in_one_step(model_dir: Path) -> None:
    engine = Engine(model_dir, 80, 0)
    for name, adapter in (("other", 3), ("first", 1), ("second", 1)):
        engine.add(name, [0, 1, 1], adapter)
    for _ in range(3):
        engine.step()
    engine.add("late", [1] * 40, 1)
    engine.step()
    assert engine.shifts.ask(["first"], lora(2)) == []
    engine.step()
    assert engine.shifts.ask(["first"], lora(2)) == [], "there are two slots, and a third one would be needed"
    engine.shifts.ask(["second"], lora(2))
    engine.shifts.ask(["late"], lora(2))
    while not engine.made["late"]:
        assert engine.shifts.ask(["first", "second", "late"], lora(2)) == [], "one has no token yet"
        engine.step()
    engine.step()
    assert engine.shifts.ask(["first", "second", "late"], lora(2)) == ["first", "second", "late"]
    while engine.scheduler.has_requests() or engine.busy:
        engine.step()
    assert engine.most == SLOTS
    for name, prompt, adapter in (("other", [0, 1, 1], 3), ("first", [0, 1, 1], 1), ("late", [1] * 40, 1)):
        assert engine.made[name] == expected(prompt, adapter, engine.told.get(name, ()), TOKENS)


@pytest.mark.parametrize("ahead", [0, 1, -1])
def test_what_was_given_up_for_room_is_of_its_present_adapter_alone_and_says_so(
    model_dir: Path, ahead: int
) -> None:
    engine = Engine(model_dir, 12, ahead)
    for name in ("first", "second"):
        engine.add(name, [0, 1, 1, 0, 1], 1)
    while not all(engine.made.values()):
        engine.step()
    while len(engine.shifts.ask(["first", "second"], lora(2))) < 2:
        engine.step()
    while engine.scheduler.has_requests() or engine.busy:
        engine.step()
    assert [kept for _, _, kept in engine.told["second"]] == [True, False]
    for name in ("first", "second"):
        assert engine.made[name] == expected([0, 1, 1, 0, 1], 1, engine.told[name], TOKENS)


def test_what_waits_for_its_first_step_has_the_newer_adapter_from_the_start(model_dir: Path) -> None:
    engine = Engine(model_dir, 40, 0)
    engine.add("waiting", [0, 1, 1], 1)
    engine.shifts.ask(["waiting"], lora(2))
    while engine.scheduler.has_requests() or engine.busy:
        engine.step()
    assert engine.told["waiting"] == ((0, 2, False),)
    assert engine.made["waiting"] == expected([0, 1, 1], 2, (), TOKENS)


def test_the_v2_runner_gives_a_request_its_new_adapter_and_passes_over_one_that_it_does_not_have() -> None:
    state, runner = LoraState(4), RunnerV2.__new__(RunnerV2)
    state.add_request("first", 2, lora(1))
    state.add_request("second", 3, lora(1))
    runner._of = SimpleNamespace(
        lora_state=state, req_states=SimpleNamespace(req_id_to_index={"first": 2, "second": 3})
    )
    for name in ("first", "given up"):
        runner.shift(name, lora(2))
    places, counts = np.array([3, 2]), np.array([1, 2])
    sampled, tokens, adapters = state.make_lora_inputs(["second", "first"], places, counts)
    assert (sampled, tokens) == ((1, 2), (1, 2, 2))
    assert {one.lora_int_id for one in adapters} == {1, 2}
    assert "given up" not in state.lora_requests
