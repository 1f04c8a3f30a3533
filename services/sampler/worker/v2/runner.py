"""What the V2 model runner does otherwise.

Invariant: as of `Runner`.
"""

from __future__ import annotations

from vllm.lora.request import LoRARequest

from services.common.contract.experts.routing import Routing
from services.sampler.worker.runner import Runner
from services.sampler.worker.v2 import drafts, routed_experts
from services.sampler.worker.v2.grammar import GrammarMask
from services.sampler.worker.v2.prompt_scorer import PromptScorer
from services.sampler.worker.v2.sampled_logprobs import SampledLogprobs


class RunnerV2(Runner):
    """A V2 GPUModelRunner, whose parts that sample are only where the last layers are."""

    needs = (
        *("is_last_pp_rank", "sampler", "structured_outputs_worker", "prompt_logprobs_worker"),
        *("rejection_sampler", "req_states", "lora_state", "sample", "num_speculative_steps"),
        *("aux_output_connector", "vllm_config"),
    )

    def correct_sampling(self) -> None:
        # Its random numbers are of seed and position, so a token that is thrown away uses none.
        if self._of.is_last_pp_rank:
            self._grammar = GrammarMask(self._of.sampler, self._of.structured_outputs_worker)
            self._sampled = SampledLogprobs(self._of.sampler)

    def score_prompts(self) -> None:
        if self._of.is_last_pp_rank:
            self._of.prompt_logprobs_worker = PromptScorer(self._of)

    def shift(self, request: str, adapter: LoRARequest) -> None:
        # One that was given up is sent anew, with its adapter.
        if (index := self._of.req_states.req_id_to_index.get(request)) is not None:
            self._of.lora_state.lora_requests[request] = adapter
            self._of.lora_state.lora_ids[index] = adapter.lora_int_id

    def check_drafts(self) -> None:
        if self._of.is_last_pp_rank:
            drafts.install(self._of, self._grammar.masked, self._sampled.scores)

    def tell_experts(self) -> Routing | None:
        # vLLM has them here for all requests or none, by a setting of the engine.
        return routed_experts.install(self._of)
