"""How long a request may wait for its grammar in the process of the engine's core.

vLLM waits for as long as it takes, but for regular expressions (vllm-project/vllm#54003). A request that
waits has no steps, and an engine that has nothing else to do would count as stuck and be ended, and then the
next one that the request is sent to. Here its grammar counts as one that could not be made, so that vLLM ends
this request alone. Its thread goes on to its end.

Invariant: the time that others' grammars take before it is not counted.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from services.sampler.engine.grammars.steps import ALL_S, TOO_SLOW, InSteps, Steps

SECONDS_KEY = "tinsmith_grammar_seconds"
"""In vLLM's `additional_config`: the most that one grammar may take."""


def install(scheduler: Any, seconds: float) -> None:
    """Has a scheduler give up grammars that take longer, or keep a step for too long."""
    if not hasattr(scheduler, "structured_output_manager"):
        raise RuntimeError(
            f"this vLLM's {type(scheduler).__name__} has no structured_output_manager; check {__name__}"
        )
    manager = scheduler.structured_output_manager
    steps = Steps(together=min(ALL_S, seconds / 2))
    begin, accept, fill = manager.grammar_init, manager.accept_tokens, manager.grammar_bitmask

    def begun(request: Any) -> None:
        begin(request)
        asked = request.structured_output_request
        if asked is not None and isinstance(asked._grammar, Future):
            asked.grammar = InTime(asked._grammar, seconds, asked.structured_output_key, steps)

    def accepted(request: Any, tokens: list[int]) -> bool:
        whole = bool(accept(request, tokens))
        if not whole and isinstance(grammar := request.structured_output_request.grammar, InSteps):
            request.stop_reason = TOO_SLOW if grammar.slow else request.stop_reason
        return whole

    def filled(*args: Any, **kwargs: Any) -> Any:
        steps.begin()
        return fill(*args, **kwargs)

    manager.grammar_init, manager.accept_tokens, manager.grammar_bitmask = begun, accepted, filled


class InTime(Future[Any]):
    """A grammar that is being made; one that takes too long fails. vLLM asks in each step if it is done."""

    def __init__(self, of: Future[Any], seconds: float, constraint: Any, steps: Steps) -> None:
        super().__init__()
        self._of, self._seconds = of, seconds
        self._constraint, self._steps = constraint, steps
        self._since: float | None = None

    def done(self) -> bool:
        if self._of.done():
            return True
        if self._since is None and self._of.running():
            self._since = time.monotonic()
        return self._since is not None and time.monotonic() - self._since >= self._seconds

    def result(self, timeout: float | None = None) -> Any:
        if self.done() and not self._of.done():
            raise TimeoutError(f"no grammar after {self._seconds:g} s")
        return self._steps.bounded(self._constraint, self._of.result(timeout))
