"""vLLM's own scheduler, and of its workers the part that keeps the experts of tokens, with few blocks, steps
ahead and updates of all weights: what a request is told was chosen for it.

In the place of the experts of a token stands which step computed it, of which request and with which weights.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.distributed.aux_output_connector import worker as vllms
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from services.common.contract.experts.routing import Routing
from services.sampler.engine.experts.own_rows import OwnRows
from services.sampler.worker.prompt_scores import CACHE_LIMIT_KEY, ROUTED_KEY
from services.sampler.worker.v2 import routed_experts
from tests.component.sampler.process import make_model
from tests.component.vllm.test_shifts import BLOCK, TOKENS
from tests.component.vllm.test_updates import VERSIONS, FullEngine

LAYERS, TOP_K, EXPERTS = 4, 2, 1000
ROUTED = [3, 1]
"""Layers of the model that route, as they stand in it."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", tied=True)


class Router(torch.nn.Module):
    """As models have it that route by themselves."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id, self.capture_fn = layer_id, None


class Capturer:
    """In the place of vLLM's, which has a GPU's tensor: the rows of the step at hand."""

    shape_per_token, output_dtype_name, output_dtype = (LAYERS, TOP_K), "uint16", torch.uint16

    def __init__(self, **_: Any) -> None:
        self.device_buffer = torch.zeros(0)

    def snapshot_routing_data(self, num_tokens: int) -> torch.Tensor:
        assert len(self.device_buffer) == num_tokens
        return self.device_buffer.to(self.output_dtype)


@dataclass
class Step:
    """One whose output is not read yet."""

    number: int
    pending: Any
    sampled: list[int]
    """Of each request, tokens that it made; and drafts that did not hold."""
    rejected: list[int]
    given: tuple[np.ndarray, np.ndarray]
    """What the worker's part was given for them, before they were known."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllms, "RoutedExpertsCapturer", Capturer)
    monkeypatch.setattr(vllms, "bind_routed_experts_capturer", lambda *_: None)
    monkeypatch.setattr(vllms, "get_tp_group", lambda: SimpleNamespace(is_first_rank=True))


class TellingEngine(FullEngine):
    """Whose worker notes the experts of all tokens, and keeps those of requests that ask.

    Args:
        chance: of drafts.
    """

    def __init__(
        self, model_dir: Path, blocks: int, ahead: int, drafts: int = 0, chance: random.Random | None = None
    ) -> None:
        super().__init__(model_dir, blocks, ahead, drafts)
        layers = SimpleNamespace(num_blocks=blocks, kv_cache_groups=[])
        self._config.__dict__["max_concurrent_batches"] = ahead + 1
        self.worker = vllms.AuxOutputWorkerConnector(
            vllm_config=self._config,
            model=torch.nn.Module(),
            kv_cache_config=layers,
        )
        model = SimpleNamespace(get_num_experts=lambda: EXPERTS)
        runner = SimpleNamespace(
            aux_output_connector=self.worker,
            vllm_config=SimpleNamespace(model_config=model),
            get_model=lambda: torch.nn.ModuleList([Router(layer) for layer in ROUTED]),
        )
        assert routed_experts.install(runner) == Routing(len(ROUTED), TOP_K, EXPERTS)
        self._drafts, self._chance = drafts, chance or random.Random(0)
        self._number = 0
        self._unread = deque[Step]()
        self.asking = set[str]()
        self.computed = defaultdict[tuple[str, int], list[list[int]]](list)
        """Of a request and a place, what was told in each step that computed it."""
        self.left: dict[str, int] = defaultdict(int)
        """Rows that a request was told."""
        self.rejected = self.unasked = 0
        """Drafts that did not hold, and steps of which nothing was copied."""
        self._update = self.scheduler.update_from_output
        self.scheduler.update_from_output = self._read

    def _set(self, config: Any) -> None:
        self._config = config
        config.cache_config.block_size = BLOCK
        config.aux_output_config.enable_return_routed_experts = True

    def ask(self, name: str, prompt: list[int]) -> None:
        self.asking.add(name)
        self.enter(name, prompt)

    def _add(self, name: str, prompt: list[int], **weights: Any) -> None:
        extra = {ROUTED_KEY: True, CACHE_LIMIT_KEY: 0} if name in self.asking else None
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, extra_args=extra)
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=self._hasher, **weights))
        self.tokens[name], self.made[name] = list(prompt), []

    def _compute(self, scheduled: Any) -> ModelRunnerOutput:
        self.worker.begin_step(scheduled.aux_output_connector_metadata)
        assert self.worker._requests.keys() <= self.asking
        output = super()._compute(scheduled)
        counts = list(scheduled.num_scheduled_tokens.values())
        if not counts:
            return output
        self._number += 1
        starts, rows = [self.places[name] for name in output.req_ids], []
        for name, start, count in zip(output.req_ids, starts, counts, strict=True):
            for place in range(start, start + count):
                own = [self._number, place, sum(name.encode()) % 251, self.version]
                self.computed[name, place].append(own)
                # Zeros of layers that do not route, as vLLM has them.
                rows.append([[0, 0], own[:2], [0, 0], own[2:]])
        self.worker._capturer.device_buffer = torch.tensor(rows, dtype=torch.int32)
        batch: Any = SimpleNamespace(
            req_ids=output.req_ids,
            num_computed_tokens_np=np.array(starts),
            # With a place that nobody has, as of a graph that is larger.
            query_start_loc_np=np.cumsum([0, *counts, 0], dtype=np.int32),
        )
        sampled = [len(made) for made in output.sampled_token_ids]
        drafted = [len(scheduled.scheduled_spec_decode_tokens.get(name, ())) for name in output.req_ids]
        rejected = [drafts + 1 - made if made else 0 for drafts, made in zip(drafted, sampled, strict=True)]
        given = np.zeros(len(counts), np.int32), np.zeros(len(counts), np.int32)
        if (pending := self.worker.prepare_output(batch)) is not None:
            assert set(pending.request_ids) == self.asking & set(output.req_ids)
            pending.enqueue_cpu_copy(*given)
        self._unread.append(Step(self._number, pending, sampled, rejected, given))
        return output

    def _read(self, scheduled: Any, output: ModelRunnerOutput) -> Any:
        step = self._unread.popleft() if output.req_ids else None
        if step is not None and step.pending is not None:
            step.given[0][:], step.given[1][:] = step.sampled, step.rejected
            self.rejected += sum(step.rejected)
            output.aux_output_connector_output = step.pending.process_output()
            assert output.aux_output_connector_output.keys() <= self.asking
        self.unasked += step is not None and step.pending is None
        outputs = self._update(scheduled, output)
        for of_client in outputs.values():
            for told in of_client.outputs:
                if told.routed_experts is not None:
                    assert step is not None
                    self._check_rows(told.request_id, told.routed_experts, step.number)
        if self._drafts:
            names = [request.request_id for request in self.scheduler.running]
            drafts = [
                [self._chance.randrange(2) for _ in range(self._chance.randint(0, self._drafts))]
                for _ in names
            ]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        return outputs

    def _check_rows(self, name: str, rows: np.ndarray, number: int) -> None:
        """Rows that leave are of the last step, up to the one that is read, that computed their tokens."""
        assert name in self.asking
        assert rows.shape[1:] == (len(ROUTED), TOP_K)
        for row in rows.reshape(len(rows), -1).tolist():
            of = [own for own in self.computed[name, self.left[name]] if own[0] <= number]
            assert row == of[-1]
            self.left[name] += 1


