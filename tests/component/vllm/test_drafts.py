"""Drafted tokens on vLLM's own sampler: they change how many tokens a step makes, and none of them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

from services.common.contract.errors import InvalidRequest
from services.sampler.config import SamplerConfig
from services.sampler.engine.settings.arguments import engine_args
from services.sampler.engine.settings.checks import check_model
from services.sampler.worker.prompt_scores import SAMPLED_KEY
from services.sampler.worker.v1.drafts import DraftCheck
from services.sampler.worker.v1.sampled_logprobs import SampledLogprobs
from services.sampler.worker.v2.drafts import install, kept

pytestmark = pytest.mark.heavy

VOCAB, TOPK, LENGTH, MOST = 48, 3, 40, 5
NEXT = 3 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
"""Logits of a model that looks at the last token only."""
TEMPERATURES = (0.0, 1.0, 0.6, 1.0, 0.8)
REQUESTS = len(TEMPERATURES)
Row = tuple[int, float, list[float]]
"""A token, its log-probability and those of the most likely ones."""


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """As in a sampler on a CPU, which compiles nothing."""
    with torch.compiler.set_stance("force_eager"):
        yield


def generators() -> dict[int, torch.Generator]:
    """Of the requests that have a seed."""
    return {index: torch.Generator().manual_seed(70 + index) for index in range(1, REQUESTS)}


def metadata(outputs: list[list[int]], seeded: dict[int, torch.Generator]) -> SamplingMetadata:
    """Requests that are steered in every way that looks at a request's own settings and tokens."""
    return SamplingMetadata(
        temperature=torch.tensor(TEMPERATURES),
        all_greedy=False,
        all_random=False,
        top_p=torch.tensor([1.0, 1.0, 0.9, 1.0, 0.95]),
        top_k=torch.tensor([VOCAB, VOCAB, VOCAB, 7, 20], dtype=torch.int32),
        generators=seeded,
        max_num_logprobs=TOPK,
        no_penalties=False,
        prompt_token_ids=torch.full((REQUESTS, 1), VOCAB),
        frequency_penalties=torch.tensor([0.4, 0.0, 0.3, 0.0, 0.0]),
        presence_penalties=torch.tensor([0.0, 0.0, 0.5, 0.0, 0.2]),
        repetition_penalties=torch.tensor([1.0, 1.0, 1.0, 1.2, 1.0]),
        output_token_ids=outputs,
        allowed_token_ids_mask=None,
        bad_words_token_ids={3: [[4], [5, 6]]},
        logitsprocs=LogitsProcessors(),
        spec_token_ids=[[] for _ in outputs],
    )


def checked(*rows: int) -> tuple[Sampler, DraftCheck]:
    """A sampler and a check of drafts; the requests of these rows ask for what they are drawn from."""
    sampler = Sampler()
    told = SampledLogprobs(sampler)
    asks = SamplingParams(extra_args={SAMPLED_KEY: True})
    told.update_state(BatchUpdate(REQUESTS, [], [(row, asks, None, []) for row in rows], []))
    return sampler, DraftCheck(sampler, told)


def without_drafts(*rows: int) -> list[list[Row]]:
    (sampler, _), seeded = checked(*rows), generators()
    outputs: list[list[int]] = [[] for _ in range(REQUESTS)]
    rows: list[list[Row]] = [[] for _ in outputs]
    for _ in range(LENGTH + MOST + 1):
        logits = torch.stack([NEXT[output[-1] if output else 0] for output in outputs])
        made = sampler(logits.clone(), metadata(outputs, seeded))
        told: Any = made.logprobs_tensors
        for index, (token,) in enumerate(made.sampled_token_ids.tolist()):
            outputs[index].append(token)
            logprobs = told.logprobs[index].tolist()
            rows[index].append((token, logprobs[0], logprobs[1:]))
    return rows


