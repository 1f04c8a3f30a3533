"""How long a request may wait for its grammar in the process of the engine's core.

vLLM waits for as long as it takes, but for regular expressions (vllm-project/vllm#54003). A request that
waits has no steps, and an engine that has nothing else to do would count as stuck and be ended, and then the
next one that the request is sent to. Here its grammar counts as one that could not be made, so that vLLM ends
this request alone, and one that others' grammars leave no thread to says so, to be sent again. What is at
work goes on to its end.

Invariant: no request waits longer than half its time for a thread and then its time for its grammar, or for
one of the same constraint that is made before. The time that others' grammars take does not count as its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.v1.engine import FinishReason

from services.sampler.engine.grammars.makers import Makers
from services.sampler.engine.grammars.steps import ALL_S, TOO_SLOW, Busy, InSteps, Steps

SECONDS_KEY = "tinsmith_grammar_seconds"
"""In vLLM's `additional_config`: the most that one grammar may take; half of it, wait."""

BUSY = "tinsmith: all threads for grammars are at others"
"""The stop reason of a sequence that found none."""


def install(scheduler: Any, seconds: float) -> None:
    """Has a scheduler give up grammars that take longer, or keep a step for too long."""
    if not hasattr(scheduler, "structured_output_manager"):
        raise RuntimeError(
            f"this vLLM's {type(scheduler).__name__} has no structured_output_manager; check {__name__}"
        )
    manager, update = scheduler.structured_output_manager, scheduler.update_from_output
    steps = Steps(together=min(ALL_S, seconds / 2))
    makers = manager.executor = Makers(manager.executor._max_workers)
    busy = set[str]()
    begin, accept, fill = manager.grammar_init, manager.accept_tokens, manager.grammar_bitmask

    def begun(request: Any) -> None:
        begin(request)
        asked = request.structured_output_request
        if asked is not None and isinstance(asked._grammar, Future):
            name = request.request_id
            asked.grammar = InTime(
                asked._grammar, seconds, asked.structured_output_key, makers, steps, lambda: busy.add(name)
            )

    def accepted(request: Any, tokens: list[int]) -> bool:
        whole = bool(accept(request, tokens))
        if not whole and isinstance(grammar := request.structured_output_request.grammar, InSteps):
            request.stop_reason = TOO_SLOW if grammar.slow else request.stop_reason
        return whole

    def filled(*args: Any, **kwargs: Any) -> Any:
        steps.begin()
        return fill(*args, **kwargs)

    def updated(scheduled: Any, made: Any) -> Any:
        outputs = update(scheduled, made)
        if busy:
            # vLLM ends in each step all whose grammars have failed since the last one.
            for output in (each for of_client in outputs.values() for each in of_client.outputs):
                if output.request_id in busy and output.finish_reason == FinishReason.ERROR:
                    output.stop_reason = BUSY
            busy.clear()
        return outputs

    manager.grammar_init, manager.accept_tokens, manager.grammar_bitmask = begun, accepted, filled
    scheduler.update_from_output = updated


class InTime(Future[Any]):
    """A grammar that is being made; one that takes too long fails. vLLM asks in each step if it is done.

    Args:
        busy: is called where it fails as others leave no thread to it.
    """

    def __init__(
        self,
        of: Future[Any],
        seconds: float,
        constraint: Any,
        makers: Makers,
        steps: Steps,
        busy: Callable[[], None],
    ) -> None:
        super().__init__()
        self._of, self._seconds = of, seconds
        self._constraint, self._makers, self._steps, self._busy = constraint, makers, steps, busy
        self._came = time.monotonic()

    def done(self) -> bool:
        if self._of.done():
            return True
        self._makers.look()
        now, since = time.monotonic(), self._makers.since(self._constraint)
        return now - self._came >= self._seconds / 2 if since is None else now - since >= self._seconds

    def result(self, timeout: float | None = None) -> Any:
        try:
            if not self._of.done():
                self._of.cancel()
                since = self._makers.since(self._constraint)
                if since is None or time.monotonic() - since < self._seconds:
                    raise Busy("no thread to make a grammar")
                self._makers.give_up(self._constraint)
                raise TimeoutError(f"no grammar after {self._seconds:g} s")
            return self._steps.bounded(self._constraint, self._of.result(timeout))
        except Busy:
            self._busy()
            raise
