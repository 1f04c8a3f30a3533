"""What the V1 model runner does otherwise.

Invariant: as of `Runner`.
"""

from __future__ import annotations

from services.common.contract.experts.routing import Routing
from services.sampler.worker.runner import Runner
from services.sampler.worker.v1 import drafts, routed_experts, sampled_logprobs, sampling
from services.sampler.worker.v1.prompt_scorer import PromptScorer


class RunnerV1(Runner):
    """A V1 GPUModelRunner or CPUModelRunner."""

    needs = (
        *("_get_prompt_logprobs_dict", "sample_tokens", "requests", "query_start_loc", "input_batch"),
        "parallel_config",
    )

    def correct_sampling(self) -> None:
        sampling.correct(self._of)
        self._sampled = sampled_logprobs.install(self._of)

    def score_prompts(self) -> None:
        PromptScorer(self._of)

    def check_drafts(self) -> None:
        drafts.install(self._of, self._sampled)

    def tell_experts(self) -> Routing | None:
        return routed_experts.install(self._of)
