"""Log-probabilities of what tokens are drawn from behind drafts, with the V2 model runner's own sampler."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton_on_cpu import vllm_kernels
from vllm import SamplingParams
from vllm.v1.worker.cpu import buffer_utils as cpu_buffers
from vllm.v1.worker.gpu import buffer_utils as gpu_buffers
from vllm.v1.worker.gpu.sample import sampler as vllm_sampler
from vllm.v1.worker.gpu.states import RequestState

from services.sampler.worker.prompt_scores import SAMPLED_KEY
from services.sampler.worker.v2.drafts import DraftCheck
from services.sampler.worker.v2.sampled_logprobs import SampledLogprobs
from tests.component.sampler.drawn_from import drawn_from
from tinsmith.v1 import sampling_pb2

VOCAB, LIKELY, CPU = 40, 3, torch.device("cpu")
PROMPTS = [[3, 5], [7, 7, 9], [5, 1], [2]]
DRAFTS: list[list[int]] = [[4, 6], [], [8], [11, 12, 13]]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 9, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 1.0, "frequency_penalty": 1.5, "top_p": 0.9},
]
STARTS = np.cumsum([0, *(len(drafts) + 1 for drafts in DRAFTS)])
LOGITS = 3 * torch.randn(int(STARTS[-1]), VOCAB, generator=torch.Generator().manual_seed(6))


def sampler_of(asking: tuple[int, ...]) -> tuple[Any, SampledLogprobs]:
    """vLLM's, with a request of each prompt."""
    states = RequestState(8, 64, 64, 4, VOCAB, CPU)
    config: Any = SimpleNamespace(
        reasoning_config=None,
        speculative_config=None,
        model_config=SimpleNamespace(max_model_len=64),
    )
    made = vllm_sampler.Sampler(config, 8, VOCAB, CPU, states, num_speculative_tokens=4)
    told = SampledLogprobs(made)
    for index, (prompt, settings) in enumerate(zip(PROMPTS, SETTINGS, strict=True)):
        states.all_token_ids.stage_write(index, 0, prompt)
        states.prompt_len.np[index] = states.prefill_len.np[index] = len(prompt)
        states.total_len.stage_write_elem(index, len(prompt))
        extra = {SAMPLED_KEY: True} if index in asking else None
        made.add_request(index, SamplingParams(**settings, seed=index, logprobs=LIKELY, extra_args=extra))
    states.all_token_ids.apply_write()
    states.total_len.apply_write()
    states.prompt_len.copy_to_uva()
    states.prefill_len.copy_to_uva()
    made.apply_staged_writes()
    # Nothing is drafted behind a prompt; of this step its last token is one that was sampled.
    states.prefill_len.np[: len(PROMPTS)] -= 1
    states.prefill_len.copy_to_uva()
    return made, told


def batch() -> Any:
    """A step behind the last token of each prompt and each draft."""
    counts = [len(drafts) + 1 for drafts in DRAFTS]
    follows = [[prompt[-1], *drafts] for prompt, drafts in zip(PROMPTS, DRAFTS, strict=True)]
    places = [list(range(len(p) - 1, len(p) + len(d))) for p, d in zip(PROMPTS, DRAFTS, strict=True)]
    lengths = torch.tensor([row[-1] + 1 for row in places], dtype=torch.int32)
    of = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()
    return SimpleNamespace(
        input_ids=torch.tensor(list(itertools.chain(*follows)), dtype=torch.int32),
        positions=torch.tensor(list(itertools.chain(*places))),
        logits_indices=torch.arange(int(STARTS[-1])),
        expanded_idx_mapping=of,
        expanded_local_pos=torch.tensor([at for n in counts for at in range(n)], dtype=torch.int32),
        cu_num_logits=torch.tensor(STARTS, dtype=torch.int32),
        cu_num_logits_np=STARTS.astype(np.int32),
        idx_mapping=torch.arange(len(counts), dtype=torch.int32),
        idx_mapping_np=np.arange(len(counts), dtype=np.int32),
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(counts),
    )


@pytest.mark.parametrize("asking", [(), (0, 2, 3)])
def test_every_place_behind_drafts_is_of_what_its_own_request_was_drawn_from(
    asking: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_sampler, "compute_topk_scores", vllm_sampler.compute_topk_scores)
    # As vLLM itself has it in a worker on a CPU.
    monkeypatch.setattr(gpu_buffers, "UvaBuffer", cpu_buffers.UvaBuffer)
    # As a plugin of vLLM's in an engine.
    vllm_kernels.register()
    made, told = sampler_of(asking)
    output = DraftCheck(made, lambda logits: logits, told.scores, 4)(LOGITS.clone(), batch())
    scores = output.logprobs_tensors
    assert scores is not None and scores.cu_num_generated_tokens == STARTS.tolist()
    for index, (prompt, drafts) in enumerate(zip(PROMPTS, DRAFTS, strict=True)):
        settings = sampling_pb2.SamplingParams(**({"top_p": 1.0} | SETTINGS[index]))
        for place in range(len(drafts) + 1):
            row = int(STARTS[index]) + place
            expected = LOGITS[row].log_softmax(-1)
            if index in asking:
                expected = drawn_from(LOGITS[row], settings, prompt, drafts[:place])
            found = scores.logprobs[row]
            torch.testing.assert_close(found[0], expected[scores.logprob_token_ids[row, 0].long()])
            torch.testing.assert_close(found[1:], expected.topk(LIKELY).values)