# vLLM does not schedule ahead where tokens are drafted.
@pytest.mark.parametrize(("ahead", "drafts"), [(0, 0), (1, 0), (0, 3)])
@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_of_the_step_that_computed_the_token_last_in_this_very_request(
    model_dir: Path, seed: int, ahead: int, drafts: int
) -> None:
    chance = random.Random(seed)
    engine = TellingEngine(model_dir, 40, ahead, drafts, chance)
    asked = dict[str, list[int]]()
    assert isinstance(engine.scheduler.aux_output_connector, OwnRows)
    for number in range(400):
        if number < 300 and chance.random() < 0.3 and len(engine.scheduler.requests) < 8:
            name = f"request-{number}"
            asked[name] = [chance.randrange(2) for _ in range(chance.choice([3, 8, 13, 30]))]
            (engine.ask if chance.random() < 0.5 else engine.enter)(name, asked[name])
        if chance.random() < 0.03 and engine.version < VERSIONS[-1]:
            engine.update(engine.version + 1)
        if chance.random() < 0.02 and engine.scheduler.requests:
            ended = chance.choice(list(engine.scheduler.requests))
            del asked[ended]
            engine.scheduler.finish_requests(ended, RequestStatus.FINISHED_ABORTED)
        engine.step()
    engine.finish()
    for name, prompt in asked.items():
        engine.check(name, prompt)
        assert engine.left[name] == (len(prompt) + TOKENS - 1 if name in engine.asking else 0)
    assert engine.hits > 0
    assert any(len(told) > 1 for told in engine.computed.values()), "nothing was begun again"
    assert (engine.rejected > 0) == (drafts > 0)
    assert engine.unasked > 0, "every step had a request that asks"
    # What has ended is told with the next step.
    engine.worker.begin_step(engine.scheduler.schedule().aux_output_connector_metadata)
    assert not engine.worker._requests
    assert engine.worker._store is not None
    engine.worker._store._queue.join()
    store = engine.worker._store._store
    assert not store._references
    assert not store._lru, "what ended requests had has a place"
    assert len(store._free_slots) == store._next_slot
    assert not engine.scheduler.aux_output_connector._given
    engine.worker.close()
