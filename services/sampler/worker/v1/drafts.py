"""Checks drafted tokens inside a vLLM worker (V1 model runner), in place of vLLM's own rejection sampler.

A step computes the logits behind several drafted tokens of a request. vLLM's own check accepts them by
chance, with random numbers that a seed gives to other tokens than without drafts, and leaves `min_p` and
`logit_bias` out (vllm-project/vllm#22987, #42744). Here the token at each place is sampled as without drafts,
by vLLM's own sampler; a draft only says what was sampled before the next place, and counts for nothing when
it says something else.

Invariant: a request's tokens, their distribution and their log-probabilities are those that it has without
drafts, and of its random numbers it uses one for each token that it keeps.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from services.sampler.worker.v1.sampled_logprobs import SampledLogprobs

NOTHING = int(PLACEHOLDER_TOKEN_ID)
"""Stands in the answer where no token was sampled."""


def install(runner: Any, sampled: SampledLogprobs) -> None:
    """Has a worker whose engine drafts check drafts here.

    Args:
        runner: its V1 GPUModelRunner or CPUModelRunner, which has no requests yet.
        sampled: of its sampler.
    """
    if not hasattr(runner, "rejection_sampler"):
        raise RuntimeError(f"this vLLM's model runner has no rejection_sampler; check {__name__}")
    runner.rejection_sampler = DraftCheck(runner.sampler, sampled)
    # With drafts vLLM leaves most of them out, as its own check cannot apply them.
    builtin = [kind(runner.vllm_config, runner.device, PIN_MEMORY) for kind in BUILTIN_LOGITS_PROCESSORS]
    runner.input_batch.logitsprocs = LogitsProcessors([*builtin, sampled])


class DraftCheck:
    """Samples behind drafts.

    Args:
        sampler: vLLM's, which samples one token of each request.
        told: writes what is drawn from, for the requests that ask for it.
    """

    def __init__(self, sampler: Any, told: SampledLogprobs) -> None:
        self._sampler = sampler
        self._sampled_logprobs = told

    def __call__(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling: SamplingMetadata,
    ) -> SamplerOutput:
        """The tokens of one step, [requests, most drafts + 1], with NOTHING behind the last of each.

        Args:
            draft_probs: None, as drafts are looked up and not sampled.
            logits: of each request's places in order, one more than it has drafts.
        """
        counts = metadata.num_draft_tokens
        # Before anything is sampled: sampling.py gives those of before a grammar's mask here.
        logprobs = None if sampling.max_num_logprobs is None else self._sampler.compute_logprobs(logits)
        tokens = self._sampled(counts, metadata.draft_token_ids.tolist(), logits, sampling, logprobs)
        width = max(counts) + 1
        padded = torch.tensor([row + [NOTHING] * (width - len(row)) for row in tokens], dtype=torch.int32)
        padded = padded.to(logits.device)
        if logprobs is None:
            return SamplerOutput(sampled_token_ids=padded, logprobs_tensors=None)
        return SamplerOutput(
            sampled_token_ids=padded, logprobs_tensors=self._told(counts, padded, logprobs, sampling)
        )

    def _sampled(
        self,
        counts: list[int],
        drafts: list[int],
        logits: torch.Tensor,
        sampling: SamplingMetadata,
        logprobs: torch.Tensor | None,
    ) -> list[list[int]]:
        first = _starts(counts, 1)
        drafted = [
            drafts[start : start + count] for start, count in zip(_starts(counts, 0), counts, strict=True)
        ]
        tokens: list[list[int]] = [[] for _ in counts]
        going = list(range(len(counts)))
        while going:
            # What the sampler knows of a request it knows by its place in the batch, so all are sampled;
            # those that have ended without their random numbers, and for nothing.
            rows = [
                start + min(len(row), count) for start, row, count in zip(first, tokens, counts, strict=True)
            ]
            step = dataclasses.replace(
                sampling,
                generators={
                    index: sampling.generators[index] for index in going if index in sampling.generators
                },
                max_num_logprobs=None,
                output_token_ids=[
                    before + row for before, row in zip(sampling.output_token_ids, tokens, strict=False)
                ],
            )
            if logprobs is not None:
                self._sampled_logprobs.write(logprobs, {index: rows[index] for index in going})
            found = self._sampler(logits[torch.tensor(rows, device=logits.device)], step)
            new = found.sampled_token_ids[:, 0].tolist()
            for index in going:
                tokens[index].append(new[index])
            going = [index for index in going if _held(drafted[index], tokens[index])]
        return tokens

    def _told(
        self, counts: list[int], padded: torch.Tensor, logprobs: torch.Tensor, sampling: SamplingMetadata
    ) -> LogprobsTensors:
        width = padded.shape[1]
        made = padded.flatten() != NOTHING
        first = torch.tensor(_starts(counts, 1), device=padded.device)
        rows = (first[:, None] + torch.arange(width, device=padded.device)).flatten()[made]
        told = self._sampler.gather_logprobs(
            logprobs[rows], sampling.max_num_logprobs, padded.flatten()[made].long()
        )
        # vLLM takes the rows of the tokens out of one for each cell.
        where = made.cumsum(0).sub_(1).clamp_(min=0)
        return LogprobsTensors(*(part[where] for part in told[:3]))


def _held(drafted: list[int], tokens: list[int]) -> bool:
    """Whether the last token that was sampled is the one that was drafted, so that the next place counts."""
    last = len(tokens) - 1
    return last < len(drafted) and tokens[last] == drafted[last]


def _starts(counts: list[int], more: int) -> list[int]:
    """Where each request begins if it has `more` than its count."""
    return [0, *itertools.accumulate(count + more for count in counts[:-1])]
