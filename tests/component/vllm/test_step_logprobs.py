"""vLLM's own scheduler and front end, between which the log-probabilities of a step's sampled tokens are one
array: each token arrives with its own, whatever becomes of requests meanwhile."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from services.sampler.engine.logprobs import front
from tests.component.sampler.process import make_model
from tests.component.vllm.test_shifts import TOKENS, Engine, lora

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", tied=True)


def number(name: str, place: int) -> float:
    """The log-probability of a request's token at a place."""
    return -(hash((name, place)) % 4096) / 8


class ToldEngine(Engine):
    """One that tells log-probabilities, and its front end."""

    def __init__(self, model_dir: Path, blocks: int, ahead: int) -> None:
        super().__init__(model_dir, blocks, ahead)
        update = self.scheduler.update_from_output

        def sent(scheduled: Any, made: Any) -> Any:
            outputs = update(scheduled, made)
            for of_client in outputs.values():
                self._receive(of_client)
            return outputs

        self.scheduler.update_from_output = sent
        self.likely: dict[str, int] = {}
        self.kept: dict[str, Any] = {}
        self.arrays = self.rows = self.again = 0

    def ask(self, name: str, prompt: list[int], likely: int) -> None:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=likely, flat_logprobs=True)
        request = Request(name, prompt, params, None, lora_request=lora(1), block_hasher=self._hasher)
        self.scheduler.add_request(request)
        self.tokens[name], self.made[name], self.likely[name] = list(prompt), [], likely
        own = LogprobsProcessor(None, FlatLogprobs(), None, 0.0, likely, None)
        self.kept[name] = front.Processor.of(own)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        del self.kept[name]

    def _compute(self, scheduled: Any) -> ModelRunnerOutput:
        self.again += len(scheduled.scheduled_cached_reqs.resumed_req_ids)
        made = super()._compute(scheduled)
        width = 1 + max((self.likely[name] for name in made.req_ids), default=0)
        ids, numbers = np.zeros((len(made.req_ids), width), np.int32), np.zeros((len(made.req_ids), width))
        for row, (name, tokens) in enumerate(zip(made.req_ids, made.sampled_token_ids, strict=True)):
            if tokens:
                ids[row], numbers[row] = tokens[0], number(name, len(self.tokens[name]) - 1)
        made.logprobs = LogprobsLists(ids, numbers.astype(np.float32), np.ones(len(ids), np.int64))
        return made

    def _receive(self, sent: EngineCoreOutputs) -> None:
        told: EngineCoreOutputs = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
        self._count(told.outputs)
        front.unpack(told.outputs)
        for output in told.outputs:
            if output.request_id in self.kept:
                self.kept[output.request_id].update_from_output(output)

    def _count(self, outputs: list[EngineCoreOutput]) -> None:
        own = {one.request_id: one.new_logprobs for one in outputs if one.new_logprobs is not None}
        arrays = [name for name, lists in own.items() if lists.logprobs.ndim == 1]
        assert len(arrays) <= 1
        self.arrays += len(arrays)
        rows = own.keys() - set(arrays)
        assert all(self.likely[name] for name in rows)
        self.rows += len(rows)


@pytest.mark.parametrize("ahead", [0, 1, -1])
@pytest.mark.parametrize("seed", range(3))
def test_each_token_arrives_with_its_number_whatever_is_given_up_or_aborted(
    model_dir: Path, seed: int, ahead: int
) -> None:
    chance = random.Random(seed)
    # Room for a few only: others are given up for them, and begin again.
    engine, prompts = ToldEngine(model_dir, 24, ahead), dict[str, list[int]]()
    for step in range(200):
        if chance.random() < 0.3 and len(engine.scheduler.requests) < 6:
            name = f"request-{step}"
            prompts[name] = [chance.randrange(2) for _ in range(chance.choice([3, 8, 20]))]
            engine.ask(name, prompts[name], chance.choice([0, 0, 0, 2]))
        if chance.random() < 0.02 and (running := [*engine.scheduler.requests.keys() & engine.kept.keys()]):
            engine.abort(min(running))
        engine.step()
    while engine.scheduler.has_requests() or engine.busy:
        engine.step()
    assert engine.arrays > 100 and engine.rows > 20 and engine.again
    assert len(engine.kept) > 10
    for name, of in engine.kept.items():
        assert len(engine.made[name]) == TOKENS
        width = 1 + engine.likely[name]
        assert list(of.logprobs.token_ids) == [token for token in engine.made[name] for _ in range(width)]
        start = len(prompts[name])
        expected = [number(name, place) for place in range(start, start + TOKENS) for _ in range(width)]
        assert list(of.logprobs.logprobs) == expected
