"""The seam between Tinsmith and vLLM's two model runners, the class in a worker that computes its steps.

vLLM has two that do the same in different ways: V2, which it takes where it has Triton and every setting of
the engine is one that V2 knows, and V1. What differs between them stands behind `Runner`, once for each.
What they share (`get_model`, the manager of adapters) is used as it is.

Invariants: of a worker's answers nothing depends on which of them it has, but for the tokens that a seed
gives. All workers, of every rank and stage, change a request's adapter in front of the same step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from vllm.lora.request import LoRARequest

from services.common.contract.experts.routing import Routing
from services.sampler.worker.adapters.slots import WorkerSlots
from services.sampler.worker.cpu import adapters, experts, rotations

_SHIFTS = "tinsmith_shifts"


class Runner(ABC):
    """A worker's model runner, which has no requests yet.

    Args:
        of: vLLM's runner.
    """

    needs: ClassVar[tuple[str, ...]]
    """What this takes of vLLM's runner."""

    def __init__(self, of: Any) -> None:
        for name in (*self.needs, "execute_model", "get_model"):
            if not hasattr(of, name):
                raise RuntimeError(f"this vLLM's {type(of).__name__} has no {name}; check {__package__}")
        self._of = of
        self.steps = 0
        """Steps that it has finished."""
        self.routing: Routing | None = None
        """How its model routes tokens to experts, where it tells which of them have a request's."""

    def install(self) -> None:
        """Has it do all that vLLM lacks."""
        if getattr(self._of, "lora_config", None):
            self.slots = WorkerSlots(self._of.lora_manager, staged=self._of.device.type == "cuda")
            self.slots.install()
        if self._of.device.type == "cpu":
            if getattr(self._of, "lora_config", None):
                adapters.correct(self._of.lora_manager._adapter_manager)
            rotations.apply()
            experts.apply()
        self.correct_sampling()
        self.score_prompts()
        if self._of.speculative_config is not None:
            self.check_drafts()
        self.routing = self.tell_experts()
        self._follow_steps()

    @abstractmethod
    def correct_sampling(self) -> None:
        """Random numbers of a seeded request are used for its own tokens alone, and log-probabilities are the
        model's own, whatever constrains what is sampled, or of what was drawn from, as the request asks."""

    @abstractmethod
    def score_prompts(self) -> None:
        """Prompts are scored as their ScorePlan says, in place of vLLM's own prompt log-probabilities.

        vLLM's own, of either runner, send a prompt's rows through the LoRA logits processor, which picks
        adapters by the rows that are *sampled* in this step, one per request: two such requests in one step
        crash the engine on CPU, and on a GPU rows are scored with another request's adapter
        (vllm-project/vllm#16668, #51594). And they draw nothing, and V2's `prompt_logprobs` score every row
        of a step when one request wants some of its own.
        """

    @abstractmethod
    def check_drafts(self) -> None:
        """Drafted tokens change how many tokens a step makes, and none of them."""

    @abstractmethod
    def tell_experts(self) -> Routing | None:
        """Of requests that ask, which experts the layers of each step give their tokens to is told; None: it
        is not told here, of no request."""

    @abstractmethod
    def shift(self, request: str, adapter: LoRARequest) -> None:
        """A request that this may know has another adapter from the step on that is computed next."""

    def _follow_steps(self) -> None:
        execute = self._of.execute_model

        def followed(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            for request, adapter in attached(scheduled).items():
                self.shift(request, adapter)
            result = execute(scheduled, *args, **kwargs)
            # A step that nothing was scheduled for is no progress.
            self.steps += scheduled.total_num_scheduled_tokens > 0
            return result

        self._of.execute_model = followed


def installed(worker: Any) -> Runner:
    """The runner of a vLLM worker, with all that vLLM lacks."""
    # Each of these imports the parts of its own runner, and V2's take Triton.
    if worker.use_v2_model_runner:
        from services.sampler.worker.v2.runner import RunnerV2

        runner: Runner = RunnerV2(worker.model_runner)
    else:
        from services.sampler.worker.v1.runner import RunnerV1

        runner = RunnerV1(worker.model_runner)
    runner.install()
    return runner


def attach(scheduled: Any, adapters: Mapping[str, Any]) -> None:
    """Puts adapters (vLLM's LoRARequest), by the request that goes on with each, into what is scheduled for a
    step."""
    if adapters:
        # vLLM pickles it for other processes, with all attributes.
        setattr(scheduled, _SHIFTS, adapters)


def attached(scheduled: Any) -> Mapping[str, Any]:
    """What `attach` has put there."""
    found: Mapping[str, Any] = getattr(scheduled, _SHIFTS, {})
    return found
