"""The prompts that a step scores, with adapters by vLLM's own functions for them on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from services.common.contract.sample_schema import Scoring
from services.sampler.worker import step_scores
from services.sampler.worker.cpu import adapters
from services.sampler.worker.prompt_scores import Buffers, plan_of
from services.sampler.worker.row_scores import Rows, RowScores
from services.sampler.worker.step_scores import Part, score
from services.sampler.worker.v1.prompt_scorer import log_softmax

pytestmark = pytest.mark.heavy

VOCAB, WIDTH, RANK = 16, 8, 2
SLOTS: list[int | None] = [11, 22]
REQUESTS = ((5, 11), (7, 0), (3, 22), (4, 11), (6, 0))
"""Rows of each prompt, and its adapter."""
TOKENS = sum(rows for rows, _ in REQUESTS)
CPU = torch.device("cpu")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


HIDDEN, HEAD = random(TOKENS, WIDTH), random(VOCAB, WIDTH)
A, B = random(2, 1, RANK, WIDTH), random(2, 1, VOCAB, RANK)
PROMPTS = [random(rows + 1).argsort() % VOCAB for rows, _ in REQUESTS]


class Runner:
    """What is asked of vLLM's: its manager of adapters, and the head of its model."""

    lora_config = True

    def __init__(self) -> None:
        self._adapters = PunicaWrapperCPU(64, 64, CPU)
        adapters.correct(SimpleNamespace(punica_wrapper_mapping={"model": self._adapters}))
        self.lora_manager = SimpleNamespace(_adapter_manager=self)
        ids = tuple(adapter for _, adapter in REQUESTS)
        self._last_mapping = LoRAMapping(ids, ids)
        self.mapped: list[LoRAMapping] = []

    def _set_adapter_mapping(self, mapping: LoRAMapping) -> None:
        self.mapped.append(mapping)
        self._adapters.update_metadata(mapping, SLOTS, len(SLOTS), VOCAB)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = hidden @ HEAD.T
        self._adapters.add_lora_logits(logits, hidden, A, B, 1.0)
        return logits


def scored(runner: Any) -> list[torch.Tensor]:
    """Log-probabilities of the tokens of each prompt behind the first."""
    parts, first = [], 0
    for (rows, adapter), prompt in zip(REQUESTS, PROMPTS, strict=True):
        plan = plan_of(Scoring(prompt_logprobs=True), rows + 1, seed=0, temperature=1.0)
        scores = RowScores(plan, CPU, log_softmax)

        def behind(rows: Rows, prompt: torch.Tensor = prompt) -> torch.Tensor:
            return prompt[torch.from_numpy(rows) + 1]

        parts.append((plan, Part(scores, scores.rows(0, rows + 1), first, adapter, behind)))
        first += rows
    score(runner, [part for _, part in parts], HIDDEN, runner.compute_logits, VOCAB)
    answers = [(plan, part.scores.answer(part.rows.size + 1)) for plan, part in parts]
    return [torch.from_numpy(Buffers(plan, made.numpy()).own) for plan, made in answers if made is not None]


def expected() -> list[torch.Tensor]:
    found = []
    for (_, adapter), prompt, hidden in zip(
        REQUESTS, PROMPTS, HIDDEN.split([rows for rows, _ in REQUESTS]), strict=True
    ):
        slot = SLOTS.index(adapter) if adapter else None
        head = HEAD if slot is None else HEAD + B[slot, 0] @ A[slot, 0]
        found.append((hidden @ head.T).log_softmax(-1).gather(1, prompt[1:, None])[:, 0])
    return found


@pytest.mark.parametrize(("most", "times"), [(TOKENS, 1), (9, 3), (2, 13), (1, TOKENS)])
def test_every_prompt_has_its_own_adapter_however_few_rows_are_held_at_once(
    monkeypatch: pytest.MonkeyPatch, most: int, times: int
) -> None:
    monkeypatch.setattr(step_scores, "CELLS", most * VOCAB + VOCAB - 1)
    runner = Runner()
    for found, wanted in zip(scored(runner), expected(), strict=True):
        torch.testing.assert_close(found, wanted)
    *of_scores, last = runner.mapped
    assert last is runner._last_mapping
    # What is mapped already is not mapped again.
    assert 1 <= len(of_scores) <= times
    assert max(len(mapping.prompt_mapping) for mapping in of_scores) <= most


def test_adapters_are_mapped_once_for_all_prompts_of_a_step() -> None:
    runner = Runner()
    scored(runner)
    rows = tuple(np.repeat([adapter for _, adapter in REQUESTS], [rows for rows, _ in REQUESTS]))
    assert [mapping.prompt_mapping for mapping in runner.mapped] == [rows, (11, 0, 22, 11, 0)]


def test_a_step_that_scores_no_row_maps_nothing() -> None:
    runner: Any = Runner()
    score(runner, [], HIDDEN, runner.compute_logits, VOCAB)
    assert not runner.mapped