def drafted(expected: list[list[Row]], done: list[int], chance: random.Random) -> list[list[int]]:
    """What comes next, of some requests less and of some with a mistake in it."""
    drafts = []
    for index, start in enumerate(done):
        draft = [row[0] for row in expected[index][start : start + chance.randint(0, MOST)]]
        if draft and chance.random() < 0.5:
            draft[chance.randrange(len(draft))] = chance.choice([-1, chance.randrange(VOCAB)])
        drafts.append(draft)
    return drafts


def behind(outputs: list[list[int]], drafts: list[list[int]]) -> torch.Tensor:
    """Logits of each request behind its last token and behind each drafted one."""
    last = [[output[-1] if output else 0, *draft] for output, draft in zip(outputs, drafts, strict=True)]
    return torch.stack([NEXT[max(token, 0)] for row in last for token in row])


@pytest.mark.parametrize("rows", [(), (0, 2, 3)], ids=["the model's own", "of what some were drawn from"])
def test_seeded_and_greedy_tokens_and_their_scores_are_those_that_come_without_drafts(
    rows: tuple[int, ...],
) -> None:
    expected, (_, check), seeded = without_drafts(*rows), checked(*rows), generators()
    chance, widths = random.Random(5), set()
    outputs: list[list[int]] = [[] for _ in range(REQUESTS)]
    while min(map(len, outputs)) < LENGTH:
        drafts = drafted(expected, [len(output) for output in outputs], chance)
        step = metadata(outputs, seeded)
        made = check(
            SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu")), None, behind(outputs, drafts), step
        )
        told: Any = made.logprobs_tensors
        if made.sampled_token_ids.shape[1] == 1:
            tokens, scores = made.sampled_token_ids.tolist(), told.tolists()
            at = list(range(REQUESTS))
        else:
            tokens, scores = RejectionSampler.parse_output(
                made.sampled_token_ids, VOCAB, logprobs_tensors=told
            )
            at = scores.cu_num_generated_tokens
        for index, row in enumerate(tokens):
            start = len(outputs[index])
            wanted = expected[index][start : start + len(row)]
            if start + len(row) > len(expected[index]):
                continue
            widths.add(len(row))
            assert row == [token for token, _, _ in wanted], (index, start)
            found = torch.tensor(scores.logprobs[at[index] : at[index] + len(row)])
            own = torch.tensor([[logprob, *likely] for _, logprob, likely in wanted])
            torch.testing.assert_close(found, own)
            outputs[index].extend(row)
    assert widths == set(range(1, MOST + 2))


def test_a_request_that_ends_before_others_in_a_step_keeps_its_random_numbers() -> None:
    seeded, other = generators(), generators()
    outputs: list[list[int]] = [[] for _ in range(REQUESTS)]
    long = [row[0] for row in without_drafts()[1][:MOST]]
    drafts = [[], long, [], [], [-1, -1]]
    made = checked()[1](
        SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu")),
        None,
        behind(outputs, drafts),
        metadata(outputs, seeded),
    )
    kept = [sum(token >= 0 for token in row) for row in made.sampled_token_ids.tolist()]
    assert kept == [1, MOST + 1, 1, 1, 1]
    for index, generator in other.items():
        for _ in range(kept[index]):
            torch.randint(0, 2**31, (1,), generator=generator)
        assert torch.equal(generator.get_state(), seeded[index].get_state()), index


