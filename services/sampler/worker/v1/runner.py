"""What the V1 model runner does otherwise.

Invariant: as of `Runner`.
"""

from __future__ import annotations

from vllm.lora.request import LoRARequest

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

    def shift(self, request: str, adapter: LoRARequest) -> None:
        if (state := self._of.requests.get(request)) is None:
            return
        state.lora_request = adapter
        batch = self._of.input_batch
        index = batch.req_id_to_index.get(request)
        if index is not None:
            old, new = int(batch.request_lora_mapping[index]), adapter.lora_int_id
            batch.lora_id_to_request_ids[old].discard(request)
            if not batch.lora_id_to_request_ids[old]:
                del batch.lora_id_to_request_ids[old], batch.lora_id_to_lora_request[old]
            batch.request_lora_mapping[index] = new
            batch.lora_id_to_request_ids.setdefault(new, set()).add(request)
            batch.lora_id_to_lora_request[new] = adapter

    def check_drafts(self) -> None:
        drafts.install(self._of, self._sampled)

    def tell_experts(self) -> Routing | None:
        return routed_experts.install(self._of)