def test_without_a_seed_the_distribution_is_the_one_without_drafts() -> None:
    many, draft = 8000, [7, 21]
    rows = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    # Drafts hold for about a quarter.
    rows[torch.arange(2), draft] = 3.0
    torch.manual_seed(3)
    step = metadata([[] for _ in range(REQUESTS)], {})
    nothing = torch.zeros(many)
    step = SamplingMetadata(
        **{
            **vars(step),
            "temperature": torch.ones(many),
            "all_random": True,
            "top_p": None,
            "top_k": None,
            "no_penalties": True,
            "output_token_ids": [],
            "bad_words_token_ids": {},
            "frequency_penalties": nothing,
            "presence_penalties": nothing,
            "repetition_penalties": nothing,
        }
    )
    made = checked()[1](
        SpecDecodeMetadata.make_dummy([draft] * many, torch.device("cpu")),
        None,
        rows.repeat(many, 1),
        step,
    ).sampled_token_ids
    for place, logits in enumerate(rows):
        there = made[:, place][made[:, place] >= 0]
        expected = logits.softmax(-1) * len(there)
        counted = torch.bincount(there, minlength=VOCAB)
        common = expected > 5
        chi = ((counted - expected) ** 2 / expected)[common].sum()
        degrees = int(common.sum()) - 1
        assert len(there) > 100 and degrees > 5
        assert chi < degrees + 5 * (2 * degrees) ** 0.5, (place, float(chi), degrees)


def test_what_is_kept_of_a_step_ends_behind_the_first_draft_that_was_not_sampled() -> None:
    # Each place: what it follows, and what was sampled there.
    requests = [
        [(9, 5), (5, 6), (6, 7)],  # both drafts hold
        [(9, 5)],  # none was drafted
        [(9, 5), (4, 4), (4, 4)],  # the first does not hold, and the second counts for nothing
        [(9, 5), (5, 6), (-1, 6)],  # the second cannot hold
        [(9, 5), (5, 9)],  # the next request begins with what was sampled last
        [(9, 1), (1, 2)],
    ]
    places = torch.tensor([place for request in requests for place in request])
    starts = torch.tensor([0, *itertools.accumulate(map(len, requests))], dtype=torch.int32)
    tokens, counts = kept(places[:, 1], places[:, 0], starts, 3)
    found = [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
    assert found == [[5, 6, 7], [5], [5], [5, 6], [5, 9], [1, 2]]


def test_every_place_behind_drafts_has_the_adapter_of_its_request_and_only_for_that() -> None:
    mapped: list[Any] = []
    manager = SimpleNamespace(_last_mapping="of the step", _set_adapter_mapping=mapped.append)
    runner = SimpleNamespace(
        lora_config=object(),
        lora_manager=SimpleNamespace(_adapter_manager=manager),
        lora_state=SimpleNamespace(lora_ids=np.array([0, 7, 9])),
        sample=lambda *_: list(mapped),
        sampler=None,
        num_speculative_steps=2,
    )
    install(runner, lambda logits: logits, compute_topk_scores)
    batch = SimpleNamespace(
        num_draft_tokens=3, idx_mapping_np=np.array([2, 0, 1]), cu_num_logits_np=np.array([0, 3, 4, 6])
    )
    (during,) = runner.sample(None, batch, None)
    assert during.prompt_mapping == (9, 9, 9, 0, 7, 7)
    assert mapped == [during, "of the step"]
    batch.num_draft_tokens = 0
    assert runner.sample(None, batch, None) == mapped


def test_a_model_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    layers = ["linear_attention", "full_attention"]
    told = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**told, "layer_types": layers}))
    config = SamplerConfig("s", "a/b", str(tmp_path), tmp_path, "", speculative_ngram_tokens=2)
    with pytest.raises(InvalidRequest, match="Qwen3NextForCausalLM has recurrent layers"):
        check_model(config, engine_args(config, "cuda"))
    without = dataclasses.replace(config, speculative_ngram_tokens=0)
    check_model(without, engine_args(without, "cuda"))


def test_vllm_by_itself_still_leaves_out_what_drafts_do_here() -> None:
    """When it does not, services/sampler/worker/v1/drafts.py and the override in engine/params.py can go."""
    config: Any = object()
    for steered in ({"min_p": 0.1}, {"logit_bias": {1: 1.0}}):
        with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):
            SamplingParams(**steered)._validate_spec_decode(config)
